// Ideal balance: a bound, not a policy.
// Decides rows so that every rank runs what its speed allows, no more than the best peak needs; rows leave
// overloaded owners in the order of experts by rows, for the first rank with room.
// Assumes that replicas are free: no slot, no memory, no transfer of weights or gradients. Memory of rows and
// dispatch count as for every policy.
// Differs: no original.
#include <algorithm>

#include "controller/planner/policies/policies.h"
#include "controller/planner/policies/policy_steps.h"

namespace lrmoe::planner {
namespace {

PlacedRows Place(const PlanningProblem& problem, const Workload& work) {
  RowFlow flow = AtOwners(problem, work);
  const double level = work.capacity.LeastLevel(work.total, work.all_ranks);
  const auto owned = OwnedByRows(problem, work);
  int32_t receiver = 0;
  for (int32_t g = 0; g < work.num_ranks; ++g) {
    int64_t excess = flow.load(g) - work.capacity.RowsAt(level, g);
    for (size_t i = 0; i < owned[g].size() && excess > 0;) {
      const int32_t e = owned[g][i];
      const int64_t room = work.capacity.RowsAt(level, receiver) - flow.load(receiver);
      if (room <= 0) {
        ++receiver;
        continue;
      }
      const int64_t rows = std::min({excess, room, flow.instance(e).rows});
      Export(flow, e, receiver, rows);
      excess -= rows;
      if (flow.instance(e).rows == 0) ++i;
    }
  }
  PlacedRows placed = FromFlow(work, flow);
  placed.free_replicas = true;
  placed.num_new = 0;
  std::fill(placed.is_new.begin(), placed.is_new.end(), 0);
  std::fill(placed.replicas.begin(), placed.replicas.end(), 0);
  return placed;
}

}  // namespace

constinit const PolicyInfo kIdealPolicy = {
    .name = "ideal",
    .source = "a bound, not a policy",
    .decides = "rows so that all ranks finish together",
    .assumes = "replicas are free: exempt from slots, their memory and their transfers",
    .differs = "",
    .plan =
        [](const PlanningProblem& problem, const Workload& work) {
          return PlanPlacement(problem, work, SplitRule::kLocalFirst, [&] { return Place(problem, work); });
        },
    .ideal = true,
};

}  // namespace lrmoe::planner
