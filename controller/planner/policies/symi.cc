// SYMI (arXiv 2504.19925).
// Decides the whole layout from the previous invocation: an expert gets slots in proportion to its rows, at
// least one, and copies lie one after the other over the slots of the ranks, by expert.
// Assumes that rows spread evenly over copies; that optimizer state is sharded over all nodes, so that laying
// out anew is part of the optimizer's traffic: the transfers counted here are free there.
// Without history all experts count as equally popular, as at its start.
// Differs: nothing is dropped (there, rows above the capacity of an expert's slots are); copies of an expert
// on one rank are one instance.
#include <algorithm>
#include <cmath>

#include "controller/planner/policies/policies.h"
#include "controller/planner/policies/policy_steps.h"

namespace lrmoe::planner {
namespace {

std::vector<int32_t> CountCopies(const std::vector<int64_t>& rows, int32_t num_slots) {
  double total = 0;
  for (int64_t n : rows) total += static_cast<double>(n);
  std::vector<int32_t> copies(rows.size());
  std::vector<double> surplus(rows.size());
  int32_t used = 0;
  for (size_t e = 0; e < rows.size(); ++e) {
    const double goal = static_cast<double>(rows[e]) / total * num_slots;
    copies[e] = static_cast<int32_t>(std::max(goal, 1.0));
    surplus[e] = copies[e] - goal;
    used += copies[e];
  }
  while (used > num_slots) {
    const size_t e = std::max_element(surplus.begin(), surplus.end()) - surplus.begin();
    surplus[e] -= 1;
    if (copies[e] == 1) continue;
    --copies[e];
    --used;
  }
  for (; used < num_slots; ++used) {
    const size_t e = std::min_element(surplus.begin(), surplus.end()) - surplus.begin();
    surplus[e] += 1;
    ++copies[e];
  }
  return copies;
}

PlacedRows Place(const PlanningProblem& problem, const Workload& work) {
  std::vector<int64_t> rows = RecentCounts(problem, 1);
  if (rows.empty()) rows.assign(work.num_experts, 1);
  std::vector<int32_t> rank_of_slot;
  const std::vector<int32_t> holdable = HoldableExperts(problem, work);
  for (int32_t g = 0; g < work.num_ranks; ++g) rank_of_slot.insert(rank_of_slot.end(), holdable[g], g);
  const std::vector<int32_t> count = CountCopies(rows, static_cast<int32_t>(rank_of_slot.size()));
  Copies copies(work.num_experts);
  auto slot = rank_of_slot.begin();
  for (int32_t e = 0; e < work.num_experts; ++e) {
    copies[e].assign(slot, slot + count[e]);
    slot += count[e];
  }
  return EvenOverCopies(problem, work, copies);
}

}  // namespace

constinit const PolicyInfo kSymiPolicy = {
    .name = "symi",
    .source = "SYMI (arXiv 2504.19925)",
    .decides =
        "from the previous invocation, the whole layout: slots in proportion to rows, copies side by side",
    .assumes =
        "rows spread evenly over copies; optimizer state sharded over all nodes; without history all "
        "experts are equally popular",
    .differs =
        "drops no rows; counts the transfers that are part of its optimizer step; copies on one rank are "
        "one instance",
    .plan =
        [](const PlanningProblem& problem, const Workload& work) {
          return PlanPlacement(problem, work, SplitRule::kProportional, [&] { return Place(problem, work); });
        },
    .uses_history = true,
    .moves_owners = true,
};

}  // namespace lrmoe::planner
