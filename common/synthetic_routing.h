// Made-up routing to plan for: the field's public workloads W0..W7 and Zipf popularity. Every invocation is a
// pure function of (workload, seed, step, layer). Each token has exactly top_k distinct experts: a source
// with T tokens contributes T x top_k pairs, at most T to one expert.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/counts.h"

namespace lrmoe {

enum class SyntheticKind : uint8_t {
  kBalanced = 0,       // W0: every expert alike
  kHotExperts = 1,     // W1: one expert in 16, anywhere, 8 times as popular
  kHotRank = 2,        // W2: the experts of one rank 4 times as popular
  kHotSpread = 3,      // W3: as many hot experts as in W2, equally hot, dealt to the ranks in turn
  kRaggedSources = 4,  // W4: W1, the sources' tokens growing from none to twice the mean
  kZeroLoad = 5,  // W5: the experts of every fourth rank and every second one elsewhere idle, every fourth
                  // source without tokens
  kRotating = 6,  // W6: 8 times as popular: E/16 consecutive experts, the next E/16 in the next step
  kBurst = 7,     // W7: even, but in every eighth step one expert is 64 times as popular
  kZipf = 8,      // expert number j of a seeded order has popularity (j + 1)^-alpha
};

struct SyntheticWorkload {
  SyntheticKind kind = SyntheticKind::kBalanced;
  double alpha = 0;  // of kZipf
};

// "W0" .. "W7", or "zipf:ALPHA" with ALPHA from 0 to 10.
absl::StatusOr<SyntheticWorkload> ParseSyntheticWorkload(absl::string_view text);
std::string ToString(const SyntheticWorkload& workload);

struct SyntheticOptions {
  SyntheticWorkload workload;
  int32_t num_experts = 128;       // 1..4096, owned in contiguous blocks (cluster.h)
  int32_t num_ranks = 8;           // 1..1024, each a source
  int64_t tokens_per_rank = 4096;  // 0..2^30
  int32_t top_k = 8;               // 1..min(num_experts, 64)
  uint64_t seed = 0;
};

// InvalidArgument naming the field, its value and the allowed range.
absl::Status Validate(const SyntheticOptions& options);

// The invocation `step` of `layer`, both >= 0; `options` must be valid. Each source and step sees popularity
// through its own noise of up to a fifth, except under W0 and in step 0 of Zipf. That step is the exact
// generator of the literature: popularity capped at one pair per token, rounded by largest remainder, dealt
// evenly to the sources.
RoutedCounts SyntheticCounts(const SyntheticOptions& options, int64_t step, int32_t layer);

}  // namespace lrmoe
