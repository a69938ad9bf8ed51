// Decorates a transport with seeded faults: the same seed gives the same faults at the same calls.
#pragma once

#include <cstdint>
#include <memory>

#include "worker/transport/transport.h"

namespace lrmoe::transport {

struct FaultPlan {
  uint64_t seed = 0;
  double abort_probability = 0.0;  // per operation: the epoch is aborted instead of running it
  double hang_probability =
      0.0;  // per operation: this rank never arrives; returns DeadlineExceeded at the deadline
  double delay_probability =
      0.0;  // per operation: this rank arrives late, after yielding the processor delay_yields times
  int32_t delay_yields = 100;
  int64_t first_operation = 0;  // operations before this one are left alone
};

std::unique_ptr<Transport> CreateFaulty(std::unique_ptr<Transport> inner, const FaultPlan& plan);

}  // namespace lrmoe::transport
