#include "controller/core/what_if.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/plan_counts.h"
#include "common/regroup.h"
#include "controller/core/plan_content.h"
#include "controller/core/planning_input.h"

namespace lrmoe::core {
namespace {

constexpr size_t kHistory = 8;  // what a planner may look at

std::vector<std::vector<int32_t>> ResidentsOf(const LayerPlan& plan, const Cluster& cluster) {
  std::vector<std::vector<int32_t>> residents(plan.ranks.size());
  for (const InstancePlan& instance : plan.instances)  // by expert, so each list comes out ascending
    if (!instance.owner && !instance.is_new) residents[instance.rank_idx].push_back(instance.expert_idx);
  for (size_t rank = 0; rank < residents.size(); ++rank) {
    const size_t slots = static_cast<size_t>(cluster.ranks[rank].replica_slots);
    if (residents[rank].size() > slots) residents[rank].resize(slots);
  }
  return residents;
}

std::vector<std::vector<int64_t>> EarlierDemand(const History& history, const PlanRecord& record) {
  const LayerPlan& plan = record.plan->plan;
  bool more = false;
  const auto earlier = history.List(
      {.layer = plan.invocation.layer, .before_number = record.number, .limit = kHistory}, &more);
  std::vector<std::vector<int64_t>> demand;
  for (const PlanRecord* before : earlier) {
    if (!before->error.empty() || before->plan->plan.quota.size() != plan.quota.size()) continue;
    std::vector<int64_t>& rows = demand.emplace_back(plan.quota.size(), 0);
    for (const InstancePlan& instance : before->plan->plan.instances)
      rows[instance.expert_idx] += instance.forward_rows;
  }
  return demand;
}

// Repeats the ranks on further nodes, or takes the first.
void Resize(std::vector<RankResources>& ranks, int32_t num_ranks) {
  const size_t known = ranks.size();
  int32_t num_nodes = 0;
  for (const RankResources& rank : ranks) num_nodes = std::max(num_nodes, rank.node + 1);
  ranks.reserve(num_ranks);
  while (ranks.size() < static_cast<size_t>(num_ranks)) {
    ranks.push_back(ranks[ranks.size() - known]);
    ranks.back().node += num_nodes;
  }
  ranks.resize(num_ranks);
}

}  // namespace

absl::StatusOr<planner::PlanningProblem> MakeWhatIfProblem(const Core& core, const History& history,
                                                           const PlanRecord& record, const WhatIf& change) {
  const LayerPlan& plan = record.plan->plan;
  if (!record.error.empty())
    return absl::FailedPreconditionError(
        absl::StrCat("no plan was made of ", ToString(plan.invocation), ": ", record.error));
  if (!core.model().has_value() || core.members().empty())
    return absl::FailedPreconditionError("no job is known whose ranks and model could be used");
  std::vector<Hello> hellos;
  for (const Member& member : core.members()) hellos.push_back(member.hello);
  for (Hello& hello : hellos) {
    if (change.memory_budget_bytes.has_value()) hello.memory_budget_bytes = *change.memory_budget_bytes;
    if (change.replica_slots.has_value()) hello.replica_slots = *change.replica_slots;
  }
  const auto recorded_ranks = static_cast<int32_t>(plan.ranks.size());
  const int32_t num_ranks = change.ranks > 0 ? change.ranks : recorded_ranks;

  planner::PlanningProblem problem;
  problem.counts = RegroupSources(CountsOf(plan), num_ranks);
  problem.cluster = ClusterOf(hellos, core.model()->num_layers);
  Resize(problem.cluster.ranks, num_ranks);
  problem.owner = ContiguousOwners(static_cast<int32_t>(plan.quota.size()), num_ranks);
  if (!change.no_residents && num_ranks == recorded_ranks)
    problem.resident = ResidentsOf(plan, problem.cluster);
  problem.policy = change.policy;
  problem.policy.planner = change.planner.empty() ? plan.policy : change.planner;
  problem.model = MemoryModelOf(core.model()->shape, problem.policy, hellos.front());
  problem.history = EarlierDemand(history, record);
  return problem;
}

}  // namespace lrmoe::core
