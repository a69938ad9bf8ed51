#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "controller/planner/planner.h"
#include "controller/planner/policies/policies.h"

namespace lrmoe::planner {
namespace {

template <typename... Parts>
absl::Status Violated(const Parts&... parts) {
  return absl::InternalError(absl::StrCat("plan violates: ", parts...));
}

absl::Status CheckInstance(const PlanningProblem& problem, const PolicyInfo& rules, const LayerPlan& plan,
                           size_t idx) {
  const InstancePlan& instance = plan.instances[idx];
  const int32_t num_ranks = problem.counts.num_sources();
  const int32_t e = instance.expert_idx;
  if (e < 0 || e >= problem.counts.num_experts()) return Violated("instance ", idx, " is of expert ", e);
  if (instance.rank_idx < 0 || instance.rank_idx >= num_ranks)
    return Violated("instance ", idx, " is on rank ", instance.rank_idx);
  const std::string what = absl::StrCat("expert ", e, " on rank ", instance.rank_idx);
  if (instance.owner != (problem.owner[e] == instance.rank_idx))
    return Violated(what, " has a wrong owner flag");
  bool held = instance.owner;
  if (!problem.resident.empty()) {
    const auto& list = problem.resident[instance.rank_idx];
    held = held || std::binary_search(list.begin(), list.end(), e);
  }
  if (instance.is_new != (!held && !rules.ideal)) return Violated(what, " has a wrong new flag");
  if (instance.forward_rows < 0 || instance.backward_rows < 0) return Violated(what, " has negative rows");
  if (instance.forward_rows_by_source.size() != static_cast<size_t>(num_ranks))
    return Violated(what, " has ", instance.forward_rows_by_source.size(), " sources");
  int64_t sum = 0;
  for (int64_t rows : instance.forward_rows_by_source) {
    if (rows < 0) return Violated(what, " has negative rows of a source");
    sum += rows;
  }
  if (sum != instance.forward_rows)
    return Violated(what, ": sources add up to ", sum, ", not ", instance.forward_rows);
  if (idx == 0) return absl::OkStatus();
  const InstancePlan& before = plan.instances[idx - 1];
  const auto key = [](const InstancePlan& i) { return std::make_tuple(i.expert_idx, !i.owner, i.rank_idx); };
  if (!(key(before) < key(instance))) return Violated(what, " is out of order or twice in the plan");
  return absl::OkStatus();
}

absl::Status CheckExperts(const PlanningProblem& problem, const PolicyInfo& rules, const LayerPlan& plan) {
  const int32_t num_experts = problem.counts.num_experts(), num_ranks = problem.counts.num_sources();
  if (plan.quota.size() != static_cast<size_t>(num_experts)) return Violated(plan.quota.size(), " quotas");
  std::vector<int64_t> routed(static_cast<size_t>(num_experts) * num_ranks, 0), kept(num_experts, 0);
  std::vector<int32_t> owners(num_experts, 0);
  for (const InstancePlan& instance : plan.instances) {
    for (int32_t s = 0; s < num_ranks; ++s)
      routed[static_cast<size_t>(instance.expert_idx) * num_ranks + s] += instance.forward_rows_by_source[s];
    kept[instance.expert_idx] += instance.backward_rows;
    owners[instance.expert_idx] += instance.owner;
  }
  for (int32_t e = 0; e < num_experts; ++e) {
    int64_t total = 0;
    for (int32_t s = 0; s < num_ranks; ++s) {
      const int64_t count = problem.counts.at(s, e);
      const int64_t planned = routed[static_cast<size_t>(e) * num_ranks + s];
      if (planned != count)
        return Violated("expert ", e, " of source ", s, ": ", planned, " forward rows for ", count, " pairs");
      total += count;
    }
    if (owners[e] != 1 && !rules.moves_owners)
      return Violated("expert ", e, " has ", owners[e], " owner instances");
    if (plan.quota[e] < 0 || plan.quota[e] > total)
      return Violated("quota of expert ", e, " is ", plan.quota[e], " of ", total);
    if (kept[e] != plan.quota[e])
      return Violated("expert ", e, ": ", kept[e], " backward rows for a quota of ", plan.quota[e]);
  }
  return absl::OkStatus();
}

absl::Status CheckRanks(const PlanningProblem& problem, const PolicyInfo& rules, const LayerPlan& plan) {
  const int32_t num_ranks = problem.counts.num_sources();
  if (plan.ranks.size() != static_cast<size_t>(num_ranks)) return Violated(plan.ranks.size(), " ranks");
  std::vector<RankPlan> sums(num_ranks);
  // Experts beyond as many as a rank owns: its replicas, where owners do not move.
  std::vector<int32_t> replicas(num_ranks, 0);
  for (int32_t owner : problem.owner) --replicas[owner];
  int32_t new_replicas = 0;
  for (const InstancePlan& instance : plan.instances) {
    sums[instance.rank_idx].forward_rows += instance.forward_rows;
    sums[instance.rank_idx].backward_rows += instance.backward_rows;
    ++replicas[instance.rank_idx];
    new_replicas += instance.is_new;
  }
  if (new_replicas != plan.new_replicas)
    return Violated(plan.new_replicas, " new replicas, ", new_replicas, " marked");
  for (int32_t g = 0; g < num_ranks; ++g) {
    const RankResources& rank = problem.cluster.ranks[g];
    if (replicas[g] > rank.replica_slots && !rules.ideal)
      return Violated("rank ", g, " holds ", replicas[g], " replicas in ", rank.replica_slots, " slots");
    if (sums[g].forward_rows != plan.ranks[g].forward_rows ||
        sums[g].backward_rows != plan.ranks[g].backward_rows)
      return Violated("rank ", g, " states other rows than its instances have");
    if (plan.feasible && plan.ranks[g].memory_bytes.total() > rank.memory_bytes)
      return Violated("rank ", g, " needs ", plan.ranks[g].memory_bytes.total(), " bytes of ",
                      rank.memory_bytes);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckPlan(const PlanningProblem& problem, const LayerPlan& plan) {
  const PolicyInfo* rules = FindPolicy(plan.policy);
  if (rules == nullptr || plan.policy != problem.policy.planner)
    return Violated("policy \"", plan.policy, "\", asked for \"", problem.policy.planner, "\"");
  for (size_t i = 0; i < plan.instances.size(); ++i)
    LRMOE_RETURN_IF_ERROR(CheckInstance(problem, *rules, plan, i));
  LRMOE_RETURN_IF_ERROR(CheckExperts(problem, *rules, plan));
  LRMOE_RETURN_IF_ERROR(CheckRanks(problem, *rules, plan));
  if (!(plan.retention_rate > 0 && plan.retention_rate <= 1))
    return Violated("retention rate ", plan.retention_rate);
  return absl::OkStatus();
}

}  // namespace lrmoe::planner
