#include "common/logging.h"

#include <memory>

#include "absl/strings/str_join.h"
#include "spdlog/sinks/stdout_sinks.h"
#include "spdlog/spdlog.h"

namespace lrmoe {
namespace {

struct NamedLevel {
  const char* name;
  spdlog::level::level_enum level;
};
constexpr NamedLevel kLevels[] = {
    {"debug", spdlog::level::debug}, {"info", spdlog::level::info}, {"warning", spdlog::level::warn},
    {"error", spdlog::level::err},   {"off", spdlog::level::off},
};

// Replaced only by StartLogging and SetLogRank, while no other thread logs.
std::shared_ptr<spdlog::logger>& Logger() {
  static std::shared_ptr<spdlog::logger> logger = [] {
    auto first = std::make_shared<spdlog::logger>("lrmoe", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    first->set_pattern("%Y-%m-%d %H:%M:%S.%e %L %n %v");
    return first;
  }();
  return logger;
}

void Rename(const std::string& name) {
  std::shared_ptr<spdlog::logger> renamed = Logger()->clone(name);  // shares the sink, keeps the level
  Logger() = std::move(renamed);
}

spdlog::level::level_enum ToSpdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::err;
}

}  // namespace

std::vector<std::string> LogLevelNames() {
  std::vector<std::string> names;
  for (const NamedLevel& level : kLevels) names.push_back(level.name);
  return names;
}

absl::Status StartLogging(absl::string_view program, absl::string_view level) {
  for (const NamedLevel& known : kLevels) {
    if (level != known.name) continue;
    Rename(std::string(program));
    Logger()->set_level(known.level);
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("log_level is \"", level, "\"; allowed: ", absl::StrJoin(LogLevelNames(), ", ")));
}

void SetLogRank(int32_t rank) {
  const std::string& name = Logger()->name();
  Rename(absl::StrCat(name.substr(0, name.find('[')), "[", rank, "]"));
}

bool LogEnabled(LogLevel level) {
  return Logger()->should_log(ToSpdlog(level));
}

void Log(LogLevel level, absl::string_view message) {
  Logger()->log(ToSpdlog(level), spdlog::string_view_t(message.data(), message.size()));
}

}  // namespace lrmoe
