#include "controller/planner/planner.h"

#include <catch2/catch.hpp>
#include <numeric>

#include "tests/unit/planner/random_problem.h"
#include "tests/unit/planner/slow_flow.h"

namespace lrmoe::planner {
namespace {

PlanningProblem Simple(const std::vector<std::vector<int64_t>>& counts, int32_t slots = 1) {
  PlanningProblem problem;
  problem.counts = RoutedCounts(static_cast<int32_t>(counts.size()), static_cast<int32_t>(counts[0].size()));
  for (size_t s = 0; s < counts.size(); ++s)
    for (size_t e = 0; e < counts[s].size(); ++e)
      problem.counts.at(static_cast<int32_t>(s), static_cast<int32_t>(e)) = counts[s][e];
  problem.owner = ContiguousOwners(problem.counts.num_experts(), problem.counts.num_sources());
  problem.cluster.ranks.resize(counts.size());
  for (auto& rank : problem.cluster.ranks) rank.replica_slots = slots;
  problem.model.hidden_size = 16;
  problem.model.intermediate_size = 8;
  return problem;
}

int64_t Total(const PlanningProblem& problem) {
  int64_t total = 0;
  for (int32_t s = 0; s < problem.counts.num_sources(); ++s)
    for (int64_t n : problem.counts.source(s)) total += n;
  return total;
}

double PeakLevel(const PlanningProblem& problem, const LayerPlan& plan, bool forward) {
  double fastest = 0, peak = 0;
  for (const auto& rank : problem.cluster.ranks) fastest = std::max(fastest, rank.rows_per_ms);
  for (size_t g = 0; g < plan.ranks.size(); ++g) {
    const int64_t rows = forward ? plan.ranks[g].forward_rows : plan.ranks[g].backward_rows;
    peak = std::max(peak, static_cast<double>(rows) / (problem.cluster.ranks[g].rows_per_ms / fastest));
  }
  return peak;
}

void CheckPeaksAreLeast(const PlanningProblem& problem, const LayerPlan& plan) {
  const size_t num_ranks = plan.ranks.size();
  std::vector<std::vector<bool>> hosts(plan.quota.size(), std::vector<bool>(num_ranks, false));
  std::vector<int64_t> rows(plan.quota.size(), 0);
  for (const auto& instance : plan.instances) {
    hosts[instance.expert_idx][instance.rank_idx] = true;
    rows[instance.expert_idx] += instance.forward_rows;
  }
  double fastest = 0;
  for (const auto& rank : problem.cluster.ranks) fastest = std::max(fastest, rank.rows_per_ms);
  std::vector<double> weight;
  for (const auto& rank : problem.cluster.ranks) weight.push_back(rank.rows_per_ms / fastest);
  REQUIRE(PeakLevel(problem, plan, true) == SlowLeastPeak(hosts, rows, weight));
  REQUIRE(PeakLevel(problem, plan, false) == SlowLeastPeak(hosts, plan.quota, weight));
}

TEST_CASE("plans of random problems are legal and their peaks the exact optimum", "[planner]") {
  Random random(20261130);
  for (int trial = 0; trial < 3000; ++trial) {
    CAPTURE(trial);
    PlanningProblem problem = RandomProblem(random, {});
    if (random.Below(2) == 0) problem.policy.rates = {0.3 + 0.7 * random.Uniform()};
    if (random.Below(3) == 0)
      problem.policy.retention_floor = problem.policy.rates[0] * random.Uniform() * 0.9;
    if (random.Below(4) == 0) problem.policy.planner = "fixed";
    problem.policy.on_infeasible = OnInfeasible::kBestEffort;
    const auto plan = Plan(problem);
    REQUIRE(plan.ok());
    const absl::Status legal = CheckPlan(problem, *plan);
    CAPTURE(legal.ToString());
    REQUIRE(legal.ok());
    CHECK(std::accumulate(plan->quota.begin(), plan->quota.end(), int64_t{0}) ==
          static_cast<int64_t>(std::ceil(plan->retention_rate * static_cast<double>(Total(problem)) - 1e-9)));
    if (plan->feasible) {
      for (size_t e = 0; e < plan->quota.size(); ++e) {
        int64_t routed = 0;
        for (int32_t s = 0; s < problem.counts.num_sources(); ++s)
          routed += problem.counts.at(s, static_cast<int32_t>(e));
        CHECK(static_cast<double>(plan->quota[e]) >=
              problem.policy.retention_floor * static_cast<double>(routed) - 1e-9);
      }
    }
    CheckPeaksAreLeast(problem, *plan);
    CHECK(*Plan(problem) == *plan);
  }
}

TEST_CASE("a balanced input gets no replica, a skewed one is balanced", "[planner]") {
  const auto balanced = Plan(Simple({{5, 5, 5, 5}, {5, 5, 5, 5}}));
  REQUIRE(balanced.ok());
  CHECK(balanced->new_replicas == 0);
  CHECK(balanced->instances.size() == 4);
  const auto skewed = Plan(Simple({{90, 5, 3, 2}, {90, 5, 3, 2}}));
  REQUIRE(skewed.ok());
  CHECK(skewed->new_replicas == 1);
  CHECK(skewed->imbalance.before == Approx(1.9));
  CHECK(skewed->imbalance.forward == 1.0);
  CHECK(skewed->imbalance.backward == 1.0);
}

TEST_CASE("extremes: no rows, one hot expert, one rank, fewer experts than ranks, huge counts", "[planner]") {
  for (const char* name : {"lrmoe", "fixed"}) {
    CAPTURE(name);
    std::vector<PlanningProblem> problems;
    problems.push_back(Simple({{0, 0}, {0, 0}}));
    problems.push_back(Simple({{7, 0, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0}}));
    problems.push_back(Simple({{3, 1, 4}}));
    problems.push_back(Simple({{9}, {9}, {9}, {9}, {9}}));
    const int64_t huge = int64_t{1} << 40;
    problems.push_back(Simple({{huge, 0, 1, 3}, {0, huge - 9, 0, 5}}));
    for (auto& problem : problems) {
      problem.policy.planner = name;
      for (std::vector<double> rates :
           {std::vector<double>{1.0}, std::vector<double>{0.7}, std::vector<double>{0.001}}) {
        problem.policy.rates = rates;
        const auto plan = Plan(problem);
        REQUIRE(plan.ok());
        CHECK(CheckPlan(problem, *plan).ok());
      }
    }
  }
}

TEST_CASE("a thousand ranks, counts near the limit", "[planner]") {
  PlanningProblem problem = Simple(std::vector<std::vector<int64_t>>(1024, std::vector<int64_t>(512, 0)));
  Random random(7);
  for (int32_t s = 0; s < 1024; ++s)
    for (int32_t e = 0; e < 512; ++e)
      problem.counts.at(s, e) = random.Between(0, int64_t{1} << (e < 4 ? 31 : 28));
  for (std::vector<double> rates : {std::vector<double>{1.0}, std::vector<double>{0.6}}) {
    problem.policy.rates = rates;
    const auto plan = Plan(problem);
    REQUIRE(plan.ok());
    CHECK(CheckPlan(problem, *plan).ok());
    CHECK(plan->imbalance.forward < plan->imbalance.before);
  }
}

TEST_CASE("memory decides the retention rate and every rejection says why", "[planner]") {
  PlanningProblem problem = Simple({{100, 0, 0, 0}, {100, 0, 0, 0}}, 0);
  problem.policy.planner = "fixed";
  const auto full = Plan(problem);
  REQUIRE(full.ok());
  const MemoryBytes needed = full->ranks[0].memory_bytes;
  const MemoryCoefficients c = ComputeMemoryCoefficients([&] {
    MemoryModelOptions model = problem.model;
    model.exact_router_gradient = true;
    return model;
  }());
  problem.cluster.ranks[0].memory_bytes =
      needed.total() - 50 * c.kept_row_bytes;  // room for 150 of 200 kept rows
  const auto plan = Plan(problem);
  REQUIRE(plan.ok());
  CHECK(plan->feasible);
  CHECK(plan->retention_rate == 0.75);
  CHECK(plan->quota[0] == 150);
  REQUIRE(plan->rejected.size() == 5);
  CHECK(plan->rejected[0].constraint == "memory");
  CHECK(plan->rejected[0].where == "rank 0");
  CHECK(plan->rejected[0].unit == "bytes");
  CHECK(plan->rejected[0].needed == static_cast<double>(needed.total()));
  CHECK(plan->rejected[0].available == static_cast<double>(problem.cluster.ranks[0].memory_bytes));

  problem.cluster.ranks[0].memory_bytes = 10;
  const auto failed = Plan(problem);
  CHECK(failed.status().code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(std::string(failed.status().message()), Catch::Contains("memory of rank 0"));
  problem.policy.on_infeasible = OnInfeasible::kBestEffort;
  const auto best = Plan(problem);
  REQUIRE(best.ok());
  CHECK_FALSE(best->feasible);
  CHECK(best->retention_rate == 0.5);
  CHECK(best->rejected.size() == problem.policy.rates.size());
}

TEST_CASE("the window rejects candidates and names the time", "[planner]") {
  PlanningProblem problem = Simple({{50, 50}, {50, 50}});
  const auto free = Plan(problem);
  REQUIRE(free.ok());
  const PredictedTime& time = free->predicted_us;
  problem.policy.window_us = 0.9 * (time.weights + time.dispatch + time.return_ + time.gradients);
  const auto plan = Plan(problem);
  REQUIRE(plan.ok());
  CHECK(plan->retention_rate < 1.0);
  CHECK(plan->rejected[0].constraint == "window");
  CHECK(plan->rejected[0].unit == "us");
}

TEST_CASE("a floor above the candidate's rate rejects it", "[planner]") {
  PlanningProblem problem = Simple({{50, 50}, {50, 50}});
  problem.policy.rates = {0.5};
  problem.policy.retention_floor = 0.6;
  const auto plan = Plan(problem);
  CHECK(plan.status().code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(std::string(plan.status().message()), Catch::Contains("retention_floor"));
}

TEST_CASE("residents are used before anything is transferred", "[planner]") {
  PlanningProblem problem = Simple({{90, 5, 3, 2}, {90, 5, 3, 2}});
  problem.resident = {{}, {0}};
  const auto plan = Plan(problem);
  REQUIRE(plan.ok());
  CHECK(plan->new_replicas == 0);
  CHECK(plan->imbalance.forward == 1.0);
  problem.resident = {{3}, {1}};  // of no use: dropped, the slot given to expert 0
  const auto moved = Plan(problem);
  REQUIRE(moved.ok());
  CHECK(moved->imbalance.forward == 1.0);
}

TEST_CASE("a replica that costs more than it saves is not made", "[planner]") {
  PlanningProblem problem = Simple({{90, 5, 3, 2}, {90, 5, 3, 2}});
  problem.model.hidden_size = 8192;
  problem.model.intermediate_size = 8192;
  const auto plan = Plan(problem);
  REQUIRE(plan.ok());
  CHECK(plan->new_replicas == 0);
}

}  // namespace
}  // namespace lrmoe::planner
