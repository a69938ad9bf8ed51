#include "controller/planner/problem.h"

#include <catch2/catch.hpp>

#include "tests/unit/planner/random_problem.h"

namespace lrmoe::planner {
namespace {

PlanningProblem Small() {
  PlanningProblem problem;
  problem.counts = RoutedCounts(2, 4);
  problem.owner = ContiguousOwners(4, 2);
  problem.cluster.ranks.resize(2);
  return problem;
}

std::string Message(const PlanningProblem& problem) {
  return std::string(Validate(problem).message());
}

TEST_CASE("a history has up to eight invocations of one count per expert, within range", "[problem]") {
  PlanningProblem problem = Small();
  const int64_t most = int64_t{2} << 40;
  problem.history.assign(8, {1, 0, most - 1, 0});
  CHECK(Validate(problem).ok());
  problem.history.push_back({0, 0, 0, 0});
  CHECK(Message(problem) == "history is 9 invocations; allowed: up to 8");
  problem.history = {{1, 2, 3, 4}, {1, 2, 3}};
  CHECK(Message(problem) == "history[1] is 3 entries; allowed: one per column of counts (4)");
  problem.history = {{1, 2, -3, 4}};
  CHECK(Message(problem) == "history[0][2] is -3; allowed: 0..2^40 x ranks");
  problem.history = {{most + 1, 0, 0, 0}};
  CHECK(Message(problem) == "history[0][0] is 2199023255553; allowed: 0..2^40 x ranks");
  problem.history = {{most, 0, 0, 1}};
  CHECK(Message(problem) == "history[0] is a total above 2199023255552; allowed: a total up to 2^40 x ranks");
}

TEST_CASE("a rank's residents stay within its slots", "[problem]") {
  PlanningProblem problem = Small();
  problem.resident = {{}, {0}};
  CHECK(Validate(problem).ok());
  problem.resident = {{}, {0, 1}};
  CHECK(Message(problem) == "resident[1] is 2 experts; allowed: up to 1, the rank's replica_slots");
}

}  // namespace
}  // namespace lrmoe::planner
