// Best-of-several timing.
#pragma once

#include <time.h>

#include <algorithm>
#include <limits>

#include "absl/functional/function_ref.h"

namespace lrmoe::bench {

struct Timing {
  double ms = std::numeric_limits<double>::infinity();      // wall clock
  double cpu_ms = std::numeric_limits<double>::infinity();  // CPU time of all threads of the process
  void operator+=(const Timing& other) {
    ms += other.ms;
    cpu_ms += other.cpu_ms;
  }
};

inline double ClockMs(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

// Runs `work` once and lowers `best` to what it took.
inline void Measure(absl::FunctionRef<void()> work, Timing& best) {
  const double wall = ClockMs(CLOCK_MONOTONIC), cpu = ClockMs(CLOCK_PROCESS_CPUTIME_ID);
  work();
  best.ms = std::min(best.ms, ClockMs(CLOCK_MONOTONIC) - wall);
  best.cpu_ms = std::min(best.cpu_ms, ClockMs(CLOCK_PROCESS_CPUTIME_ID) - cpu);
}

}  // namespace lrmoe::bench
