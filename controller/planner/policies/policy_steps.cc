#include "controller/planner/policies/policy_steps.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "controller/planner/candidate_loop.h"

namespace lrmoe::planner {

absl::StatusOr<LayerPlan> PlanPlacement(const PlanningProblem& problem, const Workload& work,
                                        SplitRule split_rule, const std::function<PlacedRows()>& place) {
  PolicyHooks hooks;
  hooks.split_rule = split_rule;
  hooks.quota_rule = QuotaRule::kUniform;
  hooks.place = [&](const SearchLimits&, int32_t) { return place(); };
  return RunCandidates(problem, work, hooks);
}

RowFlow AtOwners(const PlanningProblem& problem, const Workload& work) {
  RowFlow flow;
  flow.Reset(work.rows, problem.owner, work.num_ranks);
  return flow;
}

bool CanHost(const PlanningProblem& problem, const RowFlow& flow, int32_t expert_idx, int32_t rank_idx) {
  return flow.num_replicas(rank_idx) < problem.cluster.ranks[rank_idx].replica_slots ||
         flow.Find(expert_idx, rank_idx) >= 0;
}

void Export(RowFlow& flow, int32_t expert_idx, int32_t rank_idx, int64_t rows) {
  int32_t instance = flow.Find(expert_idx, rank_idx);
  if (instance < 0) instance = flow.Add(expert_idx, rank_idx);
  if (instance != expert_idx) flow.Move(expert_idx, instance, rows);
}

std::vector<int32_t> ByRows(const std::vector<int64_t>& rows) {
  std::vector<int32_t> order(rows.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return rows[a] > rows[b]; });
  return order;
}

std::vector<std::vector<int32_t>> OwnedByRows(const PlanningProblem& problem, const Workload& work) {
  std::vector<std::vector<int32_t>> out(work.num_ranks);
  for (int32_t e : ByRows(work.rows)) out[problem.owner[e]].push_back(e);
  return out;
}

std::vector<std::vector<int32_t>> RanksByNode(const PlanningProblem& problem) {
  std::map<int32_t, std::vector<int32_t>> by_node;
  for (size_t g = 0; g < problem.cluster.ranks.size(); ++g)
    by_node[problem.cluster.ranks[g].node].push_back(static_cast<int32_t>(g));
  std::vector<std::vector<int32_t>> out;
  for (auto& [node, ranks] : by_node) out.push_back(std::move(ranks));
  return out;
}

Copies HomeLayout(const PlanningProblem& problem) {
  Copies out;
  for (int32_t owner : problem.owner) out.push_back({owner});
  return out;
}

std::vector<int32_t> HoldableExperts(const PlanningProblem& problem, const Workload& work) {
  std::vector<int32_t> out = work.num_owned;
  for (int32_t g = 0; g < work.num_ranks; ++g) out[g] += problem.cluster.ranks[g].replica_slots;
  return out;
}

PlacedRows FromRows(const PlanningProblem& problem, const Workload& work, RowsOnRanks rows) {
  PlacedRows out;
  out.replicas.assign(work.num_ranks, 0);
  for (int32_t e = 0; e < work.num_experts; ++e) {
    const int32_t owner = problem.owner[e];
    out.first.push_back(out.size());
    std::stable_sort(rows[e].begin(), rows[e].end(), [&](const auto& a, const auto& b) {
      return std::pair(a.first != owner, a.first) < std::pair(b.first != owner, b.first);
    });
    for (const auto& [rank, amount] : rows[e]) {
      if (out.size() > out.first.back() && out.rank.back() == rank) {
        out.forward.back() += amount;
        continue;
      }
      out.expert.push_back(e);
      out.rank.push_back(rank);
      out.forward.push_back(amount);
      out.is_new.push_back(rank != owner && !work.IsResident(e, rank));
      out.num_new += out.is_new.back();
      ++out.replicas[rank];
    }
  }
  out.first.push_back(out.size());
  for (int32_t g = 0; g < work.num_ranks; ++g)
    out.replicas[g] = std::max(0, out.replicas[g] - work.num_owned[g]);
  return out;
}

PlacedRows EvenOverCopies(const PlanningProblem& problem, const Workload& work, const Copies& copies) {
  RowsOnRanks rows(work.num_experts);
  for (int32_t e = 0; e < work.num_experts; ++e) {
    const int64_t count = static_cast<int64_t>(copies[e].size());
    for (int64_t i = 0; i < count; ++i)
      rows[e].emplace_back(copies[e][i], work.rows[e] / count + (i < work.rows[e] % count));
  }
  return FromRows(problem, work, std::move(rows));
}

std::vector<int64_t> RecentCounts(const PlanningProblem& problem, size_t num_invocations) {
  std::vector<int64_t> sum(problem.counts.num_experts(), 0);
  int64_t total = 0;
  for (size_t i = 0; i < std::min(num_invocations, problem.history.size()); ++i) {
    for (size_t e = 0; e < sum.size(); ++e) {
      sum[e] += problem.history[i][e];
      total += problem.history[i][e];
    }
  }
  if (total == 0) sum.clear();
  return sum;
}

}  // namespace lrmoe::planner
