// The worker's session with a scripted controller over a real connection.
#include "worker/rpc/controller_session.h"

#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <future>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "lrmoe/v1/controller.grpc.pb.h"
#include "proto/convert.h"

namespace lrmoe::worker {
namespace {

using namespace std::chrono_literals;  // NOLINT: tests

// Welcomes, plans what is counted, and does what a test asks for. One session at a time.
class ScriptedController final : public v1::Controller::Service {
 public:
  // port 0: any free one.
  explicit ScriptedController(int port = 0) {
    grpc::ServerBuilder builder;
    builder.AddListeningPort(absl::StrCat("127.0.0.1:", port), grpc::InsecureServerCredentials(), &port_);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    REQUIRE(port_ != 0);
  }
  // As when the process is killed.
  ~ScriptedController() override { server_->Shutdown(std::chrono::system_clock::now()); }

  int port() const { return port_; }
  std::string address() const { return absl::StrCat("127.0.0.1:", port_); }

  std::atomic<bool> answer = true;       // plans
  std::atomic<int64_t> abort_step = -1;  // answers the counts of this step with an abort
  std::atomic<bool> refuse = false;
  std::atomic<bool> bad_plan = false;

  // Everything received so far, as text; waits for `what`.
  void Await(const std::string& what) {
    std::unique_lock lock(mutex_);
    REQUIRE(changed_.wait_for(lock, 60s, [&] { return std::count(log_.begin(), log_.end(), what) > 0; }));
  }
  std::vector<std::string> log() {
    std::lock_guard lock(mutex_);
    return log_;
  }

 private:
  void Note(std::string text) {
    std::lock_guard lock(mutex_);
    log_.push_back(std::move(text));
    changed_.notify_all();
  }

  // One expert, one rank, everything kept: the smallest valid plan.
  static ExecutionPlan PlanFor(const SourceCounts& counts) {
    ExecutionPlan execution;
    LayerPlan& plan = execution.plan;
    plan.invocation = counts.invocation;
    plan.policy = "fixed";
    plan.quota = {counts.counts[0]};
    plan.instances = {{.expert_idx = 0,
                       .rank_idx = 0,
                       .owner = true,
                       .forward_rows = counts.counts[0],
                       .backward_rows = counts.counts[0],
                       .forward_rows_by_source = {counts.counts[0]}}};
    plan.ranks = {{.forward_rows = counts.counts[0], .backward_rows = counts.counts[0]}};
    return execution;
  }

  grpc::Status Session(grpc::ServerContext*,
                       grpc::ServerReaderWriter<v1::ControllerMessage, v1::WorkerMessage>* stream) override {
    const auto write = [stream](const ControllerMessage& message) {
      v1::ControllerMessage wire;
      ToWire(message, &wire);
      stream->Write(wire);
    };
    v1::WorkerMessage wire;
    while (stream->Read(&wire)) {
      const auto message = FromWire(wire);
      if (!message.ok()) return grpc::Status(grpc::INVALID_ARGUMENT, std::string(message.status().message()));
      if (const auto* hello = std::get_if<Hello>(&*message)) {
        Note(absl::StrCat("hello epoch ", static_cast<uint64_t>(hello->epoch)));
        if (refuse) return grpc::Status(grpc::FAILED_PRECONDITION, "this controller expects 8 ranks");
        write(Welcome{.epoch = Epoch{3}});
      } else if (const auto* counts = std::get_if<SourceCounts>(&*message)) {
        Note(absl::StrCat("counts ", counts->invocation.step));
        if (counts->invocation.step == abort_step) {
          write(Abort{"rank 1 left: killed"});
          return grpc::Status::OK;
        }
        ExecutionPlan plan = PlanFor(*counts);
        if (bad_plan) plan.plan.instances[0].forward_rows += 1;
        if (answer) write(plan);
      } else if (const auto* leaving = std::get_if<Leaving>(&*message)) {
        Note(absl::StrCat("leaving ", leaving->failed ? "failed: " : "", leaving->reason));
        return grpc::Status::OK;
      } else if (std::holds_alternative<ModelSpec>(*message)) {
        Note("model");
      } else if (const auto* report = std::get_if<InvocationReport>(&*message)) {
        Note(absl::StrCat("report ", report->routed_rows));
      }
    }
    return grpc::Status::OK;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::string> log_;
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

struct Ending {
  std::promise<std::pair<agent::EndKind, std::string>> promise;
  std::future<std::pair<agent::EndKind, std::string>> future = promise.get_future();
  ControllerSession::Callbacks callbacks() {
    return {.ended =
                [this](agent::EndKind kind, const std::string& reason) {
                  promise.set_value({kind, reason});
                },
            .drain_asked = [](const std::string&) {}};
  }
  std::pair<agent::EndKind, std::string> Wait() {
    REQUIRE(future.wait_for(60s) == std::future_status::ready);
    return future.get();
  }
};

agent::Options TestOptions(const std::string& address) {
  agent::Options options;
  options.controller = address;
  options.hello = {.rank_idx = 0, .world_size = 1, .job = "j", .node = "n", .version = "test"};
  options.first_backoff_us = 1000;
  options.max_backoff_us = 20000;
  return options;
}

absl::StatusOr<ExecutionPlan> Plan(ControllerSession& session, int64_t step, Deadline deadline = After(60s)) {
  const std::vector<int64_t> counts = {step};
  return session.Plan({.step = step}, counts, deadline);
}

ModelSpec TestModel() {
  return {.num_layers = 1, .shape = {.num_experts = 1, .top_k = 1, .hidden_size = 4, .intermediate_size = 4}};
}

TEST_CASE("plans come back for counts, reports and the model go out, leaving is noted",
          "[controller_session]") {
  ScriptedController controller;
  Ending ending;
  ControllerSession session(TestOptions(controller.address()), ending.callbacks());
  session.SetModel(TestModel());
  for (int64_t step = 1; step <= 50; ++step) {
    const auto plan = Plan(session, step);
    REQUIRE(plan.status() == absl::OkStatus());
    CHECK(plan->plan.invocation.step == step);
    CHECK(plan->plan.quota == std::vector<int64_t>{step});
  }
  session.Report({.routed_rows = 77});
  controller.Await("report 77");
  session.Leave({.reason = "training process of rank 0 was killed by signal 9", .failed = true});
  CHECK(controller.log().back() == "leaving failed: training process of rank 0 was killed by signal 9");
  CHECK(controller.log()[0] == "hello epoch 0");
  CHECK(controller.log()[1] == "model");
  CHECK(Plan(session, 60).status().code() == absl::StatusCode::kUnavailable);
}

TEST_CASE("a plan that does not come in time is an error that names invocation and controller",
          "[controller_session]") {
  ScriptedController controller;
  controller.answer = false;
  Ending ending;
  ControllerSession session(TestOptions(controller.address()), ending.callbacks());
  const auto plan = Plan(session, 5, After(50ms));
  CHECK(plan.status().code() == absl::StatusCode::kDeadlineExceeded);
  CHECK(absl::StrContains(std::string(plan.status().message()), "step 5"));
  CHECK(absl::StrContains(std::string(plan.status().message()), controller.address()));
  controller.answer = true;
  CHECK(Plan(session, 6).status() == absl::OkStatus());
}

TEST_CASE("a controller that is restarted gets the awaited counts again and the epoch goes on",
          "[controller_session]") {
  auto controller = std::make_unique<ScriptedController>();
  controller->answer = false;
  const int port = controller->port();
  Ending ending;
  auto options = TestOptions(controller->address());
  options.controller_timeout_us = 60000000;
  ControllerSession session(options, ending.callbacks());
  session.SetModel(TestModel());
  auto plan = std::async(std::launch::async, [&] { return Plan(session, 9); });
  controller->Await("counts 9");
  controller.reset();
  controller = std::make_unique<ScriptedController>(port);
  REQUIRE(plan.wait_for(60s) == std::future_status::ready);
  CHECK(plan.get().status() == absl::OkStatus());
  CHECK(controller->log() == std::vector<std::string>{"hello epoch 3", "model", "counts 9"});
}

TEST_CASE("a controller that stays away ends the epoch with its address", "[controller_session]") {
  auto controller = std::make_unique<ScriptedController>();
  controller->answer = false;
  const std::string address = controller->address();
  Ending ending;
  auto options = TestOptions(address);
  options.controller_timeout_us = 300000;
  ControllerSession session(options, ending.callbacks());
  auto plan = std::async(std::launch::async, [&] { return Plan(session, 9); });
  controller->Await("counts 9");
  controller.reset();
  const auto [kind, reason] = ending.Wait();
  CHECK(kind == agent::EndKind::kControllerLost);
  CHECK(absl::StrContains(reason, absl::StrCat("no session with the controller at ", address, " for 0.3 s")));
  CHECK(plan.get().status() == absl::UnavailableError(reason));
  CHECK(Plan(session, 10).status() == absl::UnavailableError(reason));
  session.Leave({});  // returns
}

TEST_CASE("an abort ends the epoch with the controller's reason", "[controller_session]") {
  ScriptedController controller;
  controller.abort_step = 2;
  Ending ending;
  ControllerSession session(TestOptions(controller.address()), ending.callbacks());
  CHECK(Plan(session, 1).status() == absl::OkStatus());
  const absl::Status status = Plan(session, 2).status();
  const auto [kind, reason] = ending.Wait();
  CHECK(kind == agent::EndKind::kAborted);
  CHECK(reason == "the controller ended epoch 3: rank 1 left: killed");
  CHECK(status == absl::UnavailableError(reason));
}

TEST_CASE("a refusal ends it at once", "[controller_session]") {
  ScriptedController controller;
  controller.refuse = true;
  Ending ending;
  ControllerSession session(TestOptions(controller.address()), ending.callbacks());
  const auto [kind, reason] = ending.Wait();
  CHECK(kind == agent::EndKind::kRefused);
  CHECK(absl::StrContains(reason, "this controller expects 8 ranks"));
}

TEST_CASE("a plan that fails validation is never executed", "[controller_session]") {
  ScriptedController controller;
  controller.bad_plan = true;
  Ending ending;
  ControllerSession session(TestOptions(controller.address()), ending.callbacks());
  CHECK(Plan(session, 4).status().code() == absl::StatusCode::kUnavailable);
  CHECK(ending.Wait().first == agent::EndKind::kRefused);
}

TEST_CASE("a session can be ended at any moment", "[controller_session]") {
  ScriptedController controller;
  for (int i = 0; i < 20; ++i) {
    Ending ending;
    ControllerSession session(TestOptions(controller.address()), ending.callbacks());
    if (i % 2 == 0) CHECK(Plan(session, 1).status() == absl::OkStatus());
  }
  Ending ending;
  ControllerSession nobody(TestOptions("127.0.0.1:1"), ending.callbacks());
}

TEST_CASE("the round trip of a plan, measured", "[controller_session]") {
  ScriptedController controller;
  Ending ending;
  ControllerSession session(TestOptions(controller.address()), ending.callbacks());
  std::vector<double> times_us;
  for (int64_t step = 1; step <= 1000; ++step) {
    const auto start = std::chrono::steady_clock::now();
    REQUIRE(Plan(session, step).ok());
    times_us.push_back(
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(times_us.begin(), times_us.end());
  // For people: machines differ, so nothing is asserted.
  WARN("round trip of a plan: p50 " << times_us[500] << " us, p99 " << times_us[990] << " us");
}

}  // namespace
}  // namespace lrmoe::worker
