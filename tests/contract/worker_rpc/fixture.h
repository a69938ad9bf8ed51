// A real worker service on a real socket, over an engine that tests hold still, make fail and watch.
#pragma once

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <stdlib.h>

#include <catch2/catch.hpp>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "lrmoe/v1/worker.grpc.pb.h"
#include "worker/client/session.h"
#include "worker/rpc/socket_server.h"
#include "worker/rpc/worker_service.h"

namespace lrmoe::worker {

using namespace std::chrono_literals;  // NOLINT: tests

// What the tests see and steer of the engine. Any thread.
class EngineScript {
 public:
  // Notes the call, waits while held, and gives the next scripted status (OK when there is none).
  absl::Status Enter(std::string call) {
    std::unique_lock lock(mutex_);
    calls_.push_back(std::move(call));
    changed_.notify_all();
    LRMOE_CHECK(
        changed_.wait_for(lock, 60s, [this] { return !held_; }));  // Catch2 asserts on the main thread only
    if (statuses_.empty()) return absl::OkStatus();
    absl::Status status = statuses_.front();
    statuses_.pop_front();
    return status;
  }
  void Hold() {
    std::lock_guard lock(mutex_);
    held_ = true;
  }
  void Release() {
    std::lock_guard lock(mutex_);
    held_ = false;
    changed_.notify_all();
  }
  void Next(absl::Status status) {
    std::lock_guard lock(mutex_);
    statuses_.push_back(std::move(status));
  }
  // The error of what is done behind the next answer.
  void NextAfterAnswer(absl::Status status) {
    std::lock_guard lock(mutex_);
    after_answer_ = std::move(status);
  }
  absl::Status AfterAnswer() {
    std::lock_guard lock(mutex_);
    return std::exchange(after_answer_, absl::OkStatus());
  }
  // Waits until `call` was made (since the last Clear).
  void Await(const std::string& call) {
    std::unique_lock lock(mutex_);
    REQUIRE(changed_.wait_for(lock, 60s, [&] { return std::count(calls_.begin(), calls_.end(), call) > 0; }));
  }
  std::vector<std::string> Calls() {
    std::lock_guard lock(mutex_);
    return calls_;
  }
  void Clear() {
    std::lock_guard lock(mutex_);
    calls_.clear();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
  std::deque<absl::Status> statuses_;
  absl::Status after_answer_;
  std::vector<std::string> calls_;
};

// y = x; dx = dy; dalpha = 1; kept = 1: enough to see that every span is the right one.
class ScriptedEngine final : public EnginePort {
 public:
  explicit ScriptedEngine(EngineScript* script) : script_(script) {}

  absl::StatusOr<engine::ForwardResult> Forward(const engine::ForwardArgs& args) override {
    const absl::Status status = script_->Enter(absl::StrCat("forward ", ToString(args.invocation)));
    if (!status.ok()) return status;
    std::copy(args.x.begin(), args.x.end(), args.y.begin());
    ids_seen.assign(args.expert_idx.begin(), args.expert_idx.end());
    engine::ForwardResult result;
    result.plan.plan.invocation = args.invocation;
    result.plan.plan.policy = "lrmoe";
    result.plan.plan.retention_rate = 0.5;
    result.plan.plan.quota = {1, 2};
    result.plan.plan.ranks.resize(1);
    result.plan.plan.ranks[0].forward_rows = 6;
    result.report.invocation = args.invocation;
    result.report.routed_rows = static_cast<int64_t>(args.expert_idx.size());
    return result;
  }
  absl::StatusOr<engine::BackwardResult> Backward(const engine::BackwardArgs& args) override {
    const absl::Status status = script_->Enter(absl::StrCat("backward ", ToString(args.invocation)));
    if (!status.ok()) return status;
    std::copy(args.dy.begin(), args.dy.end(), args.dx.begin());
    std::fill(args.dalpha.begin(), args.dalpha.end(), 1.0f);
    std::fill(args.kept.begin(), args.kept.end(), uint8_t{1});
    engine::BackwardResult result;
    result.report.invocation = args.invocation;
    return result;
  }
  absl::Status Discard(const Invocation& invocation) override {
    return script_->Enter(absl::StrCat("discard ", ToString(invocation)));
  }
  absl::Status LoadExpert(int32_t layer, int32_t expert_idx, DataType, std::span<const std::byte> w1,
                          std::span<const std::byte> w2) override {
    w1_.assign(w1.begin(), w1.end());
    w2_.assign(w2.begin(), w2.end());
    return script_->Enter(absl::StrCat("load layer ", layer, " expert ", expert_idx));
  }
  absl::Status FinishLoad(int32_t layer) override {
    return script_->Enter(absl::StrCat("finish load ", layer));
  }
  absl::Status OptimizerStep(const engine::AdamWStep& step) override {
    return script_->Enter(absl::StrCat("optimizer step ", step.step, " lr ", step.lr));
  }
  absl::Status AfterAnswer() override { return script_->AfterAnswer(); }
  absl::StatusOr<double> SquaredGradientNorm() override {
    const absl::Status status = script_->Enter("norm");
    if (!status.ok()) return status;
    return 2.5;
  }
  absl::Status ZeroGradients() override { return script_->Enter("zero"); }
  absl::Status SaveCheckpoint(const std::string& directory, int64_t step) override {
    return script_->Enter(absl::StrCat("save ", directory, " ", step));
  }
  absl::StatusOr<int64_t> LoadCheckpoint(const std::string& directory, int64_t step) override {
    const absl::Status status = script_->Enter(absl::StrCat("load checkpoint ", directory, " ", step));
    if (!status.ok()) return status;
    return 7;
  }
  absl::Status Refuse(engine::Operation operation, const Invocation&, const absl::Status& reason) override {
    const absl::Status status = script_->Enter(absl::StrCat("refuse ", static_cast<int>(operation)));
    if (!status.ok()) return status;
    return absl::Status(reason.code(), absl::StrCat("rank 0: ", reason.message()));
  }
  absl::Status Finish() override { return script_->Enter("finish"); }
  absl::Status ExportExpert(int32_t layer, int32_t expert_idx, ExpertContent content, std::span<float> w1,
                            std::span<float> w2) override {
    std::fill(w1.begin(), w1.end(), 1.5f);
    std::fill(w2.begin(), w2.end(), -2.0f);
    return script_->Enter(absl::StrCat("export layer ", layer, " expert ", expert_idx,
                                       content == ExpertContent::kGradient ? " gradient" : " weights"));
  }
  ParameterVersion version(int32_t) override { return ParameterVersion{3}; }
  int64_t optimizer_step() override { return 12; }
  const std::vector<int32_t>& owned() override { return owned_; }
  kernels::Interprocess* interprocess() override { return nullptr; }

  std::vector<int32_t> ids_seen;
  std::vector<std::byte> w1_, w2_;

 private:
  EngineScript* const script_;
  const std::vector<int32_t> owned_ = {0, 1};
};

inline ModelSpec TestModel() {
  return {
      .num_layers = 3,
      .shape = {
          .num_experts = 2, .top_k = 2, .hidden_size = 16, .intermediate_size = 8, .dtype = DataType::kFp32}};
}

// A temporary directory, removed with what the tests left in it.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    char name[] = "/tmp/lrmoe-test-XXXXXX";
    REQUIRE(mkdtemp(name) != nullptr);
    path_ = name;
  }
  ~TemporaryDirectory() { (void)!system(absl::StrCat("rm -rf ", path_).c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct Worker {
  explicit Worker(ArenaLimits limits = {.max_arenas = 8, .max_total_bytes = 1 << 20}) {
    ServiceOptions options;
    options.arena_limits = limits;
    options.version = "test";
    options.create_engine = [this](const ModelSpec&) -> absl::StatusOr<std::unique_ptr<EnginePort>> {
      const absl::Status status = script.Enter("create");
      if (!status.ok()) return status;
      auto made = std::make_unique<ScriptedEngine>(&script);
      engine = made.get();
      return made;
    };
    options.on_closed = [this](const std::string& client) { (void)script.Enter("closed " + client); };
    options.on_model = [this](const ModelSpec&) { ++models; };
    options.on_dead = [this](const absl::Status& status) { death.push_back(status); };
    service = std::make_unique<WorkerService>(std::move(options));
    auto started = SocketServer::Start(socket(), service.get());
    REQUIRE(started.status() == absl::OkStatus());
    server = *std::move(started);
  }
  ~Worker() {
    script.Release();
    service->Stop();
    server.reset();
  }

  std::string socket() const { return directory.path() + "/worker/0.sock"; }
  client::Options ClientOptions() const {
    client::Options options;
    options.socket = socket();
    options.model = TestModel();
    options.call_timeout = 60s;
    return options;
  }
  std::unique_ptr<client::Session> Attach() {
    auto session = client::Session::Attach(ClientOptions());
    REQUIRE(session.status() == absl::OkStatus());
    return *std::move(session);
  }

  TemporaryDirectory directory;
  EngineScript script;
  ScriptedEngine* engine = nullptr;
  int models = 0;                   // engine thread; read after a call returned
  std::vector<absl::Status> death;  // engine thread; read after Stop
  std::unique_ptr<WorkerService> service;
  std::unique_ptr<SocketServer> server;
};

}  // namespace lrmoe::worker
