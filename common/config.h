// Settings of a program: a flag, then a LRMOE_* environment variable, then the --config file, then the
// default.
//
//   Settings settings("lrmoe-worker", "Executes the experts of one rank.");
//   settings.AddBytes("memory_budget", &options.memory_budget_bytes, {0, kMax}, "Device memory lrmoe may
//   use."); if (const std::optional<int> status = settings.Parse(argc, argv)) return *status;
//
// A setting `memory_budget` is the flag --memory-budget, the variable LRMOE_MEMORY_BUDGET and the file key
// memory_budget. --config, --print-config, --help and --version are always there.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lrmoe {

// Exit statuses of every lrmoe program.
inline constexpr int kExitDone = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;

// Both ends included.
struct IntRange {
  int64_t min = std::numeric_limits<int64_t>::min();
  int64_t max = std::numeric_limits<int64_t>::max();
};
struct DoubleRange {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
};
struct DurationRange {
  std::chrono::microseconds min{0};
  std::chrono::microseconds max = std::chrono::hours(24 * 365);
};

// A setting whose text form belongs to someone else, e.g. one field of Policy.
struct CustomSetting {
  // Sets the target; an error's message names field, value and allowed range. Called once per source that
  // gives the setting, weakest first.
  std::function<absl::Status(absl::string_view text)> set;
  std::function<std::string()> text;  // the target's value; `set` accepts it
  std::string placeholder = "VALUE";  // in --help
  std::string doc;
};

// Not thread safe. Targets hold the defaults when added, must outlive Parse, and are written only by it.
class Settings {
 public:
  Settings(std::string program, std::string description);
  ~Settings();
  Settings(const Settings&) = delete;
  Settings& operator=(const Settings&) = delete;

  // `name` is snake_case and unique. In a file, a list of strings or numbers is given to a setting joined by
  // commas.
  void AddString(absl::string_view name, std::string* target, absl::string_view doc);
  void AddInt(absl::string_view name, int64_t* target, IntRange range, absl::string_view doc);
  void AddInt(absl::string_view name, int32_t* target, IntRange range, absl::string_view doc);
  void AddDouble(absl::string_view name, double* target, DoubleRange range, absl::string_view doc);
  void AddBytes(absl::string_view name, int64_t* target, IntRange range, absl::string_view doc);
  void AddDuration(absl::string_view name, std::chrono::microseconds* target, DurationRange range,
                   absl::string_view doc);
  void AddDuration(absl::string_view name, std::chrono::milliseconds* target, DurationRange range,
                   absl::string_view doc);
  // --name or --name=false; "true" or "false" in the environment and the file.
  void AddFlag(absl::string_view name, bool* target, absl::string_view doc);
  void AddChoice(absl::string_view name, std::string* target, std::vector<std::string> choices,
                 absl::string_view doc);
  void AddCustom(absl::string_view name, CustomSetting setting);
  // Parse fails unless some source gives `name`, which has been added.
  void Require(absl::string_view name);
  // Everything after `--` goes to *target, untouched. Without this, `--` is a usage error.
  void AllowCommand(std::vector<std::string>* target, absl::string_view doc);

  // For main. Returns the exit status when the program is to end now: 0 after --help, --version or
  // --print-config (printed to stdout), 2 after a usage error (printed to stderr). nullopt: go on, all
  // targets are set.
  std::optional<int> Parse(int argc, const char* const* argv);

  // The same without process state: `arguments` are argv[1..]; `environment` returns null for an unset
  // variable. Returns the text to print when the program is to end now, "" to go on. An empty variable counts
  // as unset. InvalidArgument names the source (flag, variable, file and line), field, value and allowed
  // range; NotFound or PermissionDenied when the --config file cannot be read. After an error the targets are
  // unspecified.
  absl::StatusOr<std::string> ParseFrom(const std::vector<std::string>& arguments,
                                        const std::function<const char*(const char*)>& environment);

  // What --print-config prints; itself a configuration file. `memory_budget = "512MiB"  # env
  // LRMOE_MEMORY_BUDGET`.
  std::string PrintConfig() const;
  std::string Help() const;

 private:
  struct Setting;
  struct CommandLine;
  void Add(absl::string_view name, CustomSetting setting, bool quoted, bool flag = false);
  Setting* Find(absl::string_view name);
  std::string KnownNames() const;
  absl::Status ReadFlags(const std::vector<std::string>& arguments, CommandLine& line);
  absl::Status ApplyFile(const std::string& path);
  absl::Status ApplyEnvironment(const std::function<const char*(const char*)>& environment);
  absl::Status ApplyFlags(const CommandLine& line);
  absl::Status CheckRequired() const;

  const std::string program_;
  const std::string description_;
  std::vector<std::unique_ptr<Setting>> settings_;  // in the order they were added
  std::vector<std::string>* command_ = nullptr;
  std::string command_doc_;
};

}  // namespace lrmoe
