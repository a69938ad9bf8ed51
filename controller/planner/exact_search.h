// Exhaustive search for small placements: the fewest new replicas within the target, proven.
#pragma once

#include <cstdint>
#include <vector>

#include "controller/planner/replica_greedy.h"
#include "controller/planner/search_state.h"

namespace lrmoe::planner {

// Depth-first with iterative deepening. When a placement misses the target, some replica has to cross the cut
// that the allocation names: an expert confined to it, on a rank outside. Branching over exactly these is
// complete.
class ExactSearch {
 public:
  ExactSearch(const PlanningProblem& problem, const Workload& work, const SearchLimits& limits,
              ReplicaGreedy& greedy);

  // Looks for a placement within the target with `least`..`bound` - 1 new replicas, fewest first, visiting at
  // most `max_nodes` placements. True: `state` holds it, fitted.
  bool Run(SearchState& state, int32_t least, int32_t bound, int32_t max_nodes);
  // The last Run proved its answer: what it found has the fewest new replicas, or there is none below the
  // bound.
  bool complete() const { return complete_; }

 private:
  bool Visit(int32_t depth, int32_t allowed);
  bool SeenBefore(const RowFlow& flow);

  const PlanningProblem& problem_;
  const Workload& work_;
  ReplicaGreedy& greedy_;
  SearchState root_;
  std::vector<SearchState> stack_;
  std::vector<uint64_t> seen_;  // hashes of placements visited at this deepening
  int32_t nodes_left_ = 0;
  int32_t found_at_ = 0;
  bool complete_ = false;
};

}  // namespace lrmoe::planner
