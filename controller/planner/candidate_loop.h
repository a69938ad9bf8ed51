// Algorithm 1, lines 4-14: candidates in descending order of retention, the first that fits is the plan.
#pragma once

#include <functional>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan.h"
#include "controller/planner/placed_rows.h"
#include "controller/planner/problem.h"
#include "controller/planner/replica_search.h"
#include "controller/planner/source_split.h"
#include "controller/planner/workload.h"

namespace lrmoe::planner {

// kWaterfill: the same number of rows for every expert, as far as it has them.
enum class QuotaRule : uint8_t { kFair, kUniform, kWaterfill };

// How a policy takes part in the loop.
struct PolicyHooks {
  QuotaRule quota_rule = QuotaRule::kFair;
  SplitRule split_rule = SplitRule::kLocalFirst;
  // Placements to try for one candidate, in order of preference: variant 0, 1, ... num_variants - 1. `limits`
  // holds what memory leaves at this candidate's rate.
  int32_t num_variants = 1;
  std::function<PlacedRows(const SearchLimits& limits, int32_t variant)> place;
};

absl::StatusOr<LayerPlan> RunCandidates(const PlanningProblem& problem, const Workload& work,
                                        const PolicyHooks& hooks);

}  // namespace lrmoe::planner
