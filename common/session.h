// The messages of the controller session (design: one bidirectional stream per worker), as both sides think
// of them. proto/convert turns them into lrmoe.v1 and back; limits are checked there.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "common/ids.h"
#include "common/layer_shape.h"
#include "common/plan.h"
#include "common/policy.h"
#include "common/report.h"

namespace lrmoe {

// ---- worker to controller

// First on every stream.
struct Hello {
  int32_t rank_idx = 0;               // 0..world_size-1
  int32_t world_size = 1;             // 1..1024
  std::string job;                    // random id shared by the ranks of one launch; 1..128 bytes
  std::string node;                   // 1..256 bytes; ranks with equal names share a node
  std::string device;                 // 0..256 bytes, for people
  int64_t memory_budget_bytes = 0;    // over all layers; 0: unlimited
  int32_t replica_slots = 0;          // per layer, 0..4096
  double rows_per_ms = 0;             // measured service rate; 0: unknown
  double intra_node_gb_per_s = 0;     // 0: unknown
  double inter_node_gb_per_s = 0;     // 0: unknown
  Epoch epoch{0};                     // resume point: the epoch it was welcomed to; 0: first contact
  std::string version;                // of the worker's program, for people
  bool recompute_activation = false;  // activation_memory = recompute; equal on all ranks of a job
  // Compute types of which the device holds weights packed; equal on all ranks of a job.
  bool packs_bf16_weights = false;
  bool packs_fp32_weights = false;
  bool optimizer_on_device = false;  // optimizer_state = device; equal on all ranks of a job
  bool operator==(const Hello&) const = default;
};

// This rank's routed counts of an invocation. Sent again after a reconnect while its plan is awaited.
struct SourceCounts {
  Invocation invocation;
  std::vector<int64_t> counts;  // [E], each 0..2^40
  bool operator==(const SourceCounts&) const = default;
};

struct Heartbeat {
  int64_t current_step = 0;
  bool operator==(const Heartbeat&) const = default;
};

// Last on a stream that ends on purpose.
struct Leaving {
  std::string reason;   // empty: done
  bool failed = false;  // true: the epoch ends at once with an error that names this rank and the reason
  bool operator==(const Leaving&) const = default;
};

// ModelSpec is sent once a framework has attached, before the first counts, and again after a reconnect.
using WorkerMessage = std::variant<Hello, SourceCounts, InvocationReport, Heartbeat, Leaving, ModelSpec>;

// ---- controller to worker

// The epoch begins (all ranks are here), or goes on after a reconnect.
struct Welcome {
  Epoch epoch{0};
  Policy policy;
  bool operator==(const Welcome&) const = default;
};

// Every plan of `from_step` and later is made with `policy`, on all ranks.
struct PolicyChange {
  Policy policy;
  int64_t from_step = 0;
  bool operator==(const PolicyChange&) const = default;
};

// The epoch is dead; the stream ends after it.
struct Abort {
  std::string reason;
  bool operator==(const Abort&) const = default;
};

// Finish the current step, then leave.
struct Drain {
  std::string reason;
  bool operator==(const Drain&) const = default;
};

// No plan for this invocation (infeasible, or ranks sent different content). The same on all ranks.
struct PlanError {
  Invocation invocation;
  absl::Status status;  // never OK
  bool operator==(const PlanError&) const = default;
};

using ControllerMessage = std::variant<Welcome, ExecutionPlan, PolicyChange, Abort, Drain, PlanError>;

}  // namespace lrmoe
