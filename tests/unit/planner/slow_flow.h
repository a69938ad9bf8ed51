// A dumb twin of the allocator: plain depth-first augmenting paths on a dense matrix, and a linear scan of
// levels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <set>
#include <vector>

namespace lrmoe::planner {

// hosts[e][g]: expert e may run on rank g. Whether `demand` fits under the row capacities `room`.
inline bool SlowFits(const std::vector<std::vector<bool>>& hosts, const std::vector<int64_t>& demand,
                     const std::vector<int64_t>& room) {
  const size_t num_experts = demand.size(), num_ranks = room.size();
  std::vector<std::vector<int64_t>> flow(num_experts, std::vector<int64_t>(num_ranks, 0));
  std::vector<int64_t> used(num_ranks, 0);
  for (size_t e = 0; e < num_experts; ++e) {
    int64_t left = demand[e];
    while (left > 0) {
      std::vector<bool> seen(num_ranks, false);
      // Pushes up to `amount` rows of expert `x` to some rank, displacing others; returns how many.
      std::function<int64_t(size_t, int64_t)> push = [&](size_t x, int64_t amount) -> int64_t {
        for (size_t g = 0; g < num_ranks; ++g) {
          if (!hosts[x][g] || seen[g]) continue;
          seen[g] = true;
          if (used[g] < room[g]) {
            const int64_t rows = std::min(amount, room[g] - used[g]);
            used[g] += rows;
            flow[x][g] += rows;
            return rows;
          }
          for (size_t y = 0; y < num_experts; ++y) {
            if (y == x || flow[y][g] == 0) continue;
            const int64_t rows = push(y, std::min(amount, flow[y][g]));
            if (rows == 0) continue;
            flow[y][g] -= rows;
            flow[x][g] += rows;
            return rows;
          }
        }
        return 0;
      };
      const int64_t rows = push(e, left);
      if (rows == 0) return false;
      left -= rows;
    }
  }
  return true;
}

// The least peak of load / weight, by trying every level that some whole number of rows on some rank can
// have.
inline double SlowLeastPeak(const std::vector<std::vector<bool>>& hosts, const std::vector<int64_t>& demand,
                            const std::vector<double>& weight) {
  int64_t total = 0;
  for (int64_t rows : demand) total += rows;
  std::set<double> levels;
  for (double w : weight)
    for (int64_t n = 0; n <= total; ++n) levels.insert(static_cast<double>(n) / w);
  std::vector<double> sorted(levels.begin(), levels.end());
  size_t low = 0, high = sorted.size() - 1;
  while (low < high) {
    const size_t middle = (low + high) / 2;
    std::vector<int64_t> room;
    for (double w : weight) {
      int64_t n = 0;
      while (static_cast<double>(n + 1) / w <= sorted[middle]) ++n;
      room.push_back(n);
    }
    if (SlowFits(hosts, demand, room))
      high = middle;
    else
      low = middle + 1;
  }
  return sorted[low];
}

}  // namespace lrmoe::planner
