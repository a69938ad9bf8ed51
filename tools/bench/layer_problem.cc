#include "tools/bench/layer_problem.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "common/random.h"

namespace lrmoe::bench {
namespace {

// Inclusion probabilities of the experts in one token's choice; they sum to k.
std::vector<double> InclusionProbabilities(const LayerShape& shape, double skew, uint64_t seed) {
  const int32_t num_experts = shape.num_experts;
  std::vector<int32_t> order(num_experts);
  std::iota(order.begin(), order.end(), 0);
  Random random(seed);
  for (int32_t i = num_experts - 1; i > 0; --i) std::swap(order[i], order[random.Below(i + 1)]);
  std::vector<double> weight(num_experts);
  for (int32_t j = 0; j < num_experts; ++j) weight[order[j]] = std::pow(j + 1.0, -skew);

  const auto sum_at = [&](double factor) {
    double sum = 0;
    for (double w : weight) sum += std::min(1.0, factor * w);
    return sum;
  };
  double low = 0, high = 1;
  while (sum_at(high) < shape.top_k && high < 0x1.0p60) high *= 2;
  for (int step = 0; step < 100; ++step) {
    const double middle = (low + high) / 2;
    (sum_at(middle) < shape.top_k ? low : high) = middle;
  }
  for (double& w : weight) w = std::min(1.0, high * w);
  return weight;
}

}  // namespace

std::vector<std::byte> RandomElements(DataType type, int64_t count, float scale, uint64_t seed) {
  const int64_t size = SizeInBytes(type);
  std::vector<std::byte> out(count * size);
  Random random(seed);
  for (int64_t i = 0; i < count; ++i) {
    const float value = scale * static_cast<float>(2 * random.Uniform() - 1);
    // The upper half of an fp32 number is a bf16 number.
    std::memcpy(&out[i * size], reinterpret_cast<const char*>(&value) + (4 - size), size);
  }
  return out;
}

RankInput MakeRankInput(const LayerShape& shape, int64_t num_tokens, double skew, uint64_t seed,
                        int32_t rank) {
  const std::vector<double> probability = InclusionProbabilities(shape, skew, seed);
  const int32_t k = shape.top_k;
  RankInput input;
  input.num_tokens = num_tokens;
  Random random(seed ^ (0xA0761D6478BD642FULL * static_cast<uint64_t>(rank + 1)));
  for (int64_t token = 0; token < num_tokens; ++token) {
    // Systematic sampling: the points u, u + 1, ... on the line of probabilities; none is longer than 1.
    double next = random.Uniform(), end = 0;
    int32_t chosen = 0;
    for (int32_t e = 0; e < shape.num_experts && chosen < k; ++e) {
      end += probability[e];
      const int32_t left = shape.num_experts - e;
      if (next >= end && left > k - chosen) continue;  // the second: rounding must not lose a choice
      input.expert_idx.push_back(e);
      next += 1;
      ++chosen;
    }
    double sum = 0;
    for (int32_t j = 0; j < k; ++j) {
      const double weight = 0.1 + random.Uniform();
      input.alpha.push_back(static_cast<float>(weight));
      sum += weight;
    }
    for (int32_t j = 0; j < k; ++j) input.alpha[token * k + j] /= static_cast<float>(sum);
  }
  const int64_t elements = num_tokens * shape.hidden_size;
  input.x = RandomElements(shape.dtype, elements, 1.0F, random.Next());
  input.dy = RandomElements(shape.dtype, elements, 1.0F, random.Next());
  return input;
}

double ForwardFlop(const LayerShape& shape, int64_t rows) {
  return 2.0 * static_cast<double>(shape.parameters_per_expert()) * static_cast<double>(rows);
}

double BackwardFlop(const LayerShape& shape, int64_t rows) {
  return 2 * ForwardFlop(shape, rows);
}

}  // namespace lrmoe::bench
