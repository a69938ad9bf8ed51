#include "controller/planner/placement_bounds.h"

#include <algorithm>
#include <numeric>

namespace lrmoe::planner {

PlacementBounds::PlacementBounds(const PlanningProblem& problem, const Workload& work,
                                 const SearchLimits& limits, const OwnedExperts& owned)
    : work_(work), limits_(limits), owned_(owned) {
  expert_resident_.assign(work.num_experts, 0);
  rank_resident_.assign(work.num_ranks, 0);
  for (size_t g = 0; g < problem.resident.size(); ++g) {
    rank_resident_[g] = !problem.resident[g].empty();
    for (int32_t e : problem.resident[g]) expert_resident_[e] = 1;
  }
  int32_t most_slots = 0;
  for (const RankResources& rank : problem.cluster.ranks) {
    slots_.push_back(rank.replica_slots);
    most_slots = std::max(most_slots, rank.replica_slots);
  }
  std::vector<int32_t> largest(work.num_experts);
  std::iota(largest.begin(), largest.end(), 0);
  const auto by_rows = [&](int32_t a, int32_t b) {
    return work.rows[a] != work.rows[b] ? work.rows[a] > work.rows[b] : a < b;
  };
  std::sort(largest.begin(), largest.end(), by_rows);
  RankCapacity carried = limits.capacity;
  for (int32_t g = 0; g < work.num_ranks; ++g) {
    int64_t rows = owned.rows(g);
    const int64_t enough = work.total;
    int32_t slots = slots_[g];
    for (size_t i = 0; i < largest.size() && slots > 0 && rows < enough; ++i) {
      if (problem.owner[largest[i]] == g) continue;
      rows += work.rows[largest[i]];
      --slots;
    }
    carried.limit[g] = std::min(carried.limit[g], rows);
  }
  least_level_ = carried.LeastLevel(work.total, work.all_ranks);
}

int32_t PlacementBounds::LeastExperts(int32_t g, int64_t excess) const {
  for (int32_t e : owned_.of(g))
    if (expert_resident_[e]) excess -= work_.rows[e];  // may leave for nothing
  int32_t count = 0;
  for (int32_t e : owned_.of(g)) {
    if (excess <= 0) break;
    if (expert_resident_[e]) continue;
    excess -= work_.rows[e];
    ++count;
  }
  return count;
}

int32_t PlacementBounds::LeastNew(double level) const {
  int64_t overflow = 0;
  int32_t experts = 0;
  std::vector<int64_t> rooms;
  rooms.reserve(work_.num_ranks);
  for (int32_t g = 0; g < work_.num_ranks; ++g) {
    const int64_t room = limits_.capacity.RowsAt(level, g) - owned_.rows(g);
    if (room < 0) {
      overflow -= room;
      experts += LeastExperts(g, -room);
    } else if (rank_resident_[g]) {
      overflow -= room;  // may be used for nothing
    } else if (slots_[g] > 0) {
      rooms.push_back(room);
    }
  }
  std::sort(rooms.rbegin(), rooms.rend());
  int32_t receivers = 0;
  for (size_t i = 0; i < rooms.size() && overflow > 0; ++i, ++receivers) overflow -= rooms[i];
  return std::max(experts, receivers);
}

}  // namespace lrmoe::planner
