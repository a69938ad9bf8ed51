// A dumb twin of the replica search: every placement, one after the other.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>
#include <vector>

#include "controller/planner/problem.h"

namespace lrmoe::planner {

// For a handful of experts and ranks only.
class SlowPlacements {
 public:
  static constexpr int kNone = std::numeric_limits<int>::max();

  SlowPlacements(const PlanningProblem& problem, const std::vector<int64_t>& rows)
      : problem_(problem), rows_(rows) {}

  // The fewest new replicas with which every rank stays within `room`, kNone when no placement does.
  int FewestNew(const std::vector<int64_t>& room) {
    room_.assign(size_t{1} << room.size(), 0);
    for (size_t set = 1; set < room_.size(); ++set)
      for (size_t g = 0; g < room.size(); ++g)
        if (set >> g & 1) room_[set] += room[g];
    fewest_ = kNone;
    hosts_.assign(rows_.size(), 0);
    for (size_t e = 0; e < rows_.size(); ++e) hosts_[e] = 1u << problem_.owner[e];
    Visit(0, 0);
    return fewest_;
  }

 private:
  // Chooses what rank `g` and those after it hold.
  void Visit(size_t g, int num_new) {
    if (num_new >= fewest_) return;
    if (g == problem_.cluster.ranks.size()) {
      if (Fits()) fewest_ = num_new;
      return;
    }
    for (uint32_t held = 0; held < (1u << rows_.size()); ++held) {
      if (std::popcount(held) > problem_.cluster.ranks[g].replica_slots) continue;
      int added = 0;
      bool owned = false;
      for (size_t e = 0; e < rows_.size(); ++e) {
        if (!(held >> e & 1)) continue;
        owned = owned || problem_.owner[e] == static_cast<int32_t>(g);
        added += !IsResident(g, static_cast<int32_t>(e));
      }
      if (owned) continue;
      const std::vector<uint32_t> saved = hosts_;
      for (size_t e = 0; e < rows_.size(); ++e)
        if (held >> e & 1) hosts_[e] |= 1u << g;
      Visit(g + 1, num_new + added);
      hosts_ = saved;
    }
  }

  bool IsResident(size_t g, int32_t e) const {
    if (problem_.resident.empty()) return false;
    for (int32_t other : problem_.resident[g])
      if (other == e) return true;
    return false;
  }

  // Hall's condition: what can run on a set of ranks only has to fit there.
  bool Fits() const {
    for (uint32_t set = 0; set < room_.size(); ++set) {
      int64_t confined = 0;
      for (size_t e = 0; e < rows_.size(); ++e)
        if ((hosts_[e] & ~set) == 0) confined += rows_[e];
      if (confined > room_[set]) return false;
    }
    return true;
  }

  const PlanningProblem& problem_;
  const std::vector<int64_t>& rows_;
  std::vector<int64_t> room_;    // by set of ranks
  std::vector<uint32_t> hosts_;  // [E] set of ranks
  int fewest_ = kNone;
};

}  // namespace lrmoe::planner
