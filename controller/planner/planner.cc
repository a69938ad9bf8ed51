#include "controller/planner/planner.h"

#include "common/status_macros.h"
#include "controller/planner/policies/policies.h"
#include "controller/planner/workload.h"

namespace lrmoe::planner {

absl::StatusOr<LayerPlan> Plan(const PlanningProblem& problem) {
  LRMOE_RETURN_IF_ERROR(Validate(problem));
  const Workload work = MakeWorkload(problem);
  return FindPolicy(problem.policy.planner)->plan(problem, work);
}

}  // namespace lrmoe::planner
