#include "tools/sim/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "common/units.h"

namespace lrmoe::sim {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kQuiet = std::chrono::seconds(1);  // short runs show nothing
constexpr auto kPeriod = std::chrono::milliseconds(100);

}  // namespace

ProgressBar::ProgressBar(std::string what)
    : what_(std::move(what)), terminal_(isatty(STDERR_FILENO) == 1), next_(Clock::now() + kQuiet) {}

ProgressBar::~ProgressBar() {
  if (shown_) std::fputs("\r\x1b[K", stderr);
}

void ProgressBar::Update(double done, int64_t count) {
  if (!terminal_) return;
  const auto now = Clock::now();
  if (now < next_) return;
  next_ = now + kPeriod;
  shown_ = true;
  std::fprintf(stderr, "\r%s\x1b[K", ProgressText(what_, done, count).c_str());
}

std::string ProgressText(const std::string& what, double done, int64_t count) {
  constexpr int kWidth = 30;
  done = std::clamp(done, 0.0, 1.0);
  const int full = static_cast<int>(done * kWidth);
  return absl::StrCat(what, " [", std::string(full, '#'), std::string(kWidth - full, ' '), "] ",
                      static_cast<int>(done * 100), " %, ", HumanCount(count), " invocations");
}

}  // namespace lrmoe::sim
