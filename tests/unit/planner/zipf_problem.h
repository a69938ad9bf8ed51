// The skewed workload on which figures of the comparison policies were published: rows of a Zipf law over
// shuffled experts, at most one per token and expert.
#pragma once

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/random.h"
#include "controller/planner/problem.h"

namespace lrmoe::planner {

// Rows per expert of `num_tokens` tokens with `top_k` distinct experts each.
inline std::vector<int64_t> ZipfRows(int32_t num_experts, int64_t num_tokens, int32_t top_k, double skew,
                                     uint64_t seed) {
  Random random(seed);
  std::vector<int32_t> shuffled(num_experts);
  std::iota(shuffled.begin(), shuffled.end(), 0);
  for (int32_t i = num_experts - 1; i >= 1; --i)
    std::swap(shuffled[i], shuffled[random.Next() % static_cast<uint64_t>(i + 1)]);
  std::vector<double> weight(num_experts);
  for (int32_t j = 0; j < num_experts; ++j) weight[shuffled[j]] = std::pow(j + 1.0, -skew);
  const auto sum_at = [&](double c) {
    double sum = 0;
    for (double w : weight) sum += std::min(1.0, c * w);
    return sum;
  };
  double low = 0, high = 1;
  while (sum_at(high) < top_k) high *= 2;
  for (int step = 0; step < 100; ++step) {
    const double middle = (low + high) / 2;
    (sum_at(middle) < top_k ? low : high) = middle;
  }
  const double sum = sum_at(high);
  const int64_t total = num_tokens * top_k;
  std::vector<int64_t> rows(num_experts);
  std::vector<std::pair<double, int32_t>> fraction(num_experts);
  int64_t left = total;
  for (int32_t e = 0; e < num_experts; ++e) {
    const double share = static_cast<double>(total) * std::min(1.0, high * weight[e]) / sum;
    rows[e] = static_cast<int64_t>(std::floor(share));
    fraction[e] = {static_cast<double>(rows[e]) - share, e};
    left -= rows[e];
  }
  std::sort(fraction.begin(), fraction.end());
  for (int64_t i = 0; i < left; ++i) ++rows[fraction[i].second];
  return rows;
}

// Sources as even as whole rows allow, owners contiguous, every rank with `slots` slots.
inline PlanningProblem EvenProblem(int32_t num_experts, int32_t num_ranks, const std::vector<int64_t>& rows,
                                   int32_t slots) {
  PlanningProblem problem;
  problem.counts = RoutedCounts(num_ranks, num_experts);
  for (int32_t e = 0; e < num_experts; ++e)
    for (int32_t s = 0; s < num_ranks; ++s)
      problem.counts.at(s, e) = rows[e] / num_ranks + (s < rows[e] % num_ranks);
  problem.owner = ContiguousOwners(num_experts, num_ranks);
  problem.cluster.ranks.resize(num_ranks);
  for (RankResources& rank : problem.cluster.ranks) rank.replica_slots = slots;
  return problem;
}

// 8192 tokens per rank, top 8.
inline PlanningProblem ZipfProblem(int32_t num_experts, int32_t num_ranks, double skew, uint64_t seed,
                                   int32_t slots) {
  const std::vector<int64_t> rows = ZipfRows(num_experts, int64_t{8192} * num_ranks, 8, skew, seed);
  PlanningProblem problem = EvenProblem(num_experts, num_ranks, rows, slots);
  problem.policy.rates = {1.0};
  return problem;
}

}  // namespace lrmoe::planner
