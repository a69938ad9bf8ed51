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
#include "kernels/pairs.h"
#include "worker/engine/buffers.h"
#include "worker/engine/engine_state.h"
#include "worker/engine/exchange.h"

namespace lrmoe::engine {

// True when expert e keeps some of its pairs but not all: only then is anything scored or exchanged for it.
std::vector<bool> SelectiveExperts(const LayerPlan& plan);

// What this source keeps. Buffers lie in the device's memory.
struct SelectedPairs {
  Buffer kept;  // uint8 [P] by position: 1 or 0
  // int32 [P]: the pairs that an instance's stretch of the send order keeps, from its first position on.
  Buffer kept_pair;
  // Once the device was waited for.
  std::vector<int32_t> num_kept;  // [instances]
  double total_score = 0, kept_score = 0;
};

class Selector {
 public:
  // All outlive it.
  Selector(EngineState& state, Exchange& exchange, ForwardContext& context);
  ~Selector();

  // Collective, where some expert is selective. `scores` (float, [P] by position) is not looked at for other
  // experts; what else it needs by pair comes from the arena (common/memory_model.h, "selection").
  absl::Status Select(const Buffer& scores);
  // Then, where the plan wants it, corrects the weights of kept pairs.
  //   lrm_sampled: alpha times max(1, dropped / size), where `dropped` is the largest score of the expert
  //   that no source kept. Over seeds the experts' gradients and dx are then those of the complete backward
  //   pass in expectation (priority sampling: Duffield, Lund, Thorup, J. ACM 54(6), 2007). Not in the paper,
  //   whose selection always drops the same kind of pairs. rescale = rows: alpha times RescaleFactors.
  void CorrectWeights(const Buffer& scores);
  // Once, at the end. Waits for the device where some expert is selective.
  absl::StatusOr<SelectedPairs> Finish();

 private:
  // The selective experts of the exchange: where their scores and verdicts lie.
  struct Layout {
    std::vector<int32_t> experts;                    // selective, by (owner, expert)
    std::vector<int64_t> pairs;                      // [experts.size() * G] pairs of (expert, source)
    std::vector<int64_t> send_rows, recv_rows;       // [G] scores to each owner, from each source
    std::vector<int64_t> verdicts_out, verdicts_in;  // [G] verdicts this owner sends, this source gets
    int64_t most_pairs = 0;                          // of one expert owned here
  };
  Layout LayOut() const;
  kernels::Range PairsHere(size_t instance_idx) const;  // of this source, in send order
  absl::Status ExchangeScores(const Layout& layout, const Buffer& scores);
  void Judge(const Layout& layout, const Buffer& received, const Buffer& scratch, const Buffer& verdicts);

  EngineState& state_;
  Exchange& exchange_;
  ForwardContext& context_;
  const LayerPlan& plan_;
  std::vector<int32_t> first_instance_;           // [E + 1]: an expert's instances lie together
  std::vector<int32_t> verdict_of_;               // [E] into verdicts_, or a KeepRule's kAll or kNone
  Buffer verdicts_;                               // of the selective experts of this source's pairs
  Buffer pair_;                                   // int32 [P]: the pair at each position
  std::vector<double> total_score_, kept_score_;  // by range
  SelectedPairs selected_;
};

}  // namespace lrmoe::engine
