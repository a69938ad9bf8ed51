// What a pair is worth (paper, equation of R_u; design "Score"): only the source needs to know it, from
// scalars it has.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "worker/engine/engine_state.h"

namespace lrmoe::engine {

// Where a pair's draw comes from (kernels/draw.h): the seed of the plan and the invocation, and the pair
// counted over all ranks' tokens. No rank and no other pair has a part in it.
struct DrawSource {
  uint64_t seed = 0, first_pair = 0;
};
DrawSource DrawsOf(const ForwardContext& context, int32_t top_k);

// Scores of all pairs of this source, [P] in send order, in fp32, by the plan's selection criterion:
//   lrm         alpha^2 ||g||^2 ||phi||^2      grad_norm2  ||g||^2      grad_abs  sum |g|
//   random      uniform in [0, 1) from (seed, invocation, global token, slot)
//   lrm_sampled sqrt(lrm) / (1 - random): an expert's largest are a priority sample of pairs of size
//   sqrt(lrm)
// `dy` [T, H] is the gradient before multiplication by alpha. `bad_pair` [1], once the device was waited for:
// the lowest pair whose score is NaN or infinite, or -1.
absl::Status ScorePairs(EngineState& state, const ForwardContext& context, const std::byte* dy,
                        const Buffer& scores, std::span<int64_t> bad_pair);

// OutOfRange naming rank, token, slot, expert and value of the score of `bad_pair`; OK when it is -1.
absl::Status CheckFinite(EngineState& state, const ForwardContext& context, int64_t bad_pair,
                         const Buffer& scores);

// rescale = rows: N_e / K_e by expert, [E], with which the weights of kept pairs are multiplied, so that the
// experts' gradients and dx, which are linear in them, grow by as much; 1 where nothing is dropped, or
// nothing kept that could be scaled. Depends on the plan alone: on no score, rank or placement. They are
// those of the complete backward pass in expectation where every pair is as likely to be kept as any other
// (selection random); where the largest are kept, these then count for more than what was dropped. Not in the
// paper; tools/experiments measures where it helps. The exact d(alpha) lacks nothing and stays; the retained
// one is multiplied like the weights.
std::vector<float> RescaleFactors(const LayerPlan& plan);

}  // namespace lrmoe::engine
