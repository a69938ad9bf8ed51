// What new replicas cost, and which of them are not worth it.
#pragma once

#include <cstdint>
#include <vector>

#include "controller/planner/problem.h"
#include "controller/planner/search_state.h"

namespace lrmoe::planner {

// Predicted time against predicted time: a replica takes rows off the peak, and its weights and its gradient
// have to travel.
class ReplicaThrift {
 public:
  ReplicaThrift(const PlanningProblem& problem, const Workload& work);

  // Gives up new replicas that run fewer rows than their owner could while it sends the weights; then, if the
  // rest do not shorten the layer, their gradients counted too, those with the fewest rows until what is left
  // does. `without` is a state of the same search, its contents are lost. The rows of `state` stay a
  // least-peak allocation.
  void Run(SearchState& state, SearchState& without) const;

 private:
  // Microseconds to send one replica's weights and to return its gradient.
  double TransferUs(int32_t owner_idx, int32_t rank_idx) const {
    return problem_.cluster.ranks[owner_idx].node == problem_.cluster.ranks[rank_idx].node ? on_node_us_
                                                                                           : off_node_us_;
  }
  // Microseconds that a peak of `level` rows takes.
  double LevelUs(double level) const { return level * us_per_row_; }
  // Time of a replica's rows at their owner over the time of its weights.
  double Worth(const SearchState& state, int32_t instance_idx) const;
  // The new replica of the least worth; there is one.
  int32_t LeastWorth(const SearchState& state) const;
  // Peak and, one after the other, the transfers of the busiest rank.
  double LayerUs(SearchState& state) const;
  void GiveUpUnpaid(SearchState& state) const;
  void GiveUpUntilPaid(SearchState& state, SearchState& without) const;

  const PlanningProblem& problem_;
  const Workload& work_;
  double on_node_us_ = 0, off_node_us_ = 0;
  double weights_share_ = 0;
  double us_per_row_ = 0;  // of the fastest rank
};

}  // namespace lrmoe::planner
