// Local search over placements: one replica gives its slot to another as long as that brings the ranks closer
// to the target.
#pragma once

#include <cstdint>
#include <vector>

#include "common/random.h"
#include "controller/planner/replica_greedy.h"
#include "controller/planner/search_state.h"

namespace lrmoe::planner {

class ReplicaExchange {
 public:
  // The references have to outlive this object; `scratch` is any state of the same search, its contents are
  // lost.
  ReplicaExchange(const Workload& work, ReplicaGreedy& greedy, SearchState& scratch)
      : work_(work), greedy_(greedy), scratch_(scratch) {}

  // Changes `state` until it fits its target (true) with at most `max_new` new replicas, or the budget (edges
  // looked at) is spent. The rows above the target never get more. Deterministic.
  bool Run(SearchState& state, int32_t max_new, int64_t budget);

 private:
  bool Step(SearchState& state, int32_t max_new, Random& random);

  const Workload& work_;
  ReplicaGreedy& greedy_;
  SearchState& scratch_;
  std::vector<int32_t> replicas_;
};

}  // namespace lrmoe::planner
