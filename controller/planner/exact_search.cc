#include "controller/planner/exact_search.h"

#include <algorithm>

namespace lrmoe::planner {

ExactSearch::ExactSearch(const PlanningProblem& problem, const Workload& work, const SearchLimits& limits,
                         ReplicaGreedy& greedy)
    : problem_(problem), work_(work), greedy_(greedy), root_(problem, work, limits) {}

bool ExactSearch::Run(SearchState& state, int32_t least, int32_t bound, int32_t max_nodes) {
  root_.Start(true);
  nodes_left_ = max_nodes;
  int32_t slots = 0;
  for (const RankResources& rank : problem_.cluster.ranks)
    slots += std::min(rank.replica_slots, work_.num_experts);
  for (int32_t allowed = std::max(least, 0); allowed < bound && allowed <= slots; ++allowed) {
    seen_.clear();
    if (stack_.empty()) stack_.push_back(root_);
    stack_[0].Restore(root_);
    if (Visit(0, allowed)) {
      complete_ = true;
      state.Restore(stack_[found_at_]);
      return true;
    }
    if (nodes_left_ <= 0) {
      complete_ = false;
      return false;
    }
  }
  complete_ = true;
  return false;
}

bool ExactSearch::SeenBefore(const RowFlow& flow) {
  uint64_t hash = 0;
  for (int32_t i = work_.num_experts; i < flow.end_instance(); ++i) {
    const RowFlow::Instance& instance = flow.instance(i);
    if (instance.rank < 0) continue;
    hash ^=
        Random(static_cast<uint64_t>(instance.expert) * 4096 + static_cast<uint64_t>(instance.rank)).Next();
  }
  const auto at = std::lower_bound(seen_.begin(), seen_.end(), hash);
  if (at != seen_.end() && *at == hash) return true;
  seen_.insert(at, hash);
  return false;
}

// The placement to look at is stack_[depth]; on success the solution is stack_[found_at_].
bool ExactSearch::Visit(int32_t depth, int32_t allowed) {
  if (--nodes_left_ < 0) return false;
  if (SeenBefore(stack_[depth].flow())) return false;
  if (stack_[depth].Fit()) {
    found_at_ = depth;
    return true;
  }
  if (stack_[depth].num_new() >= allowed) return false;
  struct Branch {
    int32_t expert, rank, evicted;
  };
  std::vector<Branch> branches;
  const SearchState& here = stack_[depth];
  for (const ReplicaChoice& choice : greedy_.Choices(here))
    branches.push_back({choice.expert, choice.rank, -1});
  // A full rank may give up a resident; those replicas that this search added stay.
  if (work_.any_resident) {
    for (int32_t g = 0; g < work_.num_ranks; ++g) {
      if (here.flow().InCut(g) || here.HasSlot(g)) continue;
      for (int32_t i = work_.num_experts; i < here.flow().end_instance(); ++i) {
        if (here.flow().instance(i).rank != g || here.IsNew(i)) continue;
        for (int32_t e = 0; e < work_.num_experts; ++e)
          if (work_.rows[e] > 0 && here.Confined(e)) branches.push_back({e, g, i});
      }
    }
  }
  if (static_cast<int32_t>(stack_.size()) <= depth + 1) stack_.push_back(root_);
  for (const Branch& branch : branches) {
    stack_[depth + 1].Restore(stack_[depth]);
    if (branch.evicted >= 0) stack_[depth + 1].Remove(branch.evicted);
    stack_[depth + 1].Add(branch.expert, branch.rank);
    if (Visit(depth + 1, allowed)) return true;
    if (nodes_left_ <= 0) return false;
  }
  return false;
}

}  // namespace lrmoe::planner
