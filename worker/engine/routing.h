// Pure: which instance executes each routed pair, and where its row lies on the wire and at the executor. All
// sizes follow from the plan, so the host knows every shape before anything is exchanged (paper, section 3).
//
// A pair p = token * k + slot. Pairs of one source fill an expert's instances in plan order, in (token, slot)
// order, as many as forward_rows_by_source says. Orders used everywhere:
//   send order of a source:      by (executor rank, instance, pair)
//   receive order at an executor: by (source, instance, pair) - the send orders of all sources, one after
//   another row order at an executor:     by (instance, source, pair) - each instance's rows are contiguous
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "common/plan.h"
#include "kernels/pairs.h"

namespace lrmoe::engine {

// Local view of one instance.
struct LocalInstance {
  int32_t instance_idx = 0;  // into plan.instances
  int32_t expert_idx = 0;
  int64_t first_row = 0;  // in row order
  int64_t rows = 0;
};

// The rows of one (instance here, source): contiguous in row order and in receive order.
struct RowRun {
  int32_t local_idx = 0;  // into ForwardRoute::local
  int32_t source_idx = 0;
  int64_t row = 0;       // first, in row order
  int64_t position = 0;  // first, in receive order
  int64_t count = 0;     // > 0
};

struct ForwardRoute {
  std::vector<int64_t> send_rows;  // [G] pairs of this source that rank d executes
  // [instances] where their pairs of this source begin in its send order. Those of one expert that lie one
  // after another over its instances, in plan order, are in (token, slot) order.
  std::vector<int64_t> first_position;
  std::vector<int64_t> recv_rows;    // [G] pairs of source s executed here
  std::vector<LocalInstance> local;  // instances on this rank, in plan order
  std::vector<RowRun> runs;          // by (local_idx, source_idx)
  int64_t rows = 0;                  // executed here, sum of recv_rows
};

// Checks a plan that came from outside against what the engine relies on: shapes, ranges, order of instances,
// one instance per (expert, rank), the owner's instance first, conservation of forward and backward rows, and
// forward_rows_by_source of this rank equal to its counts. Internal error naming what differs.
absl::Status CheckExecutable(const LayerPlan& plan, std::span<const int32_t> owner, int32_t rank,
                             std::span<const int64_t> counts);

// What `rank` sends, gets and executes. The plan must have passed CheckExecutable.
ForwardRoute RouteForward(const LayerPlan& plan, int32_t rank);

// The send order of source `rank`, whose route it is, out of its pairs listed by (expert, token, slot), by
// instance: from there, to here.
std::vector<kernels::Stretch> SendOrder(const LayerPlan& plan, const ForwardRoute& route, int32_t rank);

// In which piece each instance's y rows return to their sources: [instance], 0 and up. A piece travels while
// the next is computed. Pieces of a rank go from its last instances to its first, so that the activated rows
// behind them can be given back, and hold `least_rows` each and so many that the rows of two pieces and the
// activated rows that are left never take more than the rows of all; where that cannot be, all is piece 0.
// Equal on all ranks.
inline constexpr int32_t kMaxPieces = 4;
std::vector<int32_t> ReturnPieces(const LayerPlan& plan, int64_t hidden_size, int64_t intermediate_size,
                                  int64_t least_rows);

int64_t Sum(std::span<const int64_t> values);

// Running totals: out[i] = sum of values before i; one longer than values.
std::vector<int64_t> Offsets(std::span<const int64_t> values);

}  // namespace lrmoe::engine
