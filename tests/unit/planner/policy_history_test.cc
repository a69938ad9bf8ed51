// Policies that plan from the past: how far back they look, where they start, what they do with it.
#include <catch2/catch.hpp>
#include <limits>
#include <map>

#include "controller/planner/planner.h"
#include "controller/planner/policies/policy_steps.h"
#include "tests/unit/planner/legal_plan.h"
#include "tests/unit/planner/random_problem.h"

namespace lrmoe::planner {
namespace {

std::vector<int64_t> RandomCounts(Random& random, int32_t num_experts) {
  std::vector<int64_t> out;
  for (int32_t e = 0; e < num_experts; ++e) out.push_back(random.Between(1, 100));
  return out;
}

TEST_CASE("each policy looks back as far as its original", "[policy_history]") {
  const std::map<std::string, size_t> windows = {
      {"symi", 1}, {"smartmoe", 2}, {"laer", 5}, {"eplb", 8}, {"flexmoe", 8}};
  for (const auto& [policy, window] : windows) {
    Random random(21);
    std::vector<int> changed(8, 0);
    for (int trial = 0; trial < 300; ++trial) {
      PlanningProblem problem =
          RandomProblem(random, {.max_experts = 12, .max_ranks = 4, .residents = false});
      const int32_t num_experts = problem.counts.num_experts();
      for (int i = 0; i < 8; ++i) problem.history.push_back(RandomCounts(random, num_experts));
      const LayerPlan plan = PlanWith(policy.c_str(), problem);
      for (size_t i = 0; i < 8; ++i) {
        PlanningProblem other = problem;
        for (int64_t& n : other.history[i]) n = n * 5 % 101 * 4;  // other hot experts
        changed[i] += !(PlanWith(policy.c_str(), other) == plan);
      }
    }
    for (size_t i = 0; i < 8; ++i) {
      CAPTURE(policy, i, changed[i]);
      CHECK((changed[i] > 0) == (i < window));
    }
  }
}

TEST_CASE("without a past, policies start from where they say", "[policy_history]") {
  Random random(22);
  for (int trial = 0; trial < 300; ++trial) {
    PlanningProblem problem = RandomProblem(random, {.residents = false});
    if (random.Below(2) == 0)
      problem.history.assign(3, std::vector<int64_t>(problem.counts.num_experts(), 0));
    for (const char* policy : {"eplb", "laer", "smartmoe", "flexmoe"}) {
      CAPTURE(policy);
      const LayerPlan plan = PlanWith(policy, problem);
      CHECK(plan.new_replicas == 0);
      CHECK(plan.instances.size() == static_cast<size_t>(problem.counts.num_experts()));
    }
    const LayerPlan start = PlanWith("symi", problem);
    problem.history = {std::vector<int64_t>(problem.counts.num_experts(), 5)};
    CHECK(PlanWith("symi", problem) == start);
  }
}

// Peak and ratio of the highest to the lowest load, rows spread evenly over copies.
std::pair<double, double> Cost(const Workload& work, const std::vector<int64_t>& rows, const Copies& copies) {
  std::vector<double> load(work.num_ranks, 0);
  for (int32_t e = 0; e < work.num_experts; ++e)
    for (int32_t g : copies[e])
      load[g] += static_cast<double>(rows[e]) / static_cast<double>(copies[e].size());
  const auto [low, high] = std::minmax_element(load.begin(), load.end());
  return {*high, *low > 0 ? *high / *low : std::numeric_limits<double>::infinity()};
}

TEST_CASE("a change that FlexMoE makes lowers the peak or the ratio of the loads", "[policy_history]") {
  Random random(23);
  int changes = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    PlanningProblem problem = RandomProblem(random, {});
    const Workload work = MakeWorkload(problem);
    problem.history = {RandomCounts(random, work.num_experts)};
    Copies before = HomeLayout(problem), after(work.num_experts);
    for (size_t g = 0; g < problem.resident.size(); ++g)
      for (int32_t e : problem.resident[g]) before[e].push_back(static_cast<int32_t>(g));
    for (const InstancePlan& instance : PlanWith("flexmoe", problem).instances)
      after[instance.expert_idx].push_back(instance.rank_idx);
    for (auto& ranks : before) std::sort(ranks.begin(), ranks.end());
    for (auto& ranks : after) std::sort(ranks.begin(), ranks.end());
    if (before == after) continue;
    ++changes;
    const auto was = Cost(work, problem.history[0], before), is = Cost(work, problem.history[0], after);
    CAPTURE(trial, was.first, is.first, was.second, is.second);
    CHECK((is.first < was.first + 1e-9 || is.second < was.second + 1e-9));
  }
  CHECK(changes > 300);
}

TEST_CASE("FasterMoE shadows while its predicted time falls", "[policy_rules]") {
  Random random(24);
  std::map<size_t, int> lengths;
  for (int trial = 0; trial < 2000; ++trial) {
    PlanningProblem problem = RandomProblem(random, {.uneven_rates = false});
    for (auto& rank : problem.cluster.ranks) rank.node = 0, rank.replica_slots = 100;
    problem.cluster.bandwidth.intra_node_gb_per_s = 1e-6 * std::pow(10.0, 3 * random.Uniform());
    const Workload work = MakeWorkload(problem);
    // Microseconds: a row takes 100, its four trips and an expert's three matrices are sent at the bandwidth.
    const double bytes_per_us = problem.cluster.bandwidth.intra_node_gb_per_s * 1e3;
    const double row = 1e3 / 10 + 4 * 16 * 2 / bytes_per_us, shadow = 3 * 8 * 16 * 2 / bytes_per_us;
    std::vector<int64_t> rows = work.rows;
    std::sort(rows.rbegin(), rows.rend());
    rows.push_back(0);
    size_t expected = 0;
    const auto time = [&](size_t n) {
      return row * static_cast<double>(rows[n]) + static_cast<double>(n) * shadow;
    };
    while (expected < work.rows.size() && time(expected + 1) < time(expected)) ++expected;
    std::map<int32_t, int> instances;
    for (const InstancePlan& instance : PlanWith("fastermoe", problem).instances)
      ++instances[instance.expert_idx];
    size_t shadowed = 0;
    for (const auto& [expert, count] : instances) shadowed += count > 1;
    if (work.num_ranks > 1) CHECK(shadowed == expected);
    ++lengths[shadowed];
  }
  CHECK(lengths[0] > 100);
  CHECK(lengths[1] > 100);
  CHECK(lengths[2] > 100);
}

TEST_CASE("MoonEP breaks ties towards the lowest expert and rank", "[policy_rules]") {
  PlanningProblem problem;
  problem.counts = RoutedCounts(3, 6);
  for (int32_t e : {0, 1}) problem.counts.at(0, e) = 15;  // both of rank 0
  problem.owner = ContiguousOwners(6, 3);
  problem.cluster.ranks.resize(3);
  for (auto& rank : problem.cluster.ranks) rank.replica_slots = 2;
  std::vector<std::tuple<int32_t, int32_t, int64_t>> moved;
  for (const InstancePlan& instance : PlanWith("moonep", problem).instances)
    if (!instance.owner) moved.emplace_back(instance.expert_idx, instance.rank_idx, instance.forward_rows);
  CHECK(moved == std::vector<std::tuple<int32_t, int32_t, int64_t>>{{0, 1, 10}, {1, 2, 10}});
}

}  // namespace
}  // namespace lrmoe::planner
