// The check of plans notices what is wrong with a plan, by the rules of its policy.
#include <catch2/catch.hpp>

#include "controller/planner/planner.h"
#include "tests/unit/planner/random_problem.h"

namespace lrmoe::planner {
namespace {

// Four experts on two ranks, skewed; one slot each. EPLB exchanges experts here.
PlanningProblem Skewed(const char* policy) {
  PlanningProblem problem;
  problem.counts = RoutedCounts(2, 4);
  const std::vector<int64_t> rows = {40, 30, 4, 2};
  for (int32_t s = 0; s < 2; ++s)
    for (int32_t e = 0; e < 4; ++e) problem.counts.at(s, e) = rows[e];
  problem.owner = ContiguousOwners(4, 2);
  problem.cluster.ranks.resize(2);
  problem.model.hidden_size = 16;
  problem.model.intermediate_size = 8;
  problem.policy.planner = policy;
  problem.history = {{80, 60, 8, 4}};
  return problem;
}

std::string Violation(const PlanningProblem& problem, const LayerPlan& plan) {
  return std::string(CheckPlan(problem, plan).message());
}

LayerPlan GoodPlan(const PlanningProblem& problem) {
  const auto plan = Plan(problem);
  REQUIRE(plan.ok());
  REQUIRE(Violation(problem, *plan) == "");
  return *plan;
}

TEST_CASE("only policies that move owners may leave an owner without its expert", "[check_plan]") {
  const PlanningProblem problem = Skewed("eplb");
  LayerPlan plan = GoodPlan(problem);
  std::vector<int32_t> owners(4, 0);
  for (const InstancePlan& instance : plan.instances) owners[instance.expert_idx] += instance.owner;
  CHECK(std::count(owners.begin(), owners.end(), 0) > 0);
  PlanningProblem other = problem;
  other.policy.planner = plan.policy = "ultraep";
  CHECK_THAT(Violation(other, plan), Catch::Contains("owner instances"));
}

TEST_CASE("a plan has to be of the policy that was asked for", "[check_plan]") {
  const PlanningProblem problem = Skewed("ultraep");
  LayerPlan plan = GoodPlan(problem);
  plan.policy = "echo";
  CHECK(Violation(problem, plan) == "plan violates: policy \"echo\", asked for \"ultraep\"");
}

TEST_CASE("slots count experts beyond the owned ones", "[check_plan]") {
  for (const char* policy : {"ultraep", "eplb"}) {
    CAPTURE(policy);
    PlanningProblem problem = Skewed(policy);
    const LayerPlan plan = GoodPlan(problem);
    std::vector<int32_t> held(2, 0);
    for (const InstancePlan& instance : plan.instances) ++held[instance.rank_idx];
    REQUIRE(std::max(held[0], held[1]) == 3);
    for (RankResources& rank : problem.cluster.ranks) rank.replica_slots = 0;
    CHECK_THAT(Violation(problem, plan), Catch::Contains("holds 1 replicas in 0 slots"));
  }
}

TEST_CASE("replicas are new unless they are resident, the owner's, or ideal", "[check_plan]") {
  for (const char* policy : {"ultraep", "eplb", "ideal"}) {
    CAPTURE(policy);
    const PlanningProblem problem = Skewed(policy);
    LayerPlan plan = GoodPlan(problem);
    for (InstancePlan& instance : plan.instances) {
      if (instance.owner) continue;
      instance.is_new = !instance.is_new;
      CHECK_THAT(Violation(problem, plan), Catch::Contains("has a wrong new flag"));
      instance.is_new = !instance.is_new;
    }
  }
}

TEST_CASE("ideal plans need no slot, the same plan of a policy does", "[check_plan]") {
  PlanningProblem problem = Skewed("ideal");
  for (RankResources& rank : problem.cluster.ranks) rank.replica_slots = 0;
  LayerPlan plan = GoodPlan(problem);
  CHECK(plan.instances.size() > 4);
  CHECK(plan.imbalance.forward == 1.0);
  problem.policy.planner = plan.policy = "moonep";
  for (InstancePlan& instance : plan.instances) instance.is_new = !instance.owner;
  plan.new_replicas = static_cast<int32_t>(plan.instances.size()) - 4;
  CHECK_THAT(Violation(problem, plan), Catch::Contains("slots"));
}

TEST_CASE("memory limits bind comparison policies; what does not fit is told", "[check_plan]") {
  for (const char* policy : {"ultraep", "eplb", "smartmoe", "ideal"}) {
    CAPTURE(policy);
    PlanningProblem problem = Skewed(policy);
    problem.policy.rates = {1.0, 0.5};
    const LayerPlan free = GoodPlan(problem);
    for (size_t g = 0; g < 2; ++g) problem.cluster.ranks[g].memory_bytes = free.ranks[g].memory_bytes.total();
    CHECK(GoodPlan(problem).retention_rate == 1.0);
    --problem.cluster.ranks[0].memory_bytes;
    const LayerPlan tight = GoodPlan(problem);
    CHECK(tight.retention_rate == 0.5);
    REQUIRE(tight.rejected.size() == 1);
    CHECK(tight.rejected[0].constraint == "memory");
    CHECK(tight.rejected[0].where == "rank 0");
    problem.cluster.ranks[0].memory_bytes = 100;
    CHECK(Plan(problem).status().code() == absl::StatusCode::kResourceExhausted);
  }
}

TEST_CASE("residents beyond the slots are refused unless owners move", "[check_plan]") {
  PlanningProblem problem = Skewed("eplb");
  problem.resident = {{2, 3}, {0, 1}};  // exchanged
  GoodPlan(problem);
  problem.policy.planner = "ultraep";
  CHECK(Plan(problem).status().message() ==
        "resident[0] is 2 experts; allowed: up to 1, the rank's replica_slots");
  problem = Skewed("smartmoe");
  problem.cluster.ranks[1].replica_slots = 0;
  problem.owner = {0, 0, 0, 1};
  problem.resident = {{}, {0, 1}};
  CHECK(Plan(problem).status().message() ==
        "resident[1] is 2 experts; allowed: up to 1, the rank's replica_slots and owned experts");
}

TEST_CASE("memory of moved experts: as many as a rank holds, at least those it owns", "[check_plan]") {
  const PlanningProblem problem = Skewed("eplb");
  const LayerPlan plan = GoodPlan(problem);
  std::vector<int64_t> held(2, 0);
  for (const InstancePlan& instance : plan.instances) ++held[instance.rank_idx];
  const int64_t expert_bytes = plan.ranks[0].memory_bytes.experts / 2;
  for (size_t g = 0; g < 2; ++g) {
    const MemoryBytes& bytes = plan.ranks[g].memory_bytes;
    CHECK(bytes.experts + bytes.replicas == std::max<int64_t>(2, held[g]) * expert_bytes);
  }
}

}  // namespace
}  // namespace lrmoe::planner
