#include "controller/planner/replica_thrift.h"

#include <algorithm>

namespace lrmoe::planner {

ReplicaThrift::ReplicaThrift(const PlanningProblem& problem, const Workload& work)
    : problem_(problem), work_(work) {
  const MemoryModelOptions& model = problem.model;
  const double parameters =
      (model.gated ? 3.0 : 2.0) * model.intermediate_size * static_cast<double>(model.hidden_size);
  const double bytes = parameters * static_cast<double>(model.weight_bytes + model.gradient_bytes);
  on_node_us_ = bytes / (problem.cluster.bandwidth.intra_node_gb_per_s * 1e3);
  off_node_us_ = bytes / (problem.cluster.bandwidth.inter_node_gb_per_s * 1e3);
  weights_share_ = static_cast<double>(model.weight_bytes) /
                   static_cast<double>(model.weight_bytes + model.gradient_bytes);
  double fastest = 0;
  for (const RankResources& rank : problem.cluster.ranks) fastest = std::max(fastest, rank.rows_per_ms);
  us_per_row_ = 1e3 / fastest;
}

void ReplicaThrift::Run(SearchState& state, SearchState& without) const {
  GiveUpUnpaid(state);
  if (state.num_new() == 0) return;
  without.Start(true);
  const double without_us = LayerUs(without);
  if (LayerUs(state) >= without_us) GiveUpUntilPaid(state, without);
}

void ReplicaThrift::GiveUpUnpaid(SearchState& state) const {
  for (;;) {
    int32_t unpaid = 0;
    for (int32_t i = work_.num_experts; i < state.flow().end_instance(); ++i)
      unpaid += state.IsNew(i) && Worth(state, i) < 1;
    if (unpaid == 0) return;
    // Not all at once: the rows of some may make others worth it.
    for (int32_t count = (unpaid + 3) / 4; count > 0; --count) state.Remove(LeastWorth(state));
    state.LeastPeak();
    state.DropIdle();
  }
}

// What is best on the way from all of them to none, a quarter at a time.
void ReplicaThrift::GiveUpUntilPaid(SearchState& state, SearchState& without) const {
  without.DropIdle();
  SearchState best = without;
  double best_us = LayerUs(best);
  while (state.num_new() > 0) {
    for (int32_t count = (state.num_new() + 3) / 4; count > 0; --count) state.Remove(LeastWorth(state));
    state.LeastPeak();
    GiveUpUnpaid(state);
    const double us = LayerUs(state);
    state.DropIdle();
    if (us >= best_us) continue;
    best_us = us;
    best.Restore(state);
  }
  state.Restore(best);
}

double ReplicaThrift::Worth(const SearchState& state, int32_t idx) const {
  const RowFlow::Instance& instance = state.flow().instance(idx);
  const int32_t owner = problem_.owner[instance.expert];
  const double saved_us = LevelUs(static_cast<double>(instance.rows) / work_.capacity.weight[owner]);
  return saved_us / (weights_share_ * TransferUs(owner, instance.rank));
}

int32_t ReplicaThrift::LeastWorth(const SearchState& state) const {
  int32_t least = -1;
  double worth = 0;
  for (int32_t i = work_.num_experts; i < state.flow().end_instance(); ++i) {
    if (!state.IsNew(i)) continue;
    const double here = Worth(state, i);
    if (least < 0 || here < worth) least = i, worth = here;
  }
  return least;
}

double ReplicaThrift::LayerUs(SearchState& state) const {
  state.LeastPeak();
  std::vector<double> sends(work_.num_ranks, 0), receives(work_.num_ranks, 0);
  double slowest = 0, peak = 0;
  for (int32_t i = work_.num_experts; i < state.flow().end_instance(); ++i) {
    if (!state.IsNew(i)) continue;
    const int32_t rank = state.flow().instance(i).rank,
                  owner = problem_.owner[state.flow().instance(i).expert];
    const double us = TransferUs(owner, rank);
    slowest = std::max({slowest, sends[owner] += us, receives[rank] += us});
  }
  for (int32_t g = 0; g < work_.num_ranks; ++g)
    peak = std::max(peak, static_cast<double>(state.flow().load(g)) / work_.capacity.weight[g]);
  return LevelUs(peak) + slowest;
}

}  // namespace lrmoe::planner
