#include "common/logging.h"

#include <fcntl.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdio>

namespace lrmoe {
namespace {

// What `write` sends to stderr.
template <typename Write>
std::string CaptureStderr(Write write) {
  FILE* file = std::tmpfile();
  REQUIRE(file != nullptr);
  const int saved = dup(2);
  std::fflush(stderr);
  REQUIRE(dup2(fileno(file), 2) == 2);
  write();
  std::fflush(stderr);
  dup2(saved, 2);
  close(saved);
  std::rewind(file);
  std::string text(4096, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file));
  std::fclose(file);
  return text;
}

TEST_CASE("a log line has time, level, program, rank and message", "[logging]") {
  const std::string text = CaptureStderr([] {
    REQUIRE(StartLogging("lrmoe-worker", "info").ok());
    LogDebug("hidden");
    LogInfo("epoch ", 3, " started");
    SetLogRank(7);
    SetLogRank(12);
    LogError("{} is not a format string here");
  });
  CHECK_THAT(text,
             Catch::Matches("[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8}\\.[0-9]{3} I lrmoe-worker epoch 3 started\n"
                            "[-0-9]+ [0-9:.]+ E lrmoe-worker\\[12\\] \\{\\} is not a format string here\n"));
}

TEST_CASE("levels", "[logging]") {
  for (const std::string& level : LogLevelNames()) REQUIRE(StartLogging("test", level).ok());
  CHECK_FALSE(LogEnabled(LogLevel::kError));  // the last one is off
  CHECK(StartLogging("test", "loud").message() ==
        "log_level is \"loud\"; allowed: debug, info, warning, error, off");
  REQUIRE(StartLogging("test", "warning").ok());
  CHECK(LogEnabled(LogLevel::kWarning));
  CHECK_FALSE(LogEnabled(LogLevel::kInfo));
}

}  // namespace
}  // namespace lrmoe
