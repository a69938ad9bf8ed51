// Brings new replicas onto the nodes of their owners.
#pragma once

#include <cstdint>
#include <vector>

#include "controller/planner/problem.h"
#include "controller/planner/search_state.h"

namespace lrmoe::planner {

// Weights and gradients of a replica on its owner's node do not cross nodes. Neither the number of replicas
// nor any sender's fan-out changes.
class ReplicaLocality {
 public:
  // `scratch` is any state of the same search, its contents are lost; it has to outlive this object.
  ReplicaLocality(const PlanningProblem& problem, const Workload& work, SearchState& scratch);

  // Moves new replicas, or exchanges the ranks of two, as long as every rank stays at or under `level` and
  // fewer replicas are off their owner's node; looks at about `budget` edges. The state fits `level`.
  void Run(SearchState& state, double level, int64_t budget);

 private:
  bool OffNode(int32_t expert_idx, int32_t rank_idx) const {
    return node_[problem_.owner[expert_idx]] != node_[rank_idx];
  }
  // Brings one replica home if that is possible.
  bool BringHome(SearchState& state, int32_t instance_idx, int64_t end);
  bool CanHold(const SearchState& state, int32_t expert_idx, int32_t rank_idx) const {
    return state.flow().Find(expert_idx, rank_idx) < 0;
  }

  const PlanningProblem& problem_;
  const Workload& work_;
  SearchState& scratch_;
  std::vector<int32_t> node_;  // [G]
  bool several_nodes_ = false;
};

}  // namespace lrmoe::planner
