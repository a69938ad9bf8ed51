// Where the engine gets its plans from: the controller session in a worker, the planner itself in tests and
// benchmarks.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"
#include "common/deadline.h"
#include "common/ids.h"
#include "common/plan.h"
#include "common/report.h"

namespace lrmoe::engine {

using lrmoe::InvocationReport;

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
