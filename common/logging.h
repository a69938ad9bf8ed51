// Log lines on stderr: time, level, program, rank, message. Any thread may log at any time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace lrmoe {

enum class LogLevel : uint8_t { kDebug = 1, kInfo = 2, kWarning = 3, kError = 4 };

// "debug", "info", "warning", "error", "off": the choices of --log-level.
std::vector<std::string> LogLevelNames();

// Call once at the start of main; before it, lines appear under the name "lrmoe" at level info.
// InvalidArgument for a level that is not one of LogLevelNames().
absl::Status StartLogging(absl::string_view program, absl::string_view level);
// From now on lines are marked "program[rank]". Call while no other thread logs.
void SetLogRank(int32_t rank);

bool LogEnabled(LogLevel level);
// Writes one line and flushes it. Line breaks inside `message` are kept.
void Log(LogLevel level, absl::string_view message);

// Each takes the arguments of absl::StrCat; nothing is formatted when the level is off.
template <typename... Parts>
void LogDebug(const Parts&... parts) {
  if (LogEnabled(LogLevel::kDebug)) Log(LogLevel::kDebug, absl::StrCat(parts...));
}
template <typename... Parts>
void LogInfo(const Parts&... parts) {
  if (LogEnabled(LogLevel::kInfo)) Log(LogLevel::kInfo, absl::StrCat(parts...));
}
template <typename... Parts>
void LogWarning(const Parts&... parts) {
  if (LogEnabled(LogLevel::kWarning)) Log(LogLevel::kWarning, absl::StrCat(parts...));
}
template <typename... Parts>
void LogError(const Parts&... parts) {
  if (LogEnabled(LogLevel::kError)) Log(LogLevel::kError, absl::StrCat(parts...));
}

}  // namespace lrmoe
