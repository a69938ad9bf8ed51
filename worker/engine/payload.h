// A token that goes to a rank for several of its pairs travels once, with an index per pair (design "Compact
// and exchange").
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/engine/engine_state.h"

namespace lrmoe::engine {

struct Payload {
  std::vector<int64_t> rows;  // [G] tokens to each rank
  int64_t total = 0;
  Buffer token;     // int32 [P]: first `total` tokens, ascending for each rank
  Buffer pair_row;  // int32 [P]: the row of a pair that travels among its rank's; others: unspecified
};

// `sent_pair` (int32, device): the pairs that travel, by rank, pairs_to [G] to each. Waits for the device:
// the host must know how many rows there are.
absl::StatusOr<Payload> PackPayload(EngineState& state, int64_t num_tokens, const Buffer& sent_pair,
                                    std::span<const int64_t> pairs_to);

// Rows that come from each source, [G]: its highest index says, and `indices` [G] where those of each lie
// among `words` (int32, device). Waits for the device where there is another source than this rank.
absl::StatusOr<std::vector<int64_t>> RowsFromSources(EngineState& state, const Payload& own,
                                                     std::span<const kernels::Range> indices,
                                                     const Buffer& words);

}  // namespace lrmoe::engine
