// What one rank measured of one invocation; travels from the engine over the session into the controller's
// history.
#pragma once

#include <cstdint>

#include "common/ids.h"

namespace lrmoe {

// Milliseconds, bytes and rows of one rank.
struct InvocationReport {
  Invocation invocation;
  struct Phases {
    double plan_ms = 0, weights_ms = 0, dispatch_ms = 0, compute_ms = 0, return_ms = 0;  // both directions
    double score_ms = 0, select_ms = 0, pack_ms = 0, gradients_ms = 0;                   // backward only
    double total_ms = 0;
    double cpu_ms = 0;  // processor time of the engine thread and its compute threads
    bool operator==(const Phases&) const = default;
  };
  Phases forward, backward;
  int64_t routed_rows = 0;                      // pairs this rank sourced
  int64_t kept_rows = 0;                        // of those, kept by the backward
  int64_t forward_rows = 0, backward_rows = 0;  // executed here
  int64_t moved_rows = 0;                       // kept pairs that left their forward executor, sent from here
  int64_t dispatch_bytes = 0, return_bytes = 0, scalar_bytes = 0;  // backward, sent to other ranks
  int64_t peak_bytes = 0;       // measured: this layer's experts, replicas, saved state and buffers
  int64_t predicted_bytes = 0;  // the memory model's figure for the same
  double kept_score = 0, total_score = 0;  // score mass of the pairs this rank sourced
  bool operator==(const InvocationReport&) const = default;
};

}  // namespace lrmoe
