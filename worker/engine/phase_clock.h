// Time of the phases of one operation. Processor time is that of the engine thread, or of the whole process
// when the device has threads of its own (the worker's other threads sleep meanwhile); waiting in exchanges,
// which may poll, is left out. A device that works on while the host goes on is told to be waited for at the
// end of a phase, or its time is that of a later one.
#pragma once

#include <time.h>

#include <chrono>

#include "absl/strings/string_view.h"
#include "kernels/kernels.h"

namespace lrmoe::engine {

// One kind of exchange in one forward or backward pass of this rank. What was under way and not waited for
// was hidden behind computation.
struct ExchangeTime {
  absl::string_view operation;  // e.g. "forward return"
  double under_way_ms = 0;      // time in which at least one was: from a start until all had arrived
  double waited_ms = 0;         // in the exchanges' own calls
  std::chrono::steady_clock::time_point end = {};  // of the last
};

class PhaseClock {
 public:
  // `awaited`: waited for at the end of each phase; or null. Its errors are told to whoever waits next.
  PhaseClock(bool whole_process, kernels::Device* awaited)
      : awaited_(awaited),
        clock_(whole_process ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_THREAD_CPUTIME_ID),
        start_(std::chrono::steady_clock::now()),
        lap_(start_),
        cpu_start_ms_(CpuMs()) {}

  // Adds the time since the last Lap (or the start) to `phase_ms`.
  void Lap(double& phase_ms) {
    if (awaited_ != nullptr) (void)awaited_->Wait();
    const auto now = std::chrono::steady_clock::now();
    phase_ms += std::chrono::duration<double, std::milli>(now - lap_).count();
    lap_ = now;
  }
  double total_ms() const {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_).count();
  }
  double cpu_ms() const { return CpuMs() - cpu_start_ms_ - excluded_ms_; }

  // Between these two, processor time is not counted.
  void Pause() { paused_ms_ = CpuMs(); }
  void Resume() { excluded_ms_ += CpuMs() - paused_ms_; }

 private:
  double CpuMs() const {
    timespec now;
    clock_gettime(clock_, &now);
    return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
  }

  kernels::Device* awaited_;
  clockid_t clock_;
  std::chrono::steady_clock::time_point start_, lap_;
  double cpu_start_ms_;
  double paused_ms_ = 0;
  double excluded_ms_ = 0;
};

}  // namespace lrmoe::engine
