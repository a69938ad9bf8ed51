#include <algorithm>

#include "controller/planner/placed_rows.h"
#include "controller/planner/policies/lrmoe.h"
#include "controller/planner/policies/policies.h"
#include "controller/planner/replica_search.h"

namespace lrmoe::planner {
namespace {

// Slowest rank's time to send or receive the weights of new replicas and their gradients, microseconds.
double TransferUs(const PlanningProblem& problem, const PlacedRows& placed) {
  const MemoryModelOptions& model = problem.model;
  const double parameters =
      (model.gated ? 3.0 : 2.0) * model.intermediate_size * static_cast<double>(model.hidden_size);
  const double bytes = parameters * static_cast<double>(model.weight_bytes + model.gradient_bytes);
  const double on_node_us = bytes / (problem.cluster.bandwidth.intra_node_gb_per_s * 1e3);
  const double off_node_us = bytes / (problem.cluster.bandwidth.inter_node_gb_per_s * 1e3);
  const auto& ranks = problem.cluster.ranks;
  std::vector<double> sender(ranks.size(), 0), receiver(ranks.size(), 0);
  double slowest = 0;
  for (int32_t i = 0; i < placed.size(); ++i) {
    if (!placed.is_new[i]) continue;
    const int32_t owner = placed.rank[placed.first[placed.expert[i]]], rank = placed.rank[i];
    const double us = ranks[owner].node == ranks[rank].node ? on_node_us : off_node_us;
    slowest = std::max({slowest, sender[owner] += us, receiver[rank] += us});
  }
  return slowest;
}

double PeakUs(const PlanningProblem& problem, const PlacedRows& placed) {
  std::vector<int64_t> load(problem.cluster.ranks.size(), 0);
  for (int32_t i = 0; i < placed.size(); ++i) load[placed.rank[i]] += placed.forward[i];
  double peak = 0;
  for (size_t g = 0; g < load.size(); ++g)
    peak = std::max(peak, static_cast<double>(load[g]) / problem.cluster.ranks[g].rows_per_ms * 1e3);
  return peak;
}

}  // namespace

PolicyHooks LrmoeHooks(const PlanningProblem& problem, const Workload& work) {
  PolicyHooks hooks;
  // A placement that does not fit may do so with fewer replicas: balance alone never fails a candidate.
  hooks.num_variants = 3;
  hooks.place = [&problem, &work](const SearchLimits& limits, int32_t variant) {
    if (variant > 0) return FromFlow(work, KeepReplicas(problem, work, limits, variant == 1));
    PlacedRows placed = FromFlow(work, SearchReplicas(problem, work, limits));
    if (placed.num_new == 0) return placed;
    // New replicas have to pay for their transfer in predicted time.
    PlacedRows without = FromFlow(work, KeepReplicas(problem, work, limits, true));
    const double saved_us = PeakUs(problem, without) - PeakUs(problem, placed);
    return saved_us > TransferUs(problem, placed) ? placed : without;
  };
  return hooks;
}

absl::StatusOr<LayerPlan> PlanLrmoe(const PlanningProblem& problem, const Workload& work) {
  return RunCandidates(problem, work, LrmoeHooks(problem, work));
}

}  // namespace lrmoe::planner
