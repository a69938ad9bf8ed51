// TopoEP (arXiv 2609.35481; no public code, after its description).
// Decides, from this invocation's counts, in two levels. Between nodes: an expert is copied into a node when
// the rows that would otherwise leave the node, there and back, outweigh its weights; the node's rows then
// run on that copy. Within a node: the busiest rank gives half its lead over another rank of the node, at
// most the rows of one expert, as long as that lowers the peak. Assumes ranks of equal speed. Differs: the
// description leaves open which expert and target the second level takes: here the expert with the most rows
// on the busiest rank, and the least loaded rank of the node that holds it or has a slot. It stops within the
// balance tolerance of the node's mean.
#include <algorithm>

#include "controller/planner/policies/policies.h"
#include "controller/planner/policies/policy_steps.h"

namespace lrmoe::planner {
namespace {

class TopoEp {
 public:
  TopoEp(const PlanningProblem& problem, const Workload& work)
      : problem_(problem), work_(work), flow_(AtOwners(problem, work)), on_rank_(work.num_ranks) {
    for (int32_t e = 0; e < work.num_experts; ++e) on_rank_[problem.owner[e]].push_back(e);
  }

  PlacedRows Run() {
    const auto nodes = RanksByNode(problem_);
    for (const auto& ranks : nodes) CopyIntoNode(ranks);
    for (const auto& ranks : nodes) BalanceNode(ranks);
    return FromFlow(work_, flow_);
  }

 private:
  // Experts from elsewhere whose copy saves more bytes between nodes than it costs, the largest gain first.
  void CopyIntoNode(const std::vector<int32_t>& ranks) {
    const MemoryModelOptions& model = problem_.model;
    const int64_t weights = int64_t{model.gated ? 3 : 2} * model.intermediate_size;  // in rows of H elements
    std::vector<int64_t> leaving(work_.num_experts, 0);
    for (int32_t e = 0; e < work_.num_experts; ++e) {
      if (std::binary_search(ranks.begin(), ranks.end(), problem_.owner[e])) continue;
      for (int32_t s : ranks) leaving[e] += work_.sources_of(e)[s];
    }
    for (int32_t e : ByRows(leaving)) {
      if (2 * leaving[e] <= weights) return;
      int32_t best = -1;
      for (int32_t g : ranks) {
        if (!CanHost(problem_, flow_, e, g)) continue;
        if (best < 0 || flow_.num_replicas(g) < flow_.num_replicas(best)) best = g;
      }
      if (best < 0) return;  // no slot is left on this node
      Give(e, e, best, leaving[e]);
    }
  }

  void BalanceNode(const std::vector<int32_t>& ranks) {
    const auto lighter = [&](int32_t a, int32_t b) { return flow_.load(a) < flow_.load(b); };
    int64_t total = 0;
    for (int32_t g : ranks) total += flow_.load(g);
    const double enough = (1 + problem_.policy.balance_tolerance) * static_cast<double>(total) /
                          static_cast<double>(ranks.size());
    // Halving leads converges; the bound only guards against sequences that crawl row by row.
    for (size_t round = 0; round < 64 * ranks.size(); ++round) {
      const int32_t busiest = *std::max_element(ranks.begin(), ranks.end(), lighter);
      if (static_cast<double>(flow_.load(busiest)) <= enough || !GiveFrom(busiest, ranks)) return;
    }
  }

  // Tries the experts of a rank, the one with the most rows first; false when none can be given.
  bool GiveFrom(int32_t busiest, const std::vector<int32_t>& ranks) {
    std::vector<std::pair<int64_t, int32_t>> order;
    for (int32_t e : on_rank_[busiest]) order.emplace_back(-flow_.instance(flow_.Find(e, busiest)).rows, e);
    std::sort(order.begin(), order.end());
    for (const auto& [negative_rows, e] : order) {
      int32_t target = -1;
      for (int32_t g : ranks) {
        if (g == busiest || !CanHost(problem_, flow_, e, g)) continue;
        if (target < 0 || flow_.load(g) < flow_.load(target)) target = g;
      }
      if (target < 0) continue;
      const int64_t rows = std::min(-negative_rows, (flow_.load(busiest) - flow_.load(target)) / 2);
      if (rows <= 0) continue;
      Give(e, flow_.Find(e, busiest), target, rows);
      return true;
    }
    return false;
  }

  void Give(int32_t e, int32_t from, int32_t rank, int64_t rows) {
    int32_t to = flow_.Find(e, rank);
    if (to < 0) {
      to = flow_.Add(e, rank);
      on_rank_[rank].push_back(e);
    }
    flow_.Move(from, to, rows);
  }

  const PlanningProblem& problem_;
  const Workload& work_;
  RowFlow flow_;
  std::vector<std::vector<int32_t>> on_rank_;  // [G] experts with an instance there
};

}  // namespace

constinit const PolicyInfo kTopoepPolicy = {
    .name = "topoep",
    .source = "TopoEP (arXiv 2609.35481), after its description",
    .decides =
        "from exact counts: copies into a node that save more bytes between nodes than they cost, then "
        "half-lead moves off the busiest rank of each node",
    .assumes = "ranks of equal speed",
    .differs =
        "expert and target of a move are our choice, the description names none; stops at the balance "
        "tolerance",
    .plan =
        [](const PlanningProblem& problem, const Workload& work) {
          return PlanPlacement(problem, work, SplitRule::kLocalFirst,
                               [&] { return TopoEp(problem, work).Run(); });
        },
};

}  // namespace lrmoe::planner
