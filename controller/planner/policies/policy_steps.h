// What several comparison policies share: exports from owners, layouts of copies, what a history says.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan.h"
#include "controller/planner/placed_rows.h"
#include "controller/planner/problem.h"
#include "controller/planner/row_flow.h"
#include "controller/planner/source_split.h"
#include "controller/planner/workload.h"

namespace lrmoe::planner {

// Algorithm 1 over the one placement a policy decides on. Below a rate of 1.0 every expert keeps the same
// rate of its rows, and backward rows are balanced over the policy's instances: comparison policies drop
// nothing themselves.
absl::StatusOr<LayerPlan> PlanPlacement(const PlanningProblem& problem, const Workload& work,
                                        SplitRule split_rule, const std::function<PlacedRows()>& place);

// All rows at their experts' owners.
RowFlow AtOwners(const PlanningProblem& problem, const Workload& work);
// Whether the rank holds the expert or has a slot left for it.
bool CanHost(const PlanningProblem& problem, const RowFlow& flow, int32_t expert_idx, int32_t rank_idx);
// Moves rows from the owner's instance to the rank's, which is added where there is none.
void Export(RowFlow& flow, int32_t expert_idx, int32_t rank_idx, int64_t rows);

// Experts by owner [G], each owner's by rows descending, ties to the lowest.
std::vector<std::vector<int32_t>> OwnedByRows(const PlanningProblem& problem, const Workload& work);
// Experts by rows descending, ties to the lowest.
std::vector<int32_t> ByRows(const std::vector<int64_t>& rows);

// The ranks of each node, ascending; nodes in ascending order.
std::vector<std::vector<int32_t>> RanksByNode(const PlanningProblem& problem);

// Ranks that hold a copy of each expert [E]; a rank may hold several.
using Copies = std::vector<std::vector<int32_t>>;
Copies HomeLayout(const PlanningProblem& problem);
// Experts each rank can hold [G] when all are laid out anew: as many as it owns, and its slots.
std::vector<int32_t> HoldableExperts(const PlanningProblem& problem, const Workload& work);

// Instances of each expert [E] as (rank, rows), in any order; copies on one rank become one instance.
using RowsOnRanks = std::vector<std::vector<std::pair<int32_t, int64_t>>>;
PlacedRows FromRows(const PlanningProblem& problem, const Workload& work, RowsOnRanks rows);
// Every copy of an expert gets an equal share of its rows; left-over rows go one each to the first copies.
PlacedRows EvenOverCopies(const PlanningProblem& problem, const Workload& work, const Copies& copies);

// Counts of the latest `num_invocations` of the history, added up; empty where there are none or no rows.
std::vector<int64_t> RecentCounts(const PlanningProblem& problem, size_t num_invocations);

}  // namespace lrmoe::planner
