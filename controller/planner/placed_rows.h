// A placement with its forward rows, flat and in the order of a plan: (expert, owner first, rank). Every
// expert has an instance; at its owner only where the policy does not move owners.
#pragma once

#include <cstdint>
#include <vector>

#include "controller/planner/row_flow.h"
#include "controller/planner/workload.h"

namespace lrmoe::planner {

struct PlacedRows {
  std::vector<int32_t> first;     // [E + 1] first instance of each expert
  std::vector<int32_t> expert;    // [I]
  std::vector<int32_t> rank;      // [I]
  std::vector<uint8_t> is_new;    // [I] neither resident nor the owner's
  std::vector<int64_t> forward;   // [I] F[e][i]
  std::vector<int32_t> replicas;  // [G] experts held beyond as many as the rank owns
  int32_t num_new = 0;
  bool free_replicas = false;  // a bound: they take neither memory nor transfers

  int32_t size() const { return static_cast<int32_t>(rank.size()); }
};

// The flow's instances and rows, in plan order.
PlacedRows FromFlow(const Workload& work, const RowFlow& flow);

// A flow over the same instances with other demands: `rows` per instance of `placed`, in its order. Instance
// indices of the flow are returned in `flow_idx` ([I]).
RowFlow ToFlow(const Workload& work, const PlacedRows& placed, const std::vector<int64_t>& rows,
               std::vector<int32_t>& flow_idx);

// Shares `total` among the entries in proportion to `weight` (not all zero unless total is 0), never more
// than an entry's weight when total <= sum of weights; largest remainder, ties to the first.
void ShareInProportion(const int64_t* weight, int32_t count, int64_t total, int64_t* share);

}  // namespace lrmoe::planner
