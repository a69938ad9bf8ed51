// Where the engine gets its plans from: the controller session in a worker, the planner itself in tests and benchmarks.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "common/deadline.h"
#include "common/ids.h"
#include "common/plan.h"

namespace lrmoe::engine {

// What was measured of one invocation; sent to the controller as the Report. Milliseconds, bytes, rows of this rank.
struct InvocationReport {
  Invocation invocation;
  struct Phases {
    double plan_ms = 0, weights_ms = 0, dispatch_ms = 0, compute_ms = 0, return_ms = 0;  // both directions
    double score_ms = 0, select_ms = 0, pack_ms = 0, gradients_ms = 0;                   // backward only
    double total_ms = 0;
    double cpu_ms = 0;  // processor time of the engine thread and its compute threads
  };
  Phases forward, backward;
  int64_t routed_rows = 0;  // pairs this rank sourced
  int64_t kept_rows = 0;    // of those, kept by the backward
  int64_t forward_rows = 0, backward_rows = 0;  // executed here
  int64_t moved_rows = 0;   // kept pairs that left their forward executor, sent from here
  int64_t dispatch_bytes = 0, return_bytes = 0, scalar_bytes = 0;  // backward, sent to other ranks
  int64_t peak_bytes = 0;       // measured: this layer's experts, replicas, saved state and buffers
  int64_t predicted_bytes = 0;  // the memory model's figure for the same
  double kept_score = 0, total_score = 0;  // score mass of the pairs this rank sourced
};

class PlanProvider {
 public:
  virtual ~PlanProvider() = default;

  // The plan of an invocation, equal on all ranks. `counts` are this rank's routed counts, [E].
  // Idempotent: the same invocation with the same counts gives the same plan. Blocks until `deadline`.
  // Errors as the planner's (ResourceExhausted: infeasible), and Unavailable when no plan can come any more.
  virtual absl::StatusOr<ExecutionPlan> Plan(const Invocation& invocation, std::span<const int64_t> counts,
                                             Deadline deadline) = 0;

  // After the backward pass (or the forward, when none follows). Must not block.
  virtual void Report(const InvocationReport& report) = 0;
};

}  // namespace lrmoe::engine
