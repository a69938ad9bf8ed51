// Planning: (demand, cluster, limits, previous placement) -> plan with reasons. Pure: equal input gives an
// equal plan.
#pragma once

#include "absl/status/statusor.h"
#include "common/plan.h"
#include "controller/planner/problem.h"

namespace lrmoe::planner {

// Runs the planner that problem.policy.planner names (paper, Algorithm 1, lines 4-14, for "lrmoe").
// Errors: InvalidArgument for a bad problem; ResourceExhausted when no candidate fits and on_infeasible is
// fail, the message then names the binding constraint of the last candidate. Under best_effort the plan of
// the lowest candidate comes back with feasible = false. plan.invocation and plan.plan_us are left for the
// caller to fill. Thread-safe: no state.
absl::StatusOr<LayerPlan> Plan(const PlanningProblem& problem);

// Checks what must hold of any plan (design: conservation per expert and source, one instance per expert and
// rank, slots, backward rows only where an instance is). Internal error naming the first violation.
absl::Status CheckPlan(const PlanningProblem& problem, const LayerPlan& plan);

}  // namespace lrmoe::planner
