// Seeded random planning problems for the property tests.
#pragma once

#include <algorithm>
#include <cmath>

#include "common/random.h"
#include "controller/planner/problem.h"

namespace lrmoe::planner {

struct ProblemSize {
  int32_t max_experts = 12;
  int32_t max_ranks = 6;
  int32_t max_slots = 3;
  int64_t max_count = 60;
  bool uneven_rates = true;
  bool residents = true;
};

// Skewed counts, idle experts and sources, uneven ownership, slots, rates and nodes.
inline PlanningProblem RandomProblem(Random& random, const ProblemSize& size) {
  PlanningProblem problem;
  const int32_t num_experts = static_cast<int32_t>(random.Between(1, size.max_experts));
  const int32_t num_ranks = static_cast<int32_t>(random.Between(1, size.max_ranks));
  problem.counts = RoutedCounts(num_ranks, num_experts);
  const double skew = random.Uniform() * 2;
  for (int32_t e = 0; e < num_experts; ++e) {
    const double heat = random.Below(6) == 0 ? 0 : std::pow(random.Uniform(), skew * 2);
    for (int32_t s = 0; s < num_ranks; ++s)
      problem.counts.at(s, e) =
          static_cast<int64_t>(heat * random.Uniform() * static_cast<double>(size.max_count));
  }
  if (random.Below(8) == 0)
    std::ranges::fill(problem.counts.source(static_cast<int32_t>(random.Below(num_ranks))), 0);
  problem.owner = ContiguousOwners(num_experts, num_ranks);
  if (random.Below(3) == 0)
    for (int32_t& owner : problem.owner) owner = static_cast<int32_t>(random.Below(num_ranks));
  problem.cluster.ranks.resize(num_ranks);
  const bool uneven = size.uneven_rates && random.Below(3) == 0;
  const int32_t slots = static_cast<int32_t>(random.Between(0, size.max_slots));
  for (int32_t g = 0; g < num_ranks; ++g) {
    RankResources& rank = problem.cluster.ranks[g];
    rank.node = g / static_cast<int32_t>(random.Between(1, 3));
    rank.replica_slots =
        random.Below(4) == 0 ? static_cast<int32_t>(random.Between(0, size.max_slots)) : slots;
    rank.rows_per_ms = uneven ? 1.0 + random.Uniform() * 9 : 10.0;
  }
  if (size.residents && random.Below(2) == 0) {
    problem.resident.resize(num_ranks);
    for (int32_t g = 0; g < num_ranks; ++g)
      for (int32_t e = 0; e < num_experts; ++e)
        if (problem.owner[e] != g && random.Below(4) == 0 &&
            static_cast<int32_t>(problem.resident[g].size()) < problem.cluster.ranks[g].replica_slots)
          problem.resident[g].push_back(e);
  }
  // Small weights: replicas are worth their transfer.
  problem.model.hidden_size = 16;
  problem.model.intermediate_size = 8;
  problem.policy.balance_tolerance = random.Below(2) == 0 ? 0.01 : 0.05;
  return problem;
}

}  // namespace lrmoe::planner
