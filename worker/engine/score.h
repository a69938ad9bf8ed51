// What a pair is worth (paper, equation of R_u; design "Score"): only the source needs to know it, from
// scalars it has.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "worker/engine/engine_state.h"

namespace lrmoe::engine {

// Scores of all pairs of this source, [P], in fp32, by the plan's selection criterion:
//   lrm         alpha^2 ||g||^2 ||phi||^2      grad_norm2  ||g||^2      grad_abs  sum |g|
//   random      uniform in [0, 1) from (seed, invocation, global token, slot)
// `dy` [T, H] is the gradient before multiplication by alpha.
absl::Status ScorePairs(EngineState& state, const ForwardContext& context, const std::byte* dy,
                        std::span<float> scores);

// OutOfRange naming rank, token, slot, expert and value of the first score that is NaN or infinite.
absl::Status CheckFinite(const ForwardContext& context, int32_t rank, int32_t top_k,
                         std::span<const float> scores);

}  // namespace lrmoe::engine
