// Predicted bytes per rank and layer. The one source of truth: the planner admits plans with it, the engine
// sizes its buffers by it, the simulator reproduces the paper's Figure 7 with it. (design: experts owned x
// (weights + gradient) + replicas x (weights + fp32 gradient) + forward rows x saved bytes + kept rows x
// backward bytes + staging)
#pragma once

#include <cstdint>

namespace lrmoe {

// What one row, one pair and one expert cost. Derived once from the layer shape and the policy.
struct MemoryCoefficients {
  int64_t owned_expert_bytes = 0;  // weights in the compute type + fp32 gradient
  int64_t replica_bytes = 0;       // weights in the compute type + fp32 gradient
  int64_t forward_row_bytes = 0;  // executor, saved per routed pair: x, a (unless recomputed), phi, ||phi||^2
  int64_t source_pair_bytes =
      0;  // source, saved per routed pair: id, alpha, norm, position (+ y_u row if exact)
  int64_t kept_row_bytes = 0;  // executor, backward per kept pair: compacted g, x, a, phi, dphi, da, dx
  int64_t staged_source_pair_bytes = 0;  // source, exchange buffers per routed pair
  int64_t staged_forward_row_bytes = 0;  // executor, exchange buffers per routed pair it executes
  int64_t staged_moved_row_bytes =
      0;  // executor, saved state packed for a kept pair that another instance executes
};

struct MemoryModelOptions {
  int32_t hidden_size = 2048;
  int32_t intermediate_size = 768;
  bool gated = true;
  int64_t weight_bytes = 2;    // per weight and activation element: 2 (bf16) or 4 (fp32)
  int64_t gradient_bytes = 4;  // per weight-gradient element
  bool exact_router_gradient = false;
  bool recompute_activation = false;
};

MemoryCoefficients ComputeMemoryCoefficients(const MemoryModelOptions& options);

// The work of one rank in one layer invocation.
struct RankWork {
  int64_t owned_experts = 0;
  int64_t replicas = 0;
  int64_t source_pairs = 0;  // T * k of this rank as a source
  int64_t forward_rows = 0;  // sum of F[e][i] over its instances
  int64_t kept_rows = 0;     // sum of X[e][i] over its instances
  int64_t moved_rows = 0;    // kept pairs it ran forward and sends elsewhere; a plan states the worst case
};

struct MemoryBytes {
  int64_t experts = 0;
  int64_t replicas = 0;
  int64_t tokens = 0;
  int64_t staging = 0;
  int64_t total() const { return experts + replicas + tokens + staging; }
  bool operator==(const MemoryBytes&) const = default;
};

// Saturates instead of overflowing: counts up to 2^40 rows are legal.
MemoryBytes PredictMemory(const MemoryCoefficients& coefficients, const RankWork& work);

}  // namespace lrmoe
