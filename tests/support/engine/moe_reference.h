// One MoE layer in fp64 with plain loops, written from the formulas alone: what the engine must equal.
#pragma once

#include <cstdint>
#include <vector>

#include "common/layer_shape.h"

namespace lrmoe::testing {

// All tokens of all ranks, one after another, and all experts. Values are exactly representable in
// shape.dtype.
struct MoeProblem {
  LayerShape shape;
  std::vector<int64_t> tokens_of_rank;     // splits the tokens into sources
  std::vector<int32_t> expert_idx;         // [N, k]
  std::vector<float> alpha;                // [N, k]
  std::vector<float> x, dy;                // [N, H]
  std::vector<std::vector<float>> w1, w2;  // [E] of [fc1_width, H], [H, F]

  int64_t num_tokens() const;
  std::vector<int64_t> Counts() const;  // [E]
};

struct MoeResult {
  std::vector<double> y, dx;                  // [N, H]
  std::vector<double> dalpha;                 // [N, k]
  std::vector<std::vector<double>> dw1, dw2;  // [E]
  std::vector<double> score;                  // [N, k] alpha^2 ||g||^2 ||phi||^2
};

// Forward complete; backward of the pairs with kept[p] != 0 only. d(alpha): of all pairs when exact, else of
// kept ones.
MoeResult ReferenceLayer(const MoeProblem& problem, const std::vector<uint8_t>& kept,
                         bool exact_router_gradient);

// The pairs a correct selection keeps: per expert the quota[e] largest scores, ties to the lowest pair.
std::vector<uint8_t> ReferenceSelection(const MoeProblem& problem, const std::vector<float>& score,
                                        const std::vector<int64_t>& quota);

// max |actual - expected| / max |expected|; 0 when both are empty, infinity for a NaN.
double RelativeError(const std::vector<float>& actual, const std::vector<double>& expected);

// Rounds to the nearest bf16 value, ties to even.
float RoundToBf16(float value);

// A gated layer in fp32 that takes no time: E 4, k 2, H 16, F 8.
LayerShape SmallShape();

enum class Routing {
  kUniform,    // distinct random experts
  kSkewed,     // low experts are much more likely
  kOneExpert,  // every token's first choice is expert 0
};
// Random values in the shape's type; alphas positive. Tokens per rank as given.
MoeProblem RandomProblem(const LayerShape& shape, std::vector<int64_t> tokens_of_rank, Routing routing,
                         uint64_t seed);

}  // namespace lrmoe::testing
