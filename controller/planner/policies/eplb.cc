// EPLB, expert-parallel load balancer (deepseek-ai/EPLB).
// Decides the whole layout from past counts: spare slots go, one by one, to the expert with the most rows per
// copy; copies are then packed by rows, each onto the lightest rank with room. With several nodes of equal
// make the hierarchical policy packs groups of experts to nodes first and copies within a node. Assumes that
// rows spread evenly over the copies of an expert, and that the layout may change freely. Without history it
// starts from the home layout, without copies. Differs: estimates are the sum of the history (the original
// takes what its caller estimates, and relays out every so often, not every time); the experts of one owner
// are a group; copies of an expert that land on one rank are one instance.
#include <algorithm>

#include "controller/planner/policies/policies.h"
#include "controller/planner/policies/policy_steps.h"

namespace lrmoe::planner {
namespace {

// Copies of each expert: `num_slots` in total, at least one each.
std::vector<int32_t> CountCopies(const std::vector<float>& rows, int32_t num_slots) {
  std::vector<int32_t> copies(rows.size(), 1);
  std::vector<float> per_copy = rows;
  for (int32_t i = static_cast<int32_t>(rows.size()); i < num_slots; ++i) {
    const size_t e = std::max_element(per_copy.begin(), per_copy.end()) - per_copy.begin();
    per_copy[e] = rows[e] / static_cast<float>(++copies[e]);
  }
  return copies;
}

// Bin of each item: items by weight, each into the lightest bin with room, ties to the first.
std::vector<int32_t> Pack(const std::vector<float>& weights, std::vector<int32_t> room) {
  std::vector<int32_t> order(weights.size()), out(weights.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return weights[a] > weights[b]; });
  std::vector<float> load(room.size(), 0);
  for (int32_t item : order) {
    int32_t best = -1;
    for (int32_t bin = 0; bin < static_cast<int32_t>(room.size()); ++bin)
      if (room[bin] > 0 && (best < 0 || load[bin] < load[best])) best = bin;
    out[item] = best;
    load[best] += weights[item];
    --room[best];
  }
  return out;
}

// Copies and packs `experts` onto `ranks`.
void LayOut(const std::vector<float>& rows, const std::vector<int32_t>& experts,
            const std::vector<int32_t>& ranks, const std::vector<int32_t>& holdable, Copies& out) {
  std::vector<float> local, per_copy;
  std::vector<int32_t> room, expert_of;
  int32_t num_slots = 0;
  for (int32_t e : experts) local.push_back(rows[e]);
  for (int32_t g : ranks) room.push_back(holdable[g]), num_slots += holdable[g];
  const std::vector<int32_t> copies = CountCopies(local, num_slots);
  for (size_t i = 0; i < experts.size(); ++i) {
    per_copy.insert(per_copy.end(), copies[i], local[i] / static_cast<float>(copies[i]));
    expert_of.insert(expert_of.end(), copies[i], experts[i]);
  }
  const std::vector<int32_t> bin = Pack(per_copy, std::move(room));
  for (size_t i = 0; i < bin.size(); ++i) out[expert_of[i]].push_back(ranks[bin[i]]);
}

// Several nodes with the same number of ranks, every rank with the same number of experts and of slots.
bool EqualNodes(const Workload& work, const std::vector<std::vector<int32_t>>& nodes,
                const std::vector<int32_t>& holdable) {
  if (nodes.size() < 2) return false;
  for (const auto& ranks : nodes)
    if (ranks.size() != nodes[0].size()) return false;
  for (int32_t g = 0; g < work.num_ranks; ++g)
    if (work.num_owned[g] != work.num_owned[0] || holdable[g] != holdable[0]) return false;
  return true;
}

PlacedRows Place(const PlanningProblem& problem, const Workload& work) {
  const std::vector<int64_t> recent = RecentCounts(problem, problem.history.size());
  if (recent.empty()) return EvenOverCopies(problem, work, HomeLayout(problem));
  const std::vector<float> rows(recent.begin(), recent.end());
  const std::vector<int32_t> holdable = HoldableExperts(problem, work);
  const auto nodes = RanksByNode(problem);
  std::vector<std::vector<int32_t>> groups(work.num_ranks);
  for (int32_t e = 0; e < work.num_experts; ++e) groups[problem.owner[e]].push_back(e);
  Copies copies(work.num_experts);
  std::vector<std::vector<int32_t>> experts(nodes.size());
  if (EqualNodes(work, nodes, holdable)) {
    std::vector<float> weight(work.num_ranks, 0);
    for (int32_t g = 0; g < work.num_ranks; ++g)
      for (int32_t e : groups[g]) weight[g] += rows[e];
    const std::vector<int32_t> node =
        Pack(weight, std::vector<int32_t>(nodes.size(), static_cast<int32_t>(nodes[0].size())));
    for (int32_t g = 0; g < work.num_ranks; ++g)
      experts[node[g]].insert(experts[node[g]].end(), groups[g].begin(), groups[g].end());
    for (size_t n = 0; n < nodes.size(); ++n) LayOut(rows, experts[n], nodes[n], holdable, copies);
  } else {
    for (int32_t e = 0; e < work.num_experts; ++e) experts[0].push_back(e);
    LayOut(rows, experts[0], work.all_ranks, holdable, copies);
  }
  return EvenOverCopies(problem, work, copies);
}

}  // namespace

constinit const PolicyInfo kEplbPolicy = {
    .name = "eplb",
    .source = "EPLB (deepseek-ai/EPLB), both policies",
    .decides =
        "from past counts, the whole layout: copies to the most rows per copy, packed by rows; hierarchical "
        "where nodes are equal",
    .assumes =
        "rows spread evenly over copies; the layout may change freely; without history the home layout",
    .differs =
        "plans every time from the sum of the history; the experts of one owner are a group; copies on one "
        "rank are one instance",
    .plan =
        [](const PlanningProblem& problem, const Workload& work) {
          return PlanPlacement(problem, work, SplitRule::kProportional, [&] { return Place(problem, work); });
        },
    .uses_history = true,
    .moves_owners = true,
};

}  // namespace lrmoe::planner
