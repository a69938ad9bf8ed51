// lrmoectl against an Admin service in this process. The golden files in golden/ are what a user sees; to
// write them anew after a wanted change, run the test with LRMOE_UPDATE_GOLDEN=1 and review the difference.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "common/trace.h"
#include "common/version.h"
#include "tests/unit/lrmoectl/fake_admin.h"
#include "tools/lrmoectl/cli.h"
#include "tools/lrmoectl/client.h"

namespace lrmoe::ctl {
namespace {

struct Outcome {
  int status = -1;
  std::string out, err;
};

Outcome RunWith(const std::string& address, const std::string& command_line, bool colour = false) {
  std::ostringstream out, err;
  const std::vector<std::string> arguments = absl::StrSplit(command_line, ' ', absl::SkipEmpty());
  const auto environment = [&](const char* name) {
    return std::string(name) == "LRMOE_CONTROLLER" ? address.c_str() : nullptr;
  };
  Outcome outcome;
  outcome.status = Run(arguments, environment, {out, err, colour});
  outcome.out = absl::StrReplaceAll(out.str(), {{address.empty() ? "no address" : address, "ADDRESS"}});
  outcome.err = absl::StrReplaceAll(err.str(), {{address.empty() ? "no address" : address, "ADDRESS"}});
  return outcome;
}

void CheckGolden(const std::string& name, const std::string& text) {
  const std::string path = absl::StrCat(LRMOE_GOLDEN_FOLDER, "/", name);
  if (std::getenv("LRMOE_UPDATE_GOLDEN") != nullptr) std::ofstream(path) << text;
  std::ifstream file(path);
  CAPTURE(path);
  REQUIRE(file.good());
  std::stringstream golden;
  golden << file.rdbuf();
  CHECK(text == golden.str());
}

TEST_CASE("every view, as table and as JSON", "[lrmoectl]") {
  FakeAdmin admin;
  for (const auto& [name, command] : std::vector<std::pair<std::string, std::string>>{
           {"status", "status"},
           {"workers", "workers"},
           {"layers", "layers"},
           {"plans_list", "plans list"},
           {"plans_show", "plans show --step 1 --layer 0"},
           {"plans_explain", "plans explain --step 1 --layer 0 --micro-batch 0"},
           {"plans_explain_latest", "plans explain --latest --layer 0"},
           {"plans_diff", "plans diff 1:0 3:0:0"},
           {"plans_watch", "plans watch --count 4"},
           {"policy_get", "policy get"},
           {"simulate", "simulate --step 1 --layer 0 --planner symi --set rates=0.5 --ranks 2"}}) {
    CAPTURE(name);
    const Outcome table = RunWith(admin.address(), command);
    CHECK(table.err.empty());
    CHECK(table.status == 0);
    CheckGolden(name + ".txt", table.out);
    const Outcome json = RunWith(admin.address(), command + " --output json");
    CHECK(json.status == 0);
    CheckGolden(name + ".json", json.out);
    if (name != "plans_watch") CHECK(nlohmann::json::accept(json.out));
    const bool coloured = RunWith(admin.address(), command, true).out.find("\x1b[") != std::string::npos;
    CHECK(coloured == (name != "status"));
    CHECK(RunWith(admin.address(), command + " --output json", true).out == json.out);
  }
}

TEST_CASE("plans list filters and follows pages", "[lrmoectl]") {
  FakeAdmin admin;
  const auto steps = [&](const std::string& flags) {
    const Outcome outcome = RunWith(admin.address(), "plans list --output json " + flags);
    CHECK(outcome.err.empty());
    const nlohmann::json json = nlohmann::json::parse(outcome.out);
    std::vector<int> found;
    for (const auto& plan : json["plans"]) found.push_back(plan["step"]);
    return std::make_pair(found, json["next_page_token"].get<std::string>());
  };
  using Found = std::pair<std::vector<int>, std::string>;
  CHECK(steps("") == Found{{3, 2, 2, 1}, ""});
  CHECK(admin.num_list_calls() == 2);  // the fake's pages hold two
  CHECK(steps("--limit 1") == Found{{3}, "1"});
  CHECK(steps("--limit 1 --page-token 1") == Found{{2}, "2"});
  CHECK(steps("--from-step 2") == Found{{3, 2, 2}, ""});
  CHECK(steps("--to-step 2") == Found{{2, 2, 1}, ""});
  CHECK(steps("--to-step 0") == Found{{}, ""});
  CHECK(steps("--layer 1") == Found{{2}, ""});
  CHECK(steps("--layer 2") == Found{{}, ""});
  CHECK(steps("--infeasible") == Found{{2, 2}, ""});
  CHECK_THAT(RunWith(admin.address(), "plans list --layer 2").out, Catch::EndsWith("No plans match.\n"));
  CHECK_THAT(RunWith(admin.address(), "plans list --limit 2").out,
             Catch::EndsWith("Older plans: --page-token 2\n"));
}

TEST_CASE("a controller that misbehaves is not followed", "[lrmoectl]") {
  FakeAdmin admin;
  admin.set_pages(FakeAdmin::Pages::kEndless);
  Outcome outcome = RunWith(admin.address(), "plans list");
  CHECK(outcome.status == 1);
  CHECK(outcome.err == "lrmoectl: controller at ADDRESS sent a page without progress\n");
  admin.set_pages(FakeAdmin::Pages::kTooLong);
  outcome = RunWith(admin.address(), "plans list --limit 2");
  CHECK(outcome.status == 1);
  CHECK(outcome.err == "lrmoectl: controller at ADDRESS sent 4 plans where at most 2 were asked for\n");
  admin.set_lies(true);
  outcome = RunWith(admin.address(), "plans explain --step 1 --layer 0");
  CHECK(outcome.status == 1);
  CHECK_THAT(outcome.err,
             Catch::StartsWith("lrmoectl: controller at ADDRESS sent a plan that is not one: plan.quota[0]"));
  CHECK(outcome.out.empty());
  admin.set_silent(true);
  outcome = RunWith(admin.address(), "status --timeout 50ms");
  CHECK(outcome.status == 1);
  CHECK_THAT(outcome.err, Catch::Contains("ADDRESS") && Catch::Contains("within 50ms"));
  CHECK(RunWith(admin.address(), "plans watch --timeout 50ms").status == 1);
}

TEST_CASE("watch ends when told to, and says when the stream breaks", "[lrmoectl]") {
  FakeAdmin admin;
  CHECK(RunWith(admin.address(), "plans watch --for 300ms").status == 0);
  admin.set_ends_stream(true);
  const Outcome outcome = RunWith(admin.address(), "plans watch --output json");
  CHECK(outcome.status == 1);
  CHECK(outcome.err == "lrmoectl: controller at ADDRESS ended the stream\n");
  CHECK(std::count(outcome.out.begin(), outcome.out.end(), '\n') == 4);
}

TEST_CASE("policy set", "[lrmoectl]") {
  FakeAdmin admin;
  const Outcome table = RunWith(admin.address(), "policy set retention_floor=0.5 rates=1,0.75");
  CHECK(table.status == 0);
  CheckGolden("policy_set.txt", table.out);
  const Outcome json =
      RunWith(admin.address(), "policy set seed=18446744073709551615 window_us=2500 --output json");
  CheckGolden("policy_set.json", json.out);
  const Outcome bad = RunWith(admin.address(), "policy set selection=best");
  CHECK(bad.status == 2);
  CHECK(bad.out.empty());
  CHECK_THAT(bad.err, Catch::Contains(
                          "selection is \"best\"; allowed: lrm, grad_norm2, grad_abs, random, lrm_sampled"));
  const Outcome unknown = RunWith(admin.address(), "policy set colour=red");
  CHECK(unknown.status == 2);
  CHECK_THAT(unknown.err, Catch::Contains("colour") && Catch::Contains("retention_floor"));
}

TEST_CASE("an absent plan is told by the controller", "[lrmoectl]") {
  FakeAdmin admin;
  const Outcome outcome = RunWith(admin.address(), "plans diff 1:0 9:0");
  CHECK(outcome.status == 1);
  CHECK(outcome.err == "lrmoectl: no plan of step 9 layer 0 micro-batch 0 is kept; kept: steps 1..3\n");
}

TEST_CASE("an invocation without a plan says why", "[lrmoectl]") {
  FakeAdmin admin;
  for (const char* command :
       {"plans show --step 2 --layer 1", "plans explain --latest --layer 1", "plans diff 1:0 2:1"}) {
    const Outcome outcome = RunWith(admin.address(), command);
    CHECK(outcome.status == 1);
    CHECK(
        outcome.err ==
        "lrmoectl: no plan was made of step 2 layer 1 micro-batch 0: rank 1 needs 4194304 bytes, 3670016 are "
        "available\n");
  }
}

TEST_CASE("no controller", "[lrmoectl]") {
  std::string address;
  {
    FakeAdmin admin;  // its port is free again afterwards
    address = admin.address();
  }
  for (const char* command : {"status", "plans watch", "plans diff 1:0 2:0", "policy set seed=1"}) {
    const Outcome outcome = RunWith(address, command);
    CHECK(outcome.status == 1);
    CHECK(outcome.out.empty());
    CHECK_THAT(outcome.err, Catch::StartsWith("lrmoectl: controller at ADDRESS is not reachable: "));
  }
  FakeAdmin admin;  // the flag wins over the environment
  CHECK(RunWith("127.0.0.1:1", "status --controller " + admin.address()).status == 0);
  CHECK(RunWith("127.0.0.1:1", "--controller " + admin.address() + " status").status == 0);
}

TEST_CASE("usage errors end with 2 and touch no controller", "[lrmoectl]") {
  for (const auto& [command, part] : std::vector<std::pair<std::string, std::string>>{
           {"", "a command is required"},
           {"plans", "a command is required"},
           {"bogus", "unknown command \"bogus\""},
           {"plans bogus", "unknown command \"bogus\""},
           {"status extra", "extra"},
           {"status --bogus", "--bogus"},
           {"status --output xml", "--output is \"xml\"; allowed: table, json"},
           {"status --timeout 0", "--timeout is \"0\"; allowed: a duration"},
           {"status --timeout 5", "--timeout is \"5\"; allowed: a duration"},
           {"status --controller localhost", "controller is \"localhost\"; allowed: host:port"},
           {"plans list --limit 0", "--limit is \"0\"; allowed: an integer, 1..100000"},
           {"plans list --layer 1024", "--layer is \"1024\"; allowed: an integer, 0..1023"},
           {"plans list --from-step -1", "--from-step is \"-1\"; allowed: an integer, 0..9007199254740992"},
           {"plans show --layer 0", "--step or --latest is required"},
           {"plans show --step 1", "--layer is required"},
           {"plans explain --step 1 --latest --layer 0", "excludes"},
           {"plans diff 1:0", "2 required"},
           {"plans diff 1:0 2:0 3:0", "2 required but received 3"},
           {"plans diff 1:0 2", "plan is \"2\"; allowed: STEP:LAYER or STEP:LAYER:MICRO_BATCH"},
           {"plans diff 1:0 x:0", "step is \"x\""},
           {"plans watch --count 0", "--count is \"0\""},
           {"policy set", "required"},
           {"policy set seed", "change is \"seed\"; allowed: NAME=VALUE"},
           {"policy set \xff\xfe=1", "change is \"\\xff\\xfe=1\"; allowed: printable ASCII"},
           {"plans list --page-token \x1b[2J", "printable ASCII"},
           {"policy set =1", "change is \"=1\"; allowed: NAME=VALUE"},
           {"drain --reason \x1b[2J", "printable ASCII"},
           {"simulate --layer 0", "--step or --latest is required"},
           {"simulate --latest --layer 0 --ranks 1025", "--ranks is \"1025\"; allowed: an integer, 1..1024"},
           {"simulate --latest --layer 0 --set rates", "change is \"rates\"; allowed: NAME=VALUE"},
           {"simulate --latest --layer 0 --memory-budget -1", "--memory-budget is \"-1\"; allowed: a size"},
           {"simulate --latest --layer 0 --replica-slots 4097", "--replica-slots is \"4097\""},
           {"trace export", "--file is required"}}) {
    CAPTURE(command);
    const Outcome outcome = RunWith("", command);
    CHECK(outcome.status == 2);
    CHECK(outcome.out.empty());
    CHECK_THAT(outcome.err, Catch::StartsWith("lrmoectl: ") && Catch::Contains(part));
  }
}

TEST_CASE("simulate passes on what was asked and nothing else", "[lrmoectl]") {
  FakeAdmin admin;
  REQUIRE(RunWith(admin.address(), "simulate --latest --layer 0").status == 0);
  v1::SimulatePlanRequest asked = admin.simulated();
  CHECK(asked.recorded().latest());
  CHECK(asked.planner().empty());
  CHECK(asked.policy().fields().empty());
  CHECK(asked.ranks() == 0);
  CHECK_FALSE(asked.has_memory_budget_bytes());
  CHECK_FALSE(asked.has_replica_slots());
  CHECK_FALSE(asked.no_residents());
  REQUIRE(RunWith(admin.address(),
                  "simulate --step 1 --layer 0 --planner eplb --set rates=0.5 seed=3 --ranks 4 "
                  "--memory-budget 2MiB --replica-slots 0 --no-residents")
              .status == 0);
  asked = admin.simulated();
  CHECK(asked.recorded().invocation().step() == 1);
  CHECK(asked.planner() == "eplb");
  REQUIRE(asked.policy().fields_size() == 2);
  CHECK(asked.policy().fields(1).name() == "seed");
  CHECK(asked.ranks() == 4);
  CHECK(asked.has_memory_budget_bytes());
  CHECK(asked.memory_budget_bytes() == 2 << 20);
  CHECK(asked.has_replica_slots());
  CHECK(asked.no_residents());
}

TEST_CASE("a simulated plan that contradicts itself is refused", "[lrmoectl]") {
  FakeAdmin admin;
  admin.set_lies(true);
  const Outcome outcome = RunWith(admin.address(), "simulate --step 1 --layer 0");
  CHECK(outcome.status == 1);
  CHECK_THAT(outcome.err, Catch::Contains("sent a plan that is not one"));
}

TEST_CASE("an exported trace reads back as what was routed", "[lrmoectl]") {
  FakeAdmin admin;
  const Outcome outcome = RunWith(admin.address(), "trace export --file - --layer 0");
  CHECK(outcome.status == 0);
  CHECK(outcome.err == "exported 3 invocations\n");
  std::istringstream text(outcome.out);
  absl::StatusOr<TraceReader> reader = TraceReader::Open(text);
  REQUIRE(reader.ok());
  CHECK(reader->header().num_experts == 4);
  CHECK(reader->header().num_source_ranks == 2);
  TraceRecord record;
  for (int64_t step = 1; step <= 3; ++step) {
    const absl::StatusOr<bool> more = reader->Next(record);
    REQUIRE((more.ok() && *more));
    CHECK(record.invocation == Invocation{step, 0, 0});
    CHECK(record.counts.at(0, 0) == 60);
    CHECK(record.counts.at(1, 0) == 40);
    CHECK(record.counts.at(1, 3) == 20);
  }
  CHECK_FALSE(*reader->Next(record));
  CHECK_THAT(RunWith(admin.address(), "trace export --file - --from-step 9").err,
             Catch::Contains("remembers no plan"));
  CHECK_THAT(RunWith(admin.address(), "trace export --file /nowhere/trace").err,
             Catch::Contains("cannot open /nowhere/trace"));
  CHECK(RunWith(admin.address(), "trace export --file -").err == "exported 3 invocations; 1 had no plan\n");
}

TEST_CASE("drain says how many ranks were asked", "[lrmoectl]") {
  FakeAdmin admin;
  CHECK(RunWith(admin.address(), "drain --reason maintenance").out == "asked 2 ranks to leave\n");
  CHECK(admin.drained() == "maintenance");
  CHECK(RunWith(admin.address(), "drain --output json").out == "{\n  \"ranks\": 2\n}\n");
}

TEST_CASE("addresses", "[lrmoectl]") {
  for (const char* good : {"127.0.0.1:7070", "head:1", "node-3.cluster:65535", "[::1]:7070",
                           "[fe80::1%eth0]:1", "unix:/run/lrmoe.sock"})
    CHECK(ValidateAddress(good).ok());
  for (const char* bad : {"", ":", "head", "head:", ":7070", "head:0", "head:65536", "head:http", "::1:7070",
                          "a b:1", "[zz]:1", "[]:1", "[:1", "http://head:7070", "unix:", "head:7070/x"})
    CHECK_FALSE(ValidateAddress(bad).ok());
}

TEST_CASE("help lists what works and nothing else", "[lrmoectl]") {
  CHECK(RunWith("", "--version").out == absl::StrCat("lrmoectl ", Version(), "\n"));
  const Outcome help = RunWith("", "--help");
  CHECK(help.status == 0);
  for (const char* command : {"status", "workers", "layers", "plans", "policy", "simulate", "trace", "drain",
                              "--controller", "--output", "--timeout"})
    CHECK_THAT(help.out, Catch::Contains(command));
  for (const char* command :
       {"status", "workers", "layers", "plans", "plans list", "plans show", "plans explain", "plans diff",
        "plans watch", "policy", "policy get", "policy set", "simulate", "trace", "trace export", "drain"}) {
    const Outcome outcome = RunWith("", absl::StrCat(command, " --help"));
    CHECK(outcome.status == 0);
    CHECK_THAT(outcome.out, Catch::Contains(absl::StrCat("Usage: lrmoectl ", command)));
  }
}

}  // namespace
}  // namespace lrmoe::ctl
