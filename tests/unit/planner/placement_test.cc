#include <catch2/catch.hpp>

#include "controller/planner/planner.h"
#include "controller/planner/workload.h"
#include "tests/unit/planner/random_problem.h"
#include "tests/unit/planner/slow_placement.h"

namespace lrmoe::planner {
namespace {

std::vector<int64_t> RoomAt(const Workload& work, double level) {
  std::vector<int64_t> room;
  for (int32_t g = 0; g < work.num_ranks; ++g) room.push_back(work.capacity.RowsAt(level, g));
  return room;
}

double ForwardPeak(const Workload& work, const LayerPlan& plan) {
  double peak = 0;
  for (int32_t g = 0; g < work.num_ranks; ++g)
    peak = std::max(peak, static_cast<double>(plan.ranks[g].forward_rows) / work.capacity.weight[g]);
  return peak;
}

TEST_CASE("the tolerance is reached whenever it can be, with hardly more than the fewest new replicas",
          "[placement]") {
  Random random(41);
  int reachable = 0, easy = 0, reached = 0, at_fewest = 0, one_more = 0, unreachable = 0, lowest = 0;
  for (int trial = 0; trial < 12000; ++trial) {
    CAPTURE(trial);
    const bool wide = random.Below(4) == 0;
    const PlanningProblem problem =
        RandomProblem(random, {.max_experts = wide ? 6 : 8, .max_ranks = wide ? 5 : 4, .max_slots = 2});
    const Workload work = MakeWorkload(problem);
    if (work.num_ranks == 1 || work.total == 0) continue;
    const auto plan = Plan(problem);
    REQUIRE(plan.ok());
    const double peak = ForwardPeak(work, *plan);
    SlowPlacements placements(problem, work.rows);
    const double target = work.TargetLevel(work.total, problem.policy.balance_tolerance);
    const int fewest = placements.FewestNew(RoomAt(work, target));
    if (fewest == SlowPlacements::kNone) {
      ++unreachable;
      lowest += placements.FewestNew(RoomAt(work, peak * 0.99)) == SlowPlacements::kNone;
      continue;
    }
    if (fewest == 0) {
      ++easy;
      CHECK(peak <= target);
      CHECK(plan->new_replicas == 0);
      continue;
    }
    ++reachable;
    reached += peak <= target;
    at_fewest += peak <= target && plan->new_replicas <= fewest;
    one_more += peak <= target && plan->new_replicas <= fewest + 1;
  }
  WARN("of " << reachable << " problems whose tolerance takes new replicas " << reached << " reach it, "
             << at_fewest << " with the fewest new replicas, " << one_more << " with at most one more; of "
             << unreachable << " out of reach " << lowest << " are within 1 % of the lowest peak");
  CHECK(reachable > 2000);
  CHECK(easy > 500);
  CHECK(reached == reachable);
  CHECK(at_fewest >= 0.99 * reachable);
  CHECK(one_more >= 0.999 * reachable);
  CHECK(lowest >= 0.97 * unreachable);
}

// The replicas of a plan as the residents of the next one.
std::vector<std::vector<int32_t>> ResidentsOf(const LayerPlan& plan) {
  std::vector<std::vector<int32_t>> resident(plan.ranks.size());
  for (const InstancePlan& instance : plan.instances)
    if (!instance.owner) resident[instance.rank_idx].push_back(instance.expert_idx);
  return resident;
}

TEST_CASE("what the last plan brought in serves the same counts again", "[placement]") {
  Random random(42);
  int with_replicas = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    CAPTURE(trial);
    PlanningProblem problem = RandomProblem(random, {.max_experts = 24, .max_ranks = 8});
    const auto first = Plan(problem);
    REQUIRE(first.ok());
    const Workload work = MakeWorkload(problem);
    if (ForwardPeak(work, *first) > work.TargetLevel(work.total, problem.policy.balance_tolerance)) continue;
    problem.resident = ResidentsOf(*first);
    const auto second = Plan(problem);
    REQUIRE(second.ok());
    CHECK(second->new_replicas == 0);
    CHECK(ForwardPeak(work, *second) <= ForwardPeak(work, *first));
    with_replicas += first->instances.size() > static_cast<size_t>(work.num_experts);
  }
  CHECK(with_replicas > 500);
}

// Microseconds to send a replica's weights and to return its gradient.
double TransferUs(const PlanningProblem& problem, int32_t from, int32_t to) {
  const auto& ranks = problem.cluster.ranks;
  const double gb_per_s = ranks[from].node == ranks[to].node ? problem.cluster.bandwidth.intra_node_gb_per_s
                                                             : problem.cluster.bandwidth.inter_node_gb_per_s;
  return 3.0 * problem.model.hidden_size * problem.model.intermediate_size *
         static_cast<double>(problem.model.weight_bytes + problem.model.gradient_bytes) / (gb_per_s * 1e3);
}

TEST_CASE("every new replica pays for its weights, all of them together for their gradients too",
          "[placement]") {
  Random random(43);
  int made = 0, fewer = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    CAPTURE(trial);
    PlanningProblem problem = RandomProblem(random, {.max_experts = 16, .residents = false});
    const auto cheap = Plan(problem);
    REQUIRE(cheap.ok());
    problem.model.hidden_size = 2048;
    problem.model.intermediate_size = static_cast<int32_t>(random.Between(100, 40000));
    const auto plan = Plan(problem);
    REQUIRE(plan.ok());
    const Workload work = MakeWorkload(problem);
    double fastest = 0, slowest_us = 0;
    std::vector<double> sends(work.num_ranks, 0), receives(work.num_ranks, 0);
    for (const auto& rank : problem.cluster.ranks) fastest = std::max(fastest, rank.rows_per_ms);
    for (const InstancePlan& instance : plan->instances) {
      if (!instance.is_new) continue;
      const int32_t owner = problem.owner[instance.expert_idx];
      const double us = TransferUs(problem, owner, instance.rank_idx);
      const double weights_us = us / 3;  // the gradient is twice as large
      CHECK(static_cast<double>(instance.forward_rows) / problem.cluster.ranks[owner].rows_per_ms * 1e3 >=
            weights_us * (1 - 1e-9));
      slowest_us = std::max({slowest_us, sends[owner] += us, receives[instance.rank_idx] += us});
    }
    const double saved_us = (work.owner_level - ForwardPeak(work, *plan)) / fastest * 1e3;
    CHECK(saved_us >= slowest_us * (1 - 1e-9));
    made += plan->new_replicas > 0;
    fewer += plan->new_replicas > 0 && plan->new_replicas < cheap->new_replicas;
  }
  CHECK(made > 300);
  CHECK(fewer > 100);
}

TEST_CASE("larger problems with little memory here and there are planned within it", "[placement]") {
  Random random(44);
  int feasible = 0, lowered = 0, with_replicas = 0;
  for (int trial = 0; trial < 600; ++trial) {
    CAPTURE(trial);
    PlanningProblem problem =
        RandomProblem(random, {.max_experts = 64, .max_ranks = 24, .max_slots = 4, .max_count = 4000});
    const auto roomy = Plan(problem);
    REQUIRE(roomy.ok());
    for (size_t g = 0; g < roomy->ranks.size(); ++g)
      if (random.Below(3) == 0)
        problem.cluster.ranks[g].memory_bytes = static_cast<int64_t>(
            (0.6 + 0.8 * random.Uniform()) * static_cast<double>(roomy->ranks[g].memory_bytes.total()));
    problem.policy.on_infeasible = OnInfeasible::kBestEffort;
    const auto plan = Plan(problem);
    REQUIRE(plan.ok());
    const absl::Status legal = CheckPlan(problem, *plan);
    CAPTURE(legal.ToString());
    REQUIRE(legal.ok());
    CHECK(*Plan(problem) == *plan);
    if (!plan->feasible) continue;
    for (size_t g = 0; g < plan->ranks.size(); ++g)
      CHECK(plan->ranks[g].memory_bytes.total() <= problem.cluster.ranks[g].memory_bytes);
    ++feasible;
    lowered += plan->retention_rate < 1;
    with_replicas += plan->new_replicas > 0;
  }
  CHECK(feasible > 300);
  CHECK(lowered > 30);
  CHECK(with_replicas > 150);
}

TEST_CASE("receivers on the sender's node are preferred", "[placement]") {
  // Rank 0 and rank 3 are hot; each has one rank with room on its own node and one on the other.
  PlanningProblem problem;
  problem.counts = RoutedCounts(4, 4);
  const int64_t rows[] = {150, 50, 50, 150};
  for (int32_t e = 0; e < 4; ++e) problem.counts.at(3 - e, e) = rows[e];
  problem.owner = {0, 1, 2, 3};
  problem.cluster.ranks.resize(4);
  problem.cluster.ranks[2].node = problem.cluster.ranks[3].node = 1;
  problem.model.hidden_size = 16;
  problem.model.intermediate_size = 8;
  for (const bool crossed : {false, true}) {
    if (crossed) {  // the same with the nodes' numbers in turn
      problem.cluster.ranks[1].node = 1;
      problem.cluster.ranks[2].node = 0;
    }
    const auto plan = Plan(problem);
    REQUIRE(plan.ok());
    CHECK(plan->new_replicas == 2);
    CHECK(plan->imbalance.forward == 1.0);
    for (const InstancePlan& instance : plan->instances)
      CHECK(problem.cluster.ranks[instance.rank_idx].node ==
            problem.cluster.ranks[problem.owner[instance.expert_idx]].node);
  }
}

TEST_CASE("where memory is short replicas are not kept", "[placement]") {
  PlanningProblem problem;
  problem.counts = RoutedCounts(2, 4);
  for (int32_t e = 0; e < 4; ++e) problem.counts.at(0, e) = problem.counts.at(1, e) = e < 2 ? 60 : 40;
  problem.owner = {0, 0, 1, 1};
  problem.cluster.ranks.resize(2);
  problem.model.hidden_size = 64;
  problem.model.intermediate_size = 32;
  problem.resident = {{}, {0}};
  const auto roomy = Plan(problem);
  REQUIRE(roomy.ok());
  CHECK(roomy->instances.size() == 5);
  problem.policy.on_infeasible = OnInfeasible::kBestEffort;
  for (auto& rank : problem.cluster.ranks) rank.memory_bytes = 10;
  const auto tight = Plan(problem);
  REQUIRE(tight.ok());
  CHECK_FALSE(tight->feasible);
  CHECK(tight->instances.size() == 4);
}

}  // namespace
}  // namespace lrmoe::planner
