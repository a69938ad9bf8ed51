#include "controller/planner/candidate_loop.h"
#include "controller/planner/policies/policies.h"
#include "controller/planner/replica_search.h"

namespace lrmoe::planner {

absl::StatusOr<LayerPlan> PlanFixed(const PlanningProblem& problem, const Workload& work) {
  PolicyHooks hooks;
  hooks.place = [&](const SearchLimits& limits, int32_t) {
    return FromFlow(work, KeepReplicas(problem, work, limits, false));
  };
  return RunCandidates(problem, work, hooks);
}

}  // namespace lrmoe::planner
