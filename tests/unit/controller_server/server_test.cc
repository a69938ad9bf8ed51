// The loop without gRPC: many threads post, ask, watch and stop at once. Made for the thread sanitizer.
#include "controller/server.h"

#include <atomic>
#include <catch2/catch.hpp>
#include <map>
#include <set>
#include <thread>
#include <vector>

#include "controller/planner/planner.h"

namespace lrmoe {
namespace {

constexpr auto kPatience = std::chrono::seconds(30);  // a test that hangs, fails

// Keeps what each session got, and lets its thread wait for it.
class RecordingSink final : public SessionSink {
 public:
  void Send(const std::vector<core::SessionId>& sessions,
            const std::shared_ptr<const ControllerMessage>& message) override {
    std::lock_guard lock(mutex_);
    for (core::SessionId session : sessions) inbox_[session].push_back(message);
    arrived_.notify_all();
  }
  void Close(core::SessionId session, const absl::Status& status) override {
    std::lock_guard lock(mutex_);
    closed_[session] = status;
    arrived_.notify_all();
  }
  void Taken(core::SessionId) override { ++taken; }

  // Null once the session is closed and its messages are read.
  std::shared_ptr<const ControllerMessage> Next(core::SessionId session) {
    std::unique_lock lock(mutex_);
    const bool in_time = arrived_.wait_for(
        lock, kPatience, [&] { return !inbox_[session].empty() || closed_.contains(session); });
    if (!in_time || inbox_[session].empty()) return nullptr;
    auto message = inbox_[session].front();
    inbox_[session].pop_front();
    return message;
  }
  absl::Status closed(core::SessionId session) {
    std::unique_lock lock(mutex_);
    arrived_.wait_for(lock, kPatience, [&] { return closed_.contains(session); });
    return closed_.contains(session) ? closed_[session] : absl::InternalError("not closed");
  }

  std::atomic<int64_t> taken{0};

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<core::SessionId, std::deque<std::shared_ptr<const ControllerMessage>>> inbox_;
  std::map<core::SessionId, absl::Status> closed_;
};

class CountingWatcher final : public PlanWatcher {
 public:
  void OnPlan(const core::PlanRecord&) override { ++plans; }
  void OnEnd(const absl::Status&) override { ++ends; }
  std::atomic<int64_t> plans{0};
  std::atomic<int> ends{0};
};

core::SessionId Join(Server& server, int32_t rank, int32_t world_size) {
  const core::SessionId session = server.NewSessionId();
  server.Post(core::SessionOpened{session});
  server.Post(core::SessionMessage{
      session,
      Hello{.rank_idx = rank, .world_size = world_size, .job = "job", .node = "n", .replica_slots = 1}});
  ModelSpec model{.num_layers = 2};
  model.shape = {.num_experts = 4, .top_k = 1, .hidden_size = 8, .intermediate_size = 8};
  server.Post(core::SessionMessage{session, model});
  return session;
}

TEST_CASE("workers, admin calls and watchers from many threads") {
  constexpr int32_t kRanks = 4;
  constexpr int64_t kSteps = 200;
  RecordingSink sink;
  ServerOptions options;
  options.planning_threads = 2;
  Server server(options, planner::Plan);
  server.Start(&sink);
  auto watcher = std::make_shared<CountingWatcher>();
  server.Watch(watcher);
  std::atomic<int64_t> plans{0}, answers{0};
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < kRanks; ++rank)
    threads.emplace_back([&, rank] {
      const core::SessionId session = Join(server, rank, kRanks);
      auto message = sink.Next(session);
      if (message == nullptr || !std::holds_alternative<Welcome>(*message)) return;
      for (int64_t step = 0; step < kSteps; ++step) {
        server.Post(core::SessionMessage{
            session, SourceCounts{{step, static_cast<int32_t>(step % 2), 0}, {step, rank, 1, 2}}});
        do {
          message = sink.Next(session);
        } while (message != nullptr && std::holds_alternative<PolicyChange>(*message));
        if (message == nullptr || !std::holds_alternative<ExecutionPlan>(*message)) return;
        ++plans;
      }
      server.Post(core::SessionMessage{session, Leaving{}});
    });
  threads.emplace_back([&] {
    for (int i = 0; i < 200; ++i) {
      server.Ask([&](const Server::View& view) { answers += view.core.members().size() <= kRanks; }, [] {});
      server.SetPolicy({{"seed", std::to_string(i)}}, [&](absl::StatusOr<PolicyChange> change) {
        answers += change.ok() || change.status().code() == absl::StatusCode::kResourceExhausted;
      });
      auto passing = std::make_shared<CountingWatcher>();
      server.Watch(passing);
      server.Unwatch(passing);
    }
  });
  for (std::thread& thread : threads) thread.join();
  server.Stop("over");
  CHECK(plans == kRanks * kSteps);
  CHECK(answers == 400);
  CHECK(watcher->plans == kSteps);
  CHECK(watcher->ends == 1);
  CHECK(sink.taken == kRanks * (kSteps + 3));
}

TEST_CASE("stopping answers everybody, whenever it comes") {
  for (int round = 0; round < 20; ++round) {
    RecordingSink sink;
    Server server({}, planner::Plan);
    server.Start(&sink);
    const core::SessionId session = Join(server, 0, 1);
    std::atomic<int> answers{0};
    std::thread asking([&] {
      for (int i = 0; i < 50; ++i) {
        server.Ask([&](const Server::View&) { ++answers; }, [&] { ++answers; });
        server.SetPolicy({{"seed", "1"}}, [&](absl::StatusOr<PolicyChange>) { ++answers; });
      }
    });
    server.Stop("controller stopping (SIGTERM)");
    asking.join();
    CHECK(answers == 100);
    CHECK_FALSE(sink.closed(session).ok());
    server.Stop("again");
    auto late = std::make_shared<CountingWatcher>();
    server.Watch(late);
    CHECK(late->ends == 1);
  }
}

TEST_CASE("quick plans move to the loop's thread, and never do with no time for them there") {
  for (const int64_t max_loop_plan_us : {0, 10000}) {
    RecordingSink sink;
    ServerOptions options;
    options.max_loop_plan_us = max_loop_plan_us;
    std::mutex mutex;
    std::vector<std::thread::id> planned_on;
    Server server(options, [&](const planner::PlanningProblem& problem) {
      std::lock_guard lock(mutex);
      planned_on.push_back(std::this_thread::get_id());
      return planner::Plan(problem);
    });
    server.Start(&sink);
    std::thread::id loop;
    server.Ask([&](const Server::View&) { loop = std::this_thread::get_id(); }, [] {});
    const core::SessionId session = Join(server, 0, 1);
    sink.Next(session);
    constexpr int64_t kSteps = 2 * PlanPlace::kEnough;
    for (int64_t step = 0; step < kSteps; ++step) {
      server.Post(core::SessionMessage{session, SourceCounts{{step, 0, 0}, {1, 1, 1, step}}});
      const auto message = sink.Next(session);
      REQUIRE(message != nullptr);
      REQUIRE(std::get<ExecutionPlan>(*message).plan.invocation.step == step);
    }
    server.Stop("over");
    REQUIRE(planned_on.size() == kSteps);
    CHECK(planned_on.front() != loop);
    CHECK((planned_on.back() == loop) == (max_loop_plan_us > 0));
  }
}

TEST_CASE("a plan that comes after its epoch died is dropped") {
  RecordingSink sink;
  std::mutex mutex;
  std::condition_variable changed;
  bool planning = false, go = false;
  Server server({}, [&](const planner::PlanningProblem& problem) {
    std::unique_lock lock(mutex);
    planning = true;
    changed.notify_all();
    changed.wait_for(lock, kPatience, [&] { return go; });
    return planner::Plan(problem);
  });
  server.Start(&sink);
  const core::SessionId first = Join(server, 0, 1);
  sink.Next(first);
  server.Post(core::SessionMessage{first, SourceCounts{{0, 0, 0}, {1, 1, 1, 1}}});
  {
    std::unique_lock lock(mutex);
    REQUIRE(changed.wait_for(lock, kPatience, [&] { return planning; }));
  }
  server.Post(core::SessionMessage{first, Leaving{"out of memory", true}});
  CHECK(sink.closed(first).code() == absl::StatusCode::kAborted);
  {
    std::lock_guard lock(mutex);
    go = true;
  }
  changed.notify_all();
  server.Stop("over");
  const auto abort = sink.Next(first);
  REQUIRE(abort != nullptr);
  CHECK(std::holds_alternative<Abort>(*abort));
  CHECK(sink.Next(first) == nullptr);
}

}  // namespace
}  // namespace lrmoe
