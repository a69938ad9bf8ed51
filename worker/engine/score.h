// What a pair is worth (paper, equation of R_u; design "Score"): only the source needs to know it, from
// scalars it has.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "worker/engine/engine_state.h"

namespace lrmoe::engine {

// Scores of all pairs of this source, [P], in fp32, by the plan's selection criterion:
//   lrm         alpha^2 ||g||^2 ||phi||^2      grad_norm2  ||g||^2      grad_abs  sum |g|
//   random      uniform in [0, 1) from (seed, invocation, global token, slot)
//   lrm_sampled sqrt(lrm) / (1 - random): an expert's largest are a priority sample of pairs of size
//   sqrt(lrm)
// `dy` [T, H] is the gradient before multiplication by alpha.
absl::Status ScorePairs(EngineState& state, const ForwardContext& context, const std::byte* dy,
                        std::span<float> scores);

// lrm_sampled: multiplies alpha of kept pairs by max(1, dropped / size), where `dropped` [E] is the largest
// score of an expert that was not kept. Over seeds the experts' gradients and dx are then those of the
// complete backward pass in expectation (priority sampling: Duffield, Lund, Thorup, J. ACM 54(6), 2007). Not
// in the paper, whose selection always drops the same kind of pairs. `pair_expert`, `kept`, `scores`: [P].
void ReweighSampled(ForwardContext& context, int32_t top_k, std::span<const int32_t> pair_expert,
                    std::span<const uint8_t> kept, std::span<const float> scores,
                    std::span<const float> dropped);

// rescale = rows: N_e / K_e by expert, [E]; 1 where nothing is dropped, or nothing kept that could be scaled.
// Depends on the plan alone: on no score, rank or placement.
std::vector<float> RescaleFactors(const LayerPlan& plan);

// Multiplies alpha of kept pairs by their expert's factor, so that the experts' gradients and dx, which are
// linear in alpha, grow by as much. They are those of the complete backward pass in expectation where every
// pair is as likely to be kept as any other (selection random); where the largest are kept, these then count
// for more than what was dropped. Not in the paper; tools/experiments measures where it helps. The exact
// d(alpha) lacks nothing and stays; the retained one is the caller's to multiply. `pair_expert`, `kept`: [P].
void RescaleKept(ForwardContext& context, std::span<const float> factors,
                 std::span<const int32_t> pair_expert, std::span<const uint8_t> kept);

// OutOfRange naming rank, token, slot, expert and value of the first score that is NaN or infinite.
absl::Status CheckFinite(const ForwardContext& context, int32_t rank, int32_t top_k,
                         std::span<const float> scores);

}  // namespace lrmoe::engine
