#pragma once

#include <catch2/catch.hpp>

#include "controller/planner/planner.h"

namespace lrmoe::planner {

// The policy's plan with every row kept; fails the test unless it is legal.
inline LayerPlan PlanWith(const char* policy, PlanningProblem& problem) {
  problem.policy.planner = policy;
  problem.policy.rates = {1.0};
  const auto plan = Plan(problem);
  REQUIRE(plan.ok());
  const absl::Status legal = CheckPlan(problem, *plan);
  CAPTURE(legal.ToString());
  REQUIRE(legal.ok());
  return *plan;
}

}  // namespace lrmoe::planner
