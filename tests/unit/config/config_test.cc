#include "common/config.h"

#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdio>
#include <map>

#include "absl/strings/str_cat.h"
#include "common/policy.h"
#include "common/version.h"

namespace lrmoe {
namespace {

using std::chrono::milliseconds;

struct Options {
  std::string listen = "127.0.0.1:7070";
  int32_t ranks = 2;
  int64_t memory_budget = 0;
  milliseconds timeout{5000};
  double tolerance = 0.01;
  bool verbose = false;
  std::string device = "auto";
  Policy policy;
  std::vector<std::string> command;
};

using Environment = std::map<std::string, std::string>;

// A fresh program with one setting of every type.
struct Program {
  Program() {
    settings.AddString("listen", &options.listen, "Address to serve on.");
    settings.AddInt("ranks", &options.ranks, {1, 64}, "Ranks of the job.");
    settings.AddBytes("memory_budget", &options.memory_budget, {0, int64_t{1} << 40}, "Memory to use.");
    settings.AddDuration("timeout", &options.timeout, {milliseconds(1), std::chrono::minutes(1)},
                         "Longest wait.");
    settings.AddDouble("tolerance", &options.tolerance, {0.0, 1.0}, "Tolerance.");
    settings.AddFlag("verbose", &options.verbose, "Say more.");
    settings.AddChoice("device", &options.device, {"auto", "cpu"}, "Device.");
    settings.AddCustom(
        "rates", {[this](absl::string_view text) { return SetPolicyField(options.policy, "rates", text); },
                  [this] { return PolicyFields(options.policy)[1].second; }, "LIST", "Candidates."});
    settings.AllowCommand(&options.command, "Command to run.");
  }
  absl::StatusOr<std::string> Parse(const std::vector<std::string>& arguments,
                                    const Environment& environment = {}) {
    return settings.ParseFrom(arguments, [&](const char* name) -> const char* {
      const auto found = environment.find(name);
      return found == environment.end() ? nullptr : found->second.c_str();
    });
  }
  Options options;
  Settings settings{"program", "A program."};
};

struct TemporaryFile {
  explicit TemporaryFile(absl::string_view text) {
    char name[] = "/tmp/lrmoe-config-XXXXXX";
    const int file = mkstemp(name);
    REQUIRE(file >= 0);
    REQUIRE(write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size()));
    close(file);
    path = name;
  }
  ~TemporaryFile() { std::remove(path.c_str()); }
  std::string path;
};

std::string ErrorOf(const std::vector<std::string>& arguments, const Environment& environment = {}) {
  const absl::StatusOr<std::string> result = Program().Parse(arguments, environment);
  return result.ok() ? "no error" : std::string(result.status().message());
}

TEST_CASE("every type is read from every source", "[config]") {
  const TemporaryFile file(
      "# a comment\nlisten = \"0.0.0.0:1\" # why\nranks=3\nmemory_budget = '512MiB'\ntimeout = \"500ms\"\n"
      "tolerance = 2.5e-1\nverbose = true\ndevice = \"cpu\"\nrates = [0.9, 0.5]\n\n");
  const std::vector<std::string> flags = {"--listen",  "0.0.0.0:1",       "--ranks=3",   "--memory-budget",
                                          "512MiB",    "--timeout=500ms", "--tolerance", "0.25",
                                          "--verbose", "--device",        "cpu",         "--rates",
                                          "0.9,0.5"};
  const Environment variables = {
      {"LRMOE_LISTEN", "0.0.0.0:1"}, {"LRMOE_RANKS", "3"},        {"LRMOE_MEMORY_BUDGET", "536870912"},
      {"LRMOE_TIMEOUT", "0.5s"},     {"LRMOE_TOLERANCE", "0.25"}, {"LRMOE_VERBOSE", "true"},
      {"LRMOE_DEVICE", "cpu"},       {"LRMOE_RATES", "0.9,0.5"}};
  for (int source = 0; source < 3; ++source) {
    Program program;
    const auto result = source == 0   ? program.Parse({"--config", file.path})
                        : source == 1 ? program.Parse({}, variables)
                                      : program.Parse(flags);
    CAPTURE(source, result.status().ToString());
    REQUIRE(result.ok());
    CHECK(result->empty());
    CHECK(program.options.listen == "0.0.0.0:1");
    CHECK(program.options.ranks == 3);
    CHECK(program.options.memory_budget == 512 << 20);
    CHECK(program.options.timeout == milliseconds(500));
    CHECK(program.options.tolerance == 0.25);
    CHECK(program.options.verbose);
    CHECK(program.options.device == "cpu");
    CHECK(program.options.policy.rates == std::vector<double>{0.9, 0.5});
  }
}

TEST_CASE("the flag wins over the environment, that over the file, that over the default", "[config]") {
  const TemporaryFile file("ranks = 3\n");
  // One bit per source that gives the setting.
  for (int given = 0; given < 8; ++given) {
    std::vector<std::string> arguments;
    Environment variables;
    if (given & 1) variables["LRMOE_CONFIG"] = file.path;
    if (given & 2) variables["LRMOE_RANKS"] = "4";
    if (given & 4) arguments = {"--ranks", "5"};
    Program program;
    REQUIRE(program.Parse(arguments, variables).ok());
    CAPTURE(given);
    CHECK(program.options.ranks == (given & 4 ? 5 : given & 2 ? 4 : given & 1 ? 3 : 2));
  }
  Program program;  // --config wins over LRMOE_CONFIG
  REQUIRE(program.Parse({"--config", file.path}, {{"LRMOE_CONFIG", "/nowhere.toml"}}).ok());
  CHECK(program.options.ranks == 3);
}

TEST_CASE("--print-config says where each value came from", "[config]") {
  const TemporaryFile file("\nranks = 3\nlisten = \"a \\\"b\\\" \\\\ # c\"\n");
  Program program;
  const auto printed =
      program.Parse({"--config", file.path, "--print-config", "--verbose=false", "--timeout", "45s"},
                    {{"LRMOE_MEMORY_BUDGET", "512MiB"}, {"LRMOE_DEVICE", ""}});
  CHECK(printed.status().message() == "");
  REQUIRE(printed.ok());
  CHECK(*printed == absl::StrCat("listen = \"a \\\"b\\\" \\\\ # c\"  # file ", file.path, ":3\n",  //
                                 "ranks = 3  # file ", file.path, ":2\n",                          //
                                 "memory_budget = \"512MiB\"  # env LRMOE_MEMORY_BUDGET\n",        //
                                 "timeout = \"45s\"  # flag --timeout\n",                          //
                                 "tolerance = 0.01  # default\n",                                  //
                                 "verbose = false  # flag --verbose\n",                            //
                                 "device = \"auto\"  # default\n",                                 //
                                 "rates = \"1,0.95,0.9,0.85,0.8,0.75,0.7,0.65,0.6,0.55,0.5\"  # default\n"));
  // It is itself a configuration file with the same outcome.
  const TemporaryFile again(*printed);
  Program copy;
  REQUIRE(copy.Parse({"--config", again.path}).ok());
  CHECK(copy.options.listen == program.options.listen);
  CHECK(copy.options.ranks == 3);
  CHECK(copy.options.memory_budget == 512 << 20);
  CHECK(copy.options.timeout == milliseconds(45000));
  CHECK(copy.options.policy == program.options.policy);
}

TEST_CASE("a bad value names its source, field, value and range", "[config]") {
  CHECK(ErrorOf({"--ranks", "0"}) == "--ranks: ranks is \"0\"; allowed: an integer, 1..64");
  CHECK(ErrorOf({"--ranks", "-1"}) == "--ranks: ranks is \"-1\"; allowed: an integer, 1..64");
  CHECK(ErrorOf({"--ranks", "2.5"}) == "--ranks: ranks is \"2.5\"; allowed: an integer, 1..64");
  CHECK(ErrorOf({"--ranks", "99999999999999999999"}) ==
        "--ranks: ranks is \"99999999999999999999\"; allowed: an integer, 1..64");
  CHECK(ErrorOf({}, {{"LRMOE_RANKS", "two"}}) == "LRMOE_RANKS: ranks is \"two\"; allowed: an integer, 1..64");
  CHECK(ErrorOf({"--memory-budget", "5 apples"}) ==
        "--memory-budget: memory_budget is \"5 apples\"; allowed: a size like 512MiB, 2GiB or a number of "
        "bytes, "
        "0..1TiB");
  CHECK(ErrorOf({"--memory-budget", "2TiB"}) ==
        "--memory-budget: memory_budget is \"2TiB\"; allowed: a size like 512MiB, 2GiB or a number of bytes, "
        "0..1TiB");
  for (const char* text : {"5", "0s", "2min", "0.1ms", "-5s", "s"})
    CHECK(ErrorOf({absl::StrCat("--timeout=", text)}) ==
          absl::StrCat("--timeout: timeout is \"", text,
                       "\"; allowed: a duration like 500ms or 5s, in whole ms, 1ms..1min"));
  CHECK(ErrorOf({"--tolerance", "nan"}) == "--tolerance: tolerance is \"nan\"; allowed: a number, 0..1");
  CHECK(ErrorOf({"--device", "gpu"}) == "--device: device is \"gpu\"; allowed: auto, cpu");
  CHECK(ErrorOf({}, {{"LRMOE_VERBOSE", "yes"}}) == "LRMOE_VERBOSE: verbose is \"yes\"; allowed: true, false");
  CHECK(ErrorOf({"--rates", "0.5,0.7"}) == "--rates: rates is \"0.7\"; allowed: strictly descending values");
  const TemporaryFile file("ranks = 2\nmemory_budget = 1.5\n");
  CHECK(ErrorOf({"--config", file.path}) ==
        absl::StrCat(file.path,
                     ":2: memory_budget is \"1.5\"; allowed: a size like 512MiB, 2GiB or a number of bytes, "
                     "0..1TiB"));
}

TEST_CASE("a file with unknown keys, bad syntax, or none at all is refused", "[config]") {
  for (const auto& [text, problem] : std::vector<std::pair<std::string, std::string>>{
           {"ranks = 2\ncolour = 1\n",
            ":2: unknown key \"colour\"; known: listen, ranks, memory_budget, timeout, tolerance, verbose, "
            "device, "
            "rates"},
           {"memory-budget = 1",
            ":1: unknown key \"memory-budget\"; known: listen, ranks, memory_budget, timeout, "
            "tolerance, verbose, device, rates"},
           {"ranks = 2\nranks = 3", ":2: ranks is given twice"},
           {"[worker]\n", ":1: tables like [worker] are not used here; write key = value"},
           {"ranks\n", ":1: expected key = value"},
           {"= 2\n", ":1: expected key = value"},
           {"ranks = # none\n", ":1: a value is missing"},
           {"listen = \"abc\n", ":1: a string is not closed"},
           {"listen = \"a\\q\"\n", ":1: unknown escape \\q"},
           {"listen = a b\n", ":1: \"b\" after the value of listen; put text in quotes"},
           {"rates = [0.9, 0.8\n", ":1: expected , or ] in a list"},
           {"rates = [0.9,\n", ":1: a list is not closed on its line"}}) {
    const TemporaryFile file(text);
    CHECK(ErrorOf({"--config", file.path}) == file.path + problem);
  }
  CHECK(ErrorOf({"--config", "/nowhere.toml"}) ==
        "cannot read the configuration file /nowhere.toml: No such file or directory");
  CHECK(ErrorOf({"--config", "/"}) == "cannot read the configuration file /: Is a directory");
}

TEST_CASE("usage errors", "[config]") {
  CHECK_THAT(ErrorOf({"--rank", "3"}), Catch::Contains("--rank"));
  CHECK_THAT(ErrorOf({"stray"}), Catch::Contains("stray"));
  CHECK_THAT(ErrorOf({"--ranks"}), Catch::Contains("--ranks"));
  CHECK_THAT(ErrorOf({"--ranks", "2", "--ranks", "3"}), Catch::Contains("--ranks"));
  CHECK_THAT(ErrorOf({"--ranks="}), Catch::Contains("--ranks"));
  CHECK(ErrorOf({"--"}) == "no command after --");
  Settings plain("plain", "No command.");
  const auto no_environment = [](const char*) -> const char* { return nullptr; };
  CHECK(plain.ParseFrom({"--", "ls"}, no_environment).status().message() ==
        "this program takes no command after --");
  int32_t ranks = 0;
  plain.AddInt("ranks", &ranks, {1, 8}, "Ranks.");
  plain.Require("ranks");
  CHECK(plain.ParseFrom({}, no_environment).status().message() ==
        "ranks is not set; give --ranks, LRMOE_RANKS or ranks in the --config file");
  CHECK(plain.ParseFrom({"--ranks=8"}, no_environment).ok());
}

TEST_CASE("everything after -- is the command, untouched", "[config]") {
  Program program;
  REQUIRE(
      program.Parse({"--ranks", "4", "--", "python", "train.py", "--ranks", "9", "--", "--help", ""}).ok());
  CHECK(program.options.ranks == 4);
  CHECK(program.options.command ==
        std::vector<std::string>{"python", "train.py", "--ranks", "9", "--", "--help", ""});
}

TEST_CASE("help and version", "[config]") {
  CHECK(*Program().Parse({"--version"}) == absl::StrCat("program ", Version(), "\n"));
  const std::string help = *Program().Parse({"--help"});
  CHECK(*Program().Parse({"-h", "--ranks", "0"}) == help);
  for (const char* part : {"Usage: program [settings] [-- command...]", "--ranks N", "Ranks of the job. [2]",
                           "--timeout DURATION", "Longest wait. [5s]", "--device auto|cpu", "--print-config"})
    CHECK_THAT(help, Catch::Contains(part));
}

}  // namespace
}  // namespace lrmoe
