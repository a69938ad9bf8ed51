#include "controller/plan_place.h"

#include <catch2/catch.hpp>

namespace lrmoe {
namespace {

planner::PlanningProblem Problem(int32_t num_ranks, int32_t num_experts,
                                 const std::string& planner = "lrmoe") {
  planner::PlanningProblem problem;
  problem.counts = RoutedCounts(num_ranks, num_experts);
  problem.policy.planner = planner;
  return problem;
}

void TookOften(PlanPlace& place, int32_t layer, const planner::PlanningProblem& problem, double cpu_us) {
  for (int32_t i = 0; i < PlanPlace::kEnough; ++i) place.Took(layer, problem, cpu_us);
}

TEST_CASE("a layer is planned on the loop after enough quick plans, until one is slow") {
  PlanPlace place(200);
  const auto problem = Problem(8, 128);
  CHECK_FALSE(place.OnLoop(0, problem));
  for (int32_t i = 1; i < PlanPlace::kEnough; ++i) place.Took(0, problem, 200);
  CHECK_FALSE(place.OnLoop(0, problem));
  place.Took(0, problem, 200);
  CHECK(place.OnLoop(0, problem));
  CHECK_FALSE(place.OnLoop(1, problem));  // knows nothing of another layer
  place.Took(0, problem, 201);
  CHECK_FALSE(place.OnLoop(0, problem));
  TookOften(place, 0, problem, 10);
  CHECK(place.OnLoop(0, problem));
}

TEST_CASE("another size or planner starts over") {
  PlanPlace place(200);
  TookOften(place, 0, Problem(8, 128), 10);
  for (const auto& other : {Problem(9, 128), Problem(8, 129), Problem(8, 128, "fixed")}) {
    CHECK_FALSE(place.OnLoop(0, other));
    place.Took(0, other, 10);
    CHECK_FALSE(place.OnLoop(0, other));
    CHECK_FALSE(place.OnLoop(0, Problem(8, 128)));
    TookOften(place, 0, Problem(8, 128), 10);
    CHECK(place.OnLoop(0, Problem(8, 128)));
  }
}

TEST_CASE("with no time on the loop every layer is planned elsewhere") {
  PlanPlace place(0);
  TookOften(place, 0, Problem(1, 1), 1);
  CHECK_FALSE(place.OnLoop(0, Problem(1, 1)));
}

}  // namespace
}  // namespace lrmoe
