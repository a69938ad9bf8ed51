// Predicted bytes per rank and layer. The one source of truth: the planner admits plans with it, the engine
// takes its buffers by it, the simulator reproduces the paper's Figure 7 with it. (design: experts owned x
// (weights + gradient [+ optimizer state])
// + replicas x (weights + fp32 gradient) + forward rows x saved bytes + kept rows x backward bytes + staging)
//
// Buffers of a layer invocation come and go, so what must fit is the largest of its stages, not their sum.
// The stages are those of worker/engine/{forward,backward,compact,compact_compute}.cc, less those that never
// take more than all others; a test holds the two together.
#pragma once

#include <array>
#include <cstdint>

#include "common/layer_shape.h"

namespace lrmoe {

// Bytes in tensor buffers at one moment of an invocation, per unit of the rank's work.
struct MemoryStage {
  int64_t source_pair = 0;
  int64_t forward_row = 0;
  int64_t kept_row = 0;
  bool operator==(const MemoryStage&) const = default;
};

// What one row, one pair and one expert cost. Derived once from the layer shape and the policy.
struct MemoryCoefficients {
  int64_t owned_expert_bytes = 0;  // of a replica, + master and moments where the device holds them
  int64_t replica_bytes = 0;       // weights in the compute type, in all forms, + fp32 gradient
  // Saved between forward and backward.
  int64_t forward_row_bytes = 0;  // executor, per routed pair: x, a (unless recomputed)
  int64_t source_pair_bytes = 0;  // source, per routed pair: position, alpha, norm (+ y_u row if exact)
  int64_t row_bytes = 0;          // of x, y, g, dx
  // Largest use of the backward pass per kept pair at its executor: g, x, a, dphi, da, payload.
  int64_t kept_row_bytes = 0;
  // Saved state of a kept pair that another instance executes, on the wire.
  int64_t staged_moved_row_bytes = 0;
  // One expert's weights and gradient on their way between owner and replica, in whole blocks.
  int64_t staged_weights_bytes = 0;
  int64_t staged_gradient_bytes = 0;

  static constexpr int kNumStages = 16;
  std::array<MemoryStage, kNumStages> stages;  // saved bytes included
  int compaction_stage = 0;                    // the one in which moved rows are staged as well
};

// Rows and parameters beyond this, per direction, travel in rounds through a buffer of at most this size.
inline constexpr int64_t kExchangeStagingBytes = int64_t{2} << 20;
inline constexpr int64_t kExchangeBlockElements = 4096;  // parameters travel in blocks of this many

struct MemoryModelOptions {
  int32_t hidden_size = 2048;
  int32_t intermediate_size = 768;
  bool gated = true;
  int64_t weight_bytes = 2;    // per weight and activation element: 2 (bf16) or 4 (fp32)
  int64_t gradient_bytes = 4;  // per weight-gradient element
  bool exact_router_gradient = false;
  bool recompute_activation = false;
  bool packs_weights = false;        // devices hold weights packed, once per direction, where they can
  bool optimizer_on_device = false;  // owned experts' fp32 master and moments count as well
};

// fp32 master, first and second moment of each parameter of an owned expert.
inline constexpr int64_t kOptimizerBytesPerParameter = 12;

// What a layer's shape says of it; the rest as by default.
MemoryModelOptions MemoryModelOf(const LayerShape& shape);

// Forms in which each instance holds its weights, each of their plain size: 2, one per direction, where the
// devices pack and both sizes are multiples of kPackedMultiple; else 1.
inline constexpr int32_t kPackedMultiple = 64;
int64_t NumWeightForms(const MemoryModelOptions& options);

MemoryCoefficients ComputeMemoryCoefficients(const MemoryModelOptions& options);

// The work of one rank in one layer invocation.
struct RankWork {
  int64_t owned_experts = 0;
  int64_t replicas = 0;
  int64_t exported_replicas = 0;  // replicas of its experts on other ranks
  int64_t source_pairs = 0;       // T * k of this rank as a source
  int64_t forward_rows = 0;       // sum of F[e][i] over its instances
  int64_t kept_rows = 0;          // sum of X[e][i] over its instances
  // Kept pairs it ran forward and sends elsewhere, and the reverse; a plan states the worst case of each.
  int64_t moved_rows = 0;
  int64_t received_rows = 0;
  // Pairs, of all sources, of the experts it owns that keep some of their pairs but not all; of one of them.
  int64_t scored_pairs = 0;
  int64_t most_scored_pairs = 0;
};

struct MemoryBytes {
  int64_t experts = 0;
  int64_t replicas = 0;
  int64_t tokens = 0;   // saved between forward and backward
  int64_t staging = 0;  // the largest stage beyond that
  int64_t total() const { return experts + replicas + tokens + staging; }
  bool operator==(const MemoryBytes&) const = default;
};

// Saturates instead of overflowing: counts up to 2^40 rows are legal.
MemoryBytes PredictMemory(const MemoryCoefficients& coefficients, const RankWork& work);

// The most forward rows, `rate` of them kept, with which the rest of `work` fits `available_bytes`; 0 when
// nothing does.
int64_t MaxForwardRows(const MemoryCoefficients& coefficients, const RankWork& work, double rate,
                       int64_t available_bytes);
// The most kept rows with which the rest of `work` fits; 0 when nothing does.
int64_t MaxKeptRows(const MemoryCoefficients& coefficients, const RankWork& work, int64_t available_bytes);

}  // namespace lrmoe
