// The policies: one file each. Every one decides a placement with forward rows for each candidate of
// Algorithm 1.
#pragma once

#include "absl/status/statusor.h"
#include "common/plan.h"
#include "controller/planner/problem.h"
#include "controller/planner/workload.h"

namespace lrmoe::planner {

// The paper's method: max-min fair quotas, replicas within the balance tolerance, exact allocation.
absl::StatusOr<LayerPlan> PlanLrmoe(const PlanningProblem& problem, const Workload& work);

// Fixed ownership (Megatron-LM): no replicas, every row at its expert's owner. With rates = {1.0} exactly
// that; with more rates Algorithm 1 lowers retention, uniformly or as memory dictates, where full backward
// does not fit.
absl::StatusOr<LayerPlan> PlanFixed(const PlanningProblem& problem, const Workload& work);

}  // namespace lrmoe::planner
