// What a layer invocation must put on the wire, counted from the routing, the plan and the kept pairs alone,
// by plain loops over pairs: the twin of the engine's own figures.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/layer_shape.h"
#include "common/plan.h"

namespace lrmoe::bench {

// Bytes one rank sends to others.
struct WireBytes {
  int64_t dispatch = 0;   // payload rows, and in the backward pass saved rows of moved pairs
  int64_t return_ = 0;    // y rows; dx rows
  int64_t scalars = 0;    // indices, norms, scores, thresholds, counts, masks, alphas
  int64_t gradients = 0;  // of replicas, to their owners
  bool operator==(const WireBytes&) const = default;
};
struct RankWire {
  WireBytes forward, backward;
};

// What the engines agreed on, gathered over the ranks.
struct WireInput {
  const LayerShape* shape = nullptr;
  const ExecutionPlan* execution = nullptr;
  bool recompute_activation = false;
  std::vector<std::span<const int32_t>> expert_idx;  // [G] of [T, k]
  std::vector<std::span<const uint8_t>> kept;        // [G] of [T, k]
};

// All ranks on one node. Weights of replicas are not included: they travel only when a rank lacks them.
std::vector<RankWire> ExpectedWire(const WireInput& input);

}  // namespace lrmoe::bench
