#include "controller/planner/replica_locality.h"

namespace lrmoe::planner {

ReplicaLocality::ReplicaLocality(const PlanningProblem& problem, const Workload& work, SearchState& scratch)
    : problem_(problem), work_(work), scratch_(scratch) {
  for (const RankResources& rank : problem.cluster.ranks) {
    node_.push_back(rank.node);
    several_nodes_ |= rank.node != node_[0];
  }
}

void ReplicaLocality::Run(SearchState& state, double level, int64_t budget) {
  if (!several_nodes_) return;
  const double target = state.target();
  const int64_t end = state.flow().work() + budget;
  state.SetTarget(level);
  scratch_.Restore(state);
  // Two that exchange ranks exchange indices too, so one may be passed over; it then stays where it is.
  for (int32_t i = work_.num_experts; i < state.flow().end_instance() && state.flow().work() < end; ++i)
    if (state.IsNew(i) && OffNode(state.flow().instance(i).expert, state.flow().instance(i).rank))
      BringHome(state, i, end);
  state.SetTarget(target);
}

bool ReplicaLocality::BringHome(SearchState& state, int32_t idx, int64_t end) {
  const int32_t expert = state.flow().instance(idx).expert, from = state.flow().instance(idx).rank;
  const auto accept = [&] {
    state.flow().SpendWork(2 * (state.flow().end_instance() + work_.num_ranks));
    const bool fits = state.Fit();
    if (fits) {
      scratch_.Restore(state);
    } else {
      state.Restore(scratch_);
    }
    return fits;
  };
  for (int32_t to = 0; to < work_.num_ranks && state.flow().work() < end; ++to) {
    if (OffNode(expert, to) || !CanHold(state, expert, to)) continue;
    if (state.HasSlot(to)) {
      state.Remove(idx);
      state.Add(expert, to);
      if (accept()) return true;
    }
    for (int32_t i = state.flow().first_on_rank(to); i >= 0;) {
      const int32_t other = state.flow().instance(i).expert, next = state.flow().instance(i).next_on_rank;
      const bool useful = state.IsNew(i) && problem_.owner[other] != from && CanHold(state, other, from) &&
                          OffNode(other, from) <= OffNode(other, to);
      if (useful) {
        state.Remove(idx);
        state.Remove(i);
        state.Add(expert, to);
        state.Add(other, from);
        if (accept()) return true;
      }
      i = next;
    }
  }
  return false;
}

}  // namespace lrmoe::planner
