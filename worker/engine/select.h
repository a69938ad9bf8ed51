// Exact global selection of the pairs whose backward runs (paper, equation of R_u and Algorithm 1, lines
// 15-17). Exactly K_e pairs of expert e survive over all sources and instances: the K_e largest scores, ties
// to the lowest (source, token, slot). Scalars travel, rows never do; the outcome does not depend on ranks or
// placement.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan.h"
#include "worker/engine/buffers.h"
#include "worker/engine/exchange.h"

namespace lrmoe::engine {

// What one source keeps of one expert: scores above the threshold, and the first `ties` of those equal to it.
struct Verdict {
  float threshold = 0;
  int32_t ties = 0;
  float dropped = 0;  // the largest score of all sources that is not kept; 0 when all are
};

// Owner's part. `scores` of one expert's pairs: all sources one after another, counts[s] of source s, each in
// (token, slot) order. Returns one verdict per source. 0 <= quota <= scores.size() <= scratch.size().
std::vector<Verdict> SelectExpert(std::span<const float> scores, std::span<const int64_t> counts,
                                  int64_t quota, std::span<uint32_t> scratch);

// Source's part: kept[p] = 1 for the pairs [P], in (token, slot) order, that the verdict of their expert
// keeps, 0 otherwise. `verdicts` [E]: their ties are used up.
void MarkKept(std::span<const int32_t> pair_expert, std::span<const float> pair_score,
              std::span<Verdict> verdicts, std::span<uint8_t> kept);

// True when expert e keeps some of its pairs but not all: only then is anything scored or exchanged for it.
std::vector<bool> SelectiveExperts(const LayerPlan& plan);

// Collective. `pair_expert` and `pair_score` [P] of this source in (token, slot) order (scores of other
// experts than the selective ones are ignored); fills `kept` [P]. What it needs by pair comes from `arena`
// (host memory; common/memory_model.h, "selection"). Returns by expert [E] the largest score
// that no source kept, for the selective experts of this source's pairs; 0 for others.
absl::StatusOr<std::vector<float>> SelectPairs(Exchange& exchange, Arena& arena, const LayerPlan& plan,
                                               std::span<const int32_t> owner,
                                               std::span<const int32_t> pair_expert,
                                               std::span<const float> pair_score, std::span<uint8_t> kept);

}  // namespace lrmoe::engine
