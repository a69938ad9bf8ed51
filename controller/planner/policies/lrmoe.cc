#include "controller/planner/policies/lrmoe.h"

#include "controller/planner/placed_rows.h"
#include "controller/planner/policies/policies.h"
#include "controller/planner/replica_search.h"

namespace lrmoe::planner {

PolicyHooks LrmoeHooks(const PlanningProblem& problem, const Workload& work) {
  PolicyHooks hooks;
  // A placement that does not fit may do so with fewer replicas: balance alone never fails a candidate.
  hooks.num_variants = 3;
  hooks.place = [&problem, &work](const SearchLimits& limits, int32_t variant) {
    if (variant > 0) return FromFlow(work, KeepReplicas(problem, work, limits, variant == 1));
    return FromFlow(work, SearchReplicas(problem, work, limits));
  };
  return hooks;
}

absl::StatusOr<LayerPlan> PlanLrmoe(const PlanningProblem& problem, const Workload& work) {
  return RunCandidates(problem, work, LrmoeHooks(problem, work));
}

}  // namespace lrmoe::planner
