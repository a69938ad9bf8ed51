// Quotas K_e: max-min fair retention (design; paper, Algorithm 1 line 6).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "controller/planner/placed_rows.h"
#include "controller/planner/workload.h"

namespace lrmoe::planner {

// The fewest rows expert e must keep: ceil(floor * N_e).
std::vector<int64_t> FloorRows(const Workload& work, double retention_floor);

// Quotas that sum to `kept` with low[e] <= K_e <= N_e and that the instances of `placed` can carry when each
// rank takes at most its rows at `level`. The rates K_e / N_e are max-min fair: all rise together, an expert
// stops when it is full or when the ranks that host it are at capacity, the rest go on. Whole rows by largest
// remainder, ties to the lowest expert. Nothing when the ranks cannot carry that much.
std::optional<std::vector<int64_t>> FairQuotas(const Workload& work, const PlacedRows& placed,
                                               const RankCapacity& capacity, double level, int64_t kept,
                                               const std::vector<int64_t>& low);

// The same rate for every expert, whole rows by largest remainder; no capacities.
std::vector<int64_t> UniformQuotas(const Workload& work, int64_t kept);

// The same number of rows for every expert, at least its low[e] and at most all it has, so that they sum to
// `kept`; whole rows to the lowest experts first. sum of low <= kept.
std::vector<int64_t> WaterfillQuotas(const Workload& work, int64_t kept, const std::vector<int64_t>& low);

// Backward rows X on the instances of `placed` for the given quotas: as proportional to the forward rows as
// the least peak allows, so that few kept pairs have to move. Empty when the limits of `capacity` forbid any
// allocation.
struct BackwardRows {
  std::vector<int64_t> rows;  // [I]
  double level = 0;           // the least peak level for these instances
};
std::optional<BackwardRows> AllocateBackward(const Workload& work, const PlacedRows& placed,
                                             const RankCapacity& capacity, const std::vector<int64_t>& quota);

}  // namespace lrmoe::planner
