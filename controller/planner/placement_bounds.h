// What no placement can do better: lower bounds that tell a search when to stop.
#pragma once

#include <cstdint>
#include <vector>

#include "controller/planner/owned_experts.h"
#include "controller/planner/replica_search.h"

namespace lrmoe::planner {

class PlacementBounds {
 public:
  PlacementBounds(const PlanningProblem& problem, const Workload& work, const SearchLimits& limits,
                  const OwnedExperts& owned);

  // No placement has a lower peak: a rank carries at most its own rows and those of the largest experts that
  // its slots can hold. Infinity when memory forbids every placement.
  double LeastLevel() const { return least_level_; }
  // No placement with its peak at or under `level` has fewer new replicas. What overloaded owners hold above
  // the level has to find room on ranks that hold a replica, and consists of enough different experts.
  int32_t LeastNew(double level) const;

 private:
  // Different experts that `rank_idx` has to replicate anew to shed `excess` rows.
  int32_t LeastExperts(int32_t rank_idx, int64_t excess) const;

  const Workload& work_;
  const SearchLimits& limits_;
  const OwnedExperts& owned_;
  std::vector<int32_t> slots_;            // [G]
  std::vector<uint8_t> expert_resident_;  // [E] the expert is resident somewhere
  std::vector<uint8_t> rank_resident_;    // [G] the rank has residents
  double least_level_ = 0;
};

}  // namespace lrmoe::planner
