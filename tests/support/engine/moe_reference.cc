#include "tests/support/engine/moe_reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "common/random.h"

namespace lrmoe::testing {
namespace {

double Sigmoid(double v) {
  return 1.0 / (1.0 + std::exp(-v));
}
double Silu(double v) {
  return v * Sigmoid(v);
}
double SiluSlope(double v) {
  return Sigmoid(v) * (1.0 + v * (1.0 - Sigmoid(v)));
}
double Gelu(double v) {
  return 0.5 * v * (1.0 + std::erf(v / std::sqrt(2.0)));
}
double GeluSlope(double v) {
  return 0.5 * (1.0 + std::erf(v / std::sqrt(2.0))) + v * std::exp(-0.5 * v * v) / std::sqrt(2.0 * M_PI);
}

struct PairForward {
  std::vector<double> a, phi, y;
};

PairForward ForwardPair(const MoeProblem& problem, int64_t token, int32_t e) {
  const int64_t h = problem.shape.hidden_size, f = problem.shape.intermediate_size,
                width = problem.shape.fc1_width();
  PairForward out{std::vector<double>(width, 0.0), std::vector<double>(f), std::vector<double>(h, 0.0)};
  for (int64_t i = 0; i < width; ++i)
    for (int64_t j = 0; j < h; ++j) out.a[i] += double{problem.w1[e][i * h + j]} * problem.x[token * h + j];
  for (int64_t i = 0; i < f; ++i) {
    if (problem.shape.gated)
      out.phi[i] = Silu(out.a[i]) * out.a[f + i];
    else
      out.phi[i] = problem.shape.activation == Activation::kSilu ? Silu(out.a[i]) : Gelu(out.a[i]);
  }
  for (int64_t i = 0; i < h; ++i)
    for (int64_t j = 0; j < f; ++j) out.y[i] += double{problem.w2[e][i * f + j]} * out.phi[j];
  return out;
}

void BackwardPair(const MoeProblem& problem, int64_t p, const PairForward& forward, MoeResult& result) {
  const int64_t h = problem.shape.hidden_size, f = problem.shape.intermediate_size,
                width = problem.shape.fc1_width();
  const int64_t token = p / problem.shape.top_k;
  const int32_t e = problem.expert_idx[p];
  const double alpha = problem.alpha[p];
  std::vector<double> dphi(f, 0.0), da(width, 0.0);
  for (int64_t i = 0; i < h; ++i) {
    const double delta = alpha * problem.dy[token * h + i];
    for (int64_t j = 0; j < f; ++j) {
      dphi[j] += delta * problem.w2[e][i * f + j];
      result.dw2[e][i * f + j] += delta * forward.phi[j];
    }
  }
  for (int64_t i = 0; i < f; ++i) {
    if (problem.shape.gated) {
      da[i] = dphi[i] * forward.a[f + i] * SiluSlope(forward.a[i]);
      da[f + i] = dphi[i] * Silu(forward.a[i]);
    } else {
      da[i] = dphi[i] * (problem.shape.activation == Activation::kSilu ? SiluSlope(forward.a[i])
                                                                       : GeluSlope(forward.a[i]));
    }
  }
  for (int64_t i = 0; i < width; ++i)
    for (int64_t j = 0; j < h; ++j) {
      result.dx[token * h + j] += da[i] * problem.w1[e][i * h + j];
      result.dw1[e][i * h + j] += da[i] * problem.x[token * h + j];
    }
}

}  // namespace

int64_t MoeProblem::num_tokens() const {
  return std::accumulate(tokens_of_rank.begin(), tokens_of_rank.end(), int64_t{0});
}

std::vector<int64_t> MoeProblem::Counts() const {
  std::vector<int64_t> counts(shape.num_experts, 0);
  for (int32_t e : expert_idx) ++counts[e];
  return counts;
}

MoeResult ReferenceLayer(const MoeProblem& problem, const std::vector<uint8_t>& kept,
                         bool exact_router_gradient) {
  const int64_t h = problem.shape.hidden_size, k = problem.shape.top_k,
                num_experts = problem.shape.num_experts;
  MoeResult result;
  result.y.assign(problem.num_tokens() * h, 0.0);
  result.dx.assign(problem.num_tokens() * h, 0.0);
  result.dalpha.assign(problem.num_tokens() * k, 0.0);
  result.score.assign(problem.num_tokens() * k, 0.0);
  result.dw1.assign(num_experts, std::vector<double>(problem.shape.fc1_width() * h, 0.0));
  result.dw2.assign(num_experts, std::vector<double>(h * problem.shape.intermediate_size, 0.0));
  for (int64_t p = 0; p < problem.num_tokens() * k; ++p) {
    const int64_t token = p / k;
    const PairForward forward = ForwardPair(problem, token, problem.expert_idx[p]);
    double g_norm2 = 0, phi_norm2 = 0, g_dot_y = 0;
    for (int64_t i = 0; i < h; ++i) {
      result.y[token * h + i] += problem.alpha[p] * forward.y[i];
      const double g = problem.dy[token * h + i];
      g_norm2 += g * g;
      g_dot_y += g * forward.y[i];
    }
    for (double v : forward.phi) phi_norm2 += v * v;
    result.score[p] = double{problem.alpha[p]} * problem.alpha[p] * g_norm2 * phi_norm2;
    if (exact_router_gradient || kept[p]) result.dalpha[p] = g_dot_y;
    if (kept[p]) BackwardPair(problem, p, forward, result);
  }
  return result;
}

std::vector<uint8_t> ReferenceSelection(const MoeProblem& problem, const std::vector<float>& score,
                                        const std::vector<int64_t>& quota) {
  std::vector<uint8_t> kept(problem.expert_idx.size(), 0);
  for (int32_t e = 0; e < problem.shape.num_experts; ++e) {
    std::vector<size_t> pairs;
    for (size_t p = 0; p < kept.size(); ++p)
      if (problem.expert_idx[p] == e) pairs.push_back(p);
    std::stable_sort(pairs.begin(), pairs.end(), [&](size_t a, size_t b) { return score[a] > score[b]; });
    for (int64_t i = 0; i < quota[e]; ++i) kept[pairs[i]] = 1;
  }
  return kept;
}

double RelativeError(const std::vector<float>& actual, const std::vector<double>& expected) {
  if (actual.size() != expected.size()) return std::numeric_limits<double>::infinity();
  double worst = 0, largest = 0;
  for (size_t i = 0; i < actual.size(); ++i) {
    if (!std::isfinite(actual[i])) return std::numeric_limits<double>::infinity();
    worst = std::max(worst, std::abs(actual[i] - expected[i]));
    largest = std::max(largest, std::abs(expected[i]));
  }
  return worst == 0 ? 0 : largest == 0 ? std::numeric_limits<double>::infinity() : worst / largest;
}

float RoundToBf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits += 0x7FFF + ((bits >> 16) & 1);
  bits &= 0xFFFF0000U;
  std::memcpy(&value, &bits, 4);
  return value;
}

LayerShape SmallShape() {
  LayerShape shape;
  shape.num_experts = 4;
  shape.top_k = 2;
  shape.hidden_size = 16;
  shape.intermediate_size = 8;
  shape.dtype = DataType::kFp32;
  return shape;
}

MoeProblem RandomProblem(const LayerShape& shape, std::vector<int64_t> tokens_of_rank, Routing routing,
                         uint64_t seed) {
  Random random(seed);
  const bool bf16 = shape.dtype == DataType::kBf16;
  const auto fill = [&](size_t n, double scale, bool round) {
    std::vector<float> out(n);
    for (float& v : out) {
      const double normal = random.Uniform() + random.Uniform() + random.Uniform() + random.Uniform() - 2.0;
      v = static_cast<float>(scale * normal * 1.7);
      if (round) v = RoundToBf16(v);
    }
    return out;
  };
  MoeProblem problem;
  problem.shape = shape;
  problem.tokens_of_rank = std::move(tokens_of_rank);
  const int64_t n = problem.num_tokens(), h = shape.hidden_size, f = shape.intermediate_size;
  problem.x = fill(n * h, 1.0, bf16);
  problem.dy = fill(n * h, 1.0, bf16);
  // Tokens differ in how much their gradients matter, as in training.
  for (int64_t t = 0; t < n; ++t) {
    const auto scale = static_cast<float>(std::exp2(static_cast<double>(random.Between(-3, 1))));
    for (int64_t i = 0; i < h; ++i) problem.dy[t * h + i] *= scale;
  }
  for (int32_t e = 0; e < shape.num_experts; ++e) {
    problem.w1.push_back(fill(shape.fc1_width() * h, 1.0 / std::sqrt(static_cast<double>(h)), bf16));
    problem.w2.push_back(fill(h * f, 1.0 / std::sqrt(static_cast<double>(f)), bf16));
  }
  for (int64_t t = 0; t < n; ++t) {
    std::vector<int32_t> chosen;
    if (routing == Routing::kOneExpert) chosen.push_back(0);
    while (static_cast<int32_t>(chosen.size()) < shape.top_k) {
      int32_t e = static_cast<int32_t>(random.Below(shape.num_experts));
      if (routing == Routing::kSkewed) e = std::min(e, static_cast<int32_t>(random.Below(shape.num_experts)));
      if (routing == Routing::kSkewed && random.Below(2) == 0)
        e = std::min(e, static_cast<int32_t>(random.Below(3)));
      if (std::find(chosen.begin(), chosen.end(), e) == chosen.end()) chosen.push_back(e);
    }
    for (int32_t e : chosen) {
      problem.expert_idx.push_back(e);
      problem.alpha.push_back(static_cast<float>(0.05 + 0.95 * random.Uniform()));
    }
  }
  return problem;
}

}  // namespace lrmoe::testing
