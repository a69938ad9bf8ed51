// FasterMoE shadowing (laekov/fastmoe; PPoPP 2022).
// Decides, from this invocation's counts, which of the hottest experts every rank gets a shadow of. Experts
// by rows: the next one is shadowed while the predicted time falls, which is what the hottest expert that is
// left costs in compute and dispatch, and the broadcasts so far. Each source runs its own rows of a shadowed
// expert. Assumes ranks of equal speed (the slowest counts) and one bandwidth (between nodes where there are
// several). Differs: counts are added up over sources, as its SmartMoE artifact does; row time is the
// problem's instead of FLOPs over a peak; every other rank has to have a free slot, where the original knows
// no slots.
#include <algorithm>

#include "controller/planner/policies/policies.h"
#include "controller/planner/policies/policy_steps.h"

namespace lrmoe::planner {
namespace {

struct Costs {    // microseconds
  double row;     // computed and sent: forward and backward, four trips
  double shadow;  // one expert's weights and gradient
};

Costs MakeCosts(const PlanningProblem& problem) {
  const auto& ranks = problem.cluster.ranks;
  double slowest = ranks[0].rows_per_ms;
  bool one_node = true;
  for (const RankResources& rank : ranks) {
    slowest = std::min(slowest, rank.rows_per_ms);
    one_node = one_node && rank.node == ranks[0].node;
  }
  const Bandwidth& bandwidth = problem.cluster.bandwidth;
  const double bytes_per_us =
      (one_node ? bandwidth.intra_node_gb_per_s : bandwidth.inter_node_gb_per_s) * 1e3;
  const MemoryModelOptions& model = problem.model;
  const double hidden_bytes =
      static_cast<double>(model.hidden_size) * static_cast<double>(model.weight_bytes);
  return {1e3 / slowest + 4 * hidden_bytes / bytes_per_us,
          (model.gated ? 3 : 2) * model.intermediate_size * hidden_bytes / bytes_per_us};
}

bool AllCanHost(const PlanningProblem& problem, const RowFlow& flow, int32_t expert) {
  for (int32_t g = 0; g < flow.num_ranks(); ++g)
    if (g != problem.owner[expert] && !CanHost(problem, flow, expert, g)) return false;
  return true;
}

PlacedRows Place(const PlanningProblem& problem, const Workload& work) {
  RowFlow flow = AtOwners(problem, work);
  const std::vector<int32_t> order = ByRows(work.rows);
  const Costs costs = MakeCosts(problem);
  double best = costs.row * static_cast<double>(work.rows[order[0]]);
  for (size_t i = 0; i < order.size(); ++i) {
    const double hottest_left = i + 1 < order.size() ? static_cast<double>(work.rows[order[i + 1]]) : 0;
    const double time = costs.row * hottest_left + static_cast<double>(i + 1) * costs.shadow;
    const int32_t e = order[i];
    if (!(time < best) || !AllCanHost(problem, flow, e)) break;
    best = time;
    for (int32_t g = 0; g < work.num_ranks; ++g)
      if (g != problem.owner[e]) flow.Move(e, flow.Add(e, g), work.sources_of(e)[g]);
  }
  return FromFlow(work, flow);
}

}  // namespace

constinit const PolicyInfo kFastermoePolicy = {
    .name = "fastermoe",
    .source = "FasterMoE shadowing (laekov/fastmoe)",
    .decides =
        "from exact counts: which of the hottest experts all ranks get a copy of; each source then runs "
        "its own rows of them",
    .assumes = "ranks of equal speed, one bandwidth; its cost model with the problem's speeds",
    .differs = "counts are summed over sources; all other ranks need a free slot for a shadow",
    .plan =
        [](const PlanningProblem& problem, const Workload& work) {
          return PlanPlacement(problem, work, SplitRule::kLocalFirst, [&] { return Place(problem, work); });
        },
};

}  // namespace lrmoe::planner
