// What `lrmoe-bench layer` and its companions run: a layer, its routing and its tensors, all from a seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "common/layer_shape.h"

namespace lrmoe::bench {

// One source rank. Rows lie one after another, in the compute type.
struct RankInput {
  int64_t num_tokens = 0;           // T
  std::vector<int32_t> expert_idx;  // [T, k], distinct within a token
  std::vector<float> alpha;         // [T, k], positive, each token's sum to 1
  std::vector<std::byte> x, dy;     // [T, H]
};

// Tokens choose experts by Zipf's law: the j-th most popular expert has weight (j + 1)^-skew, experts are
// popular in an order drawn from the seed, and no expert gets a token twice (inclusion probabilities are
// capped at 1). skew 0: balanced.
RankInput MakeRankInput(const LayerShape& shape, int64_t num_tokens, double skew, uint64_t seed,
                        int32_t rank);

// Values in [-scale, scale) of the type, for weights: [count].
std::vector<std::byte> RandomElements(DataType type, int64_t count, float scale, uint64_t seed);

// Floating-point operations of the layer's GEMMs, forward for each routed and backward for each kept row.
double ForwardFlop(const LayerShape& shape, int64_t rows);
double BackwardFlop(const LayerShape& shape, int64_t rows);

}  // namespace lrmoe::bench
