#include "worker/engine/payload.h"

#include <utility>

#include "common/status_macros.h"
#include "worker/engine/routing.h"

namespace lrmoe::engine {

absl::StatusOr<Payload> PackPayload(EngineState& state, int64_t num_tokens, const Buffer& sent_pair,
                                    std::span<const int64_t> pairs_to) {
  Arena& arena = state.rows();
  const int64_t pairs = num_tokens * state.shape().top_k;
  Payload payload;
  std::vector<int32_t> rows(pairs_to.size());
  LRMOE_ASSIGN_OR_RETURN(Buffer destination, arena.Take(pairs * 4, "payload destinations"));
  LRMOE_ASSIGN_OR_RETURN(payload.token, arena.Take(pairs * 4, "payload tokens"));
  LRMOE_ASSIGN_OR_RETURN(payload.pair_row, arena.Take(pairs * 4, "payload rows"));
  state.device->PackPayload({num_tokens, state.shape().top_k, pairs_to, sent_pair.as<int32_t>().data(),
                             destination.as<int32_t>().data(), payload.token.as<int32_t>().data(),
                             payload.pair_row.as<int32_t>().data(), rows});
  LRMOE_RETURN_IF_ERROR(state.device->Wait());
  payload.rows.assign(rows.begin(), rows.end());
  payload.total = Sum(payload.rows);
  if (payload.total == payload.rows[0]) return payload;  // nothing lies between the tokens of two ranks
  // Each rank's tokens begin where its pairs do: brought together in the place of the destinations.
  const std::vector<int64_t> from = Offsets(pairs_to), to = Offsets(payload.rows);
  std::vector<kernels::Stretch> stretches;
  for (size_t r = 0; r < pairs_to.size(); ++r) stretches.push_back({from[r], to[r], payload.rows[r]});
  state.device->CopyStretches(stretches, payload.token.data(), destination.data());
  payload.token = std::move(destination);
  return payload;
}

absl::StatusOr<std::vector<int64_t>> RowsFromSources(EngineState& state, const Payload& own,
                                                     std::span<const kernels::Range> indices,
                                                     const Buffer& words) {
  if (state.num_ranks() == 1) return own.rows;
  std::vector<int32_t> highest(indices.size());
  state.device->MaxOfRanges(indices, words.as<int32_t>().data(), highest);
  LRMOE_RETURN_IF_ERROR(state.device->Wait());
  std::vector<int64_t> rows;
  for (const int32_t index : highest) rows.push_back(index + 1);
  return rows;
}

}  // namespace lrmoe::engine
