// A progress bar on standard error, only where that is a terminal.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace lrmoe::sim {

class ProgressBar {
 public:
  explicit ProgressBar(std::string what);
  ~ProgressBar();  // takes the bar away
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;

  // `done` of 0..1; `count` things so far. Cheap: draws ten times a second at most.
  void Update(double done, int64_t count);

 private:
  std::string what_;
  bool shown_ = false, terminal_;
  std::chrono::steady_clock::time_point next_;
};

// "replay [#####     ] 50 %, 1,234 invocations".
std::string ProgressText(const std::string& what, double done, int64_t count);

}  // namespace lrmoe::sim
