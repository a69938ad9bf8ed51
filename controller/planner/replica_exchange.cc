#include "controller/planner/replica_exchange.h"

#include <limits>

namespace lrmoe::planner {

bool ReplicaExchange::Run(SearchState& state, int32_t max_new, int64_t budget) {
  RowFlow& flow = state.flow();
  const int64_t end = flow.work() + budget;
  Random random(0x1d8af066);
  flow.RelieveAll();
  int64_t excess = state.Excess();
  scratch_.Restore(state);
  while (excess > 0 && flow.work() < end) {
    flow.SpendWork(2 * (flow.end_instance() + work_.num_ranks));  // copying the state
    int64_t now = std::numeric_limits<int64_t>::max();
    if (Step(state, max_new, random)) {
      flow.RelieveAll();
      now = state.Excess();
    }
    if (now <= excess) {
      excess = now;
      scratch_.Restore(state);
    } else {
      state.Restore(scratch_);
    }
  }
  return excess == 0;
}

// Takes up to two replicas out and adds others across the cut that remains.
bool ReplicaExchange::Step(SearchState& state, int32_t max_new, Random& random) {
  RowFlow& flow = state.flow();
  replicas_.clear();
  for (int32_t i = work_.num_experts; i < flow.end_instance(); ++i)
    if (flow.instance(i).rank >= 0) replicas_.push_back(i);
  const uint64_t removed = replicas_.empty() ? 0 : 1 + random.Below(2);
  for (uint64_t n = 0; n < removed && !replicas_.empty(); ++n) {
    const size_t at = random.Below(replicas_.size());
    state.Remove(replicas_[at]);
    replicas_.erase(replicas_.begin() + static_cast<int64_t>(at));
  }
  return greedy_.Complete(state, ReceiverRule::kRandom, max_new, &random) || state.num_new() <= max_new;
}

}  // namespace lrmoe::planner
