#include "controller/planner/planner.h"

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "controller/planner/policies/policies.h"
#include "controller/planner/workload.h"

namespace lrmoe::planner {

absl::StatusOr<LayerPlan> Plan(const PlanningProblem& problem) {
  LRMOE_RETURN_IF_ERROR(Validate(problem));
  const Workload work = MakeWorkload(problem);
  if (problem.policy.planner == "fixed") return PlanFixed(problem, work);
  if (problem.policy.planner == "lrmoe") return PlanLrmoe(problem, work);
  return absl::InvalidArgumentError(
      absl::StrCat("planner is \"", problem.policy.planner, "\"; allowed: lrmoe, fixed"));
}

}  // namespace lrmoe::planner
