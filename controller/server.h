// The loop: one thread owns the core and the history; everybody else posts to it. Planning runs on pool
// threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "controller/core/core.h"
#include "controller/core/history.h"
#include "controller/plan_place.h"
#include "controller/store/store.h"

namespace lrmoe {

// Where the loop's answers to workers go. Called on the loop thread only; must not block.
class SessionSink {
 public:
  virtual ~SessionSink() = default;
  virtual void Send(const std::vector<core::SessionId>& sessions,
                    const std::shared_ptr<const ControllerMessage>& message) = 0;
  // After what was sent before. Nothing more is sent to it.
  virtual void Close(core::SessionId session, const absl::Status& status) = 0;
  // An event of this session has been taken from the queue: it may post another.
  virtual void Taken(core::SessionId session) = 0;
};

// Told of every plan. Called on the loop thread only; must not block.
class PlanWatcher {
 public:
  virtual ~PlanWatcher() = default;
  virtual void OnPlan(const core::PlanRecord& record) = 0;
  // Nothing more comes.
  virtual void OnEnd(const absl::Status& status) = 0;
};

struct ServerOptions {
  core::CoreOptions core;
  int32_t planning_threads =
      1;  // layers are planned one at a time each, so more help only overlapping layers; 1..16
  // A layer whose last plans took no longer than this is planned on the loop thread, which saves the way to a
  // pool thread and back; meanwhile the loop does nothing else. 0: always on a pool thread. 0..10 ms
  int64_t max_loop_plan_us = 200;
  int32_t max_watchers = 64;     // each gets a copy of every plan; 0..1024
  int32_t max_simulations = 16;  // waiting for their turn; 0..1024
};
absl::Status Validate(const ServerOptions& options);

class Server {
 public:
  using PlanFunction = std::function<absl::StatusOr<LayerPlan>(const planner::PlanningProblem&)>;

  // What a question may look at, on the loop thread.
  struct View {
    core::Core& core;
    const core::History& history;
    const store::Store* store;  // null: nothing is kept on disk
    int64_t now_us;             // of the loop's clock
    int64_t uptime_us;          // since Start
  };

  // `options` are valid; `plan` is thread-safe. `store`, if any, outlives the server.
  Server(const ServerOptions& options, PlanFunction plan, store::Store* store = nullptr);
  ~Server();  // stops
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Once, before Start, when there is a store: what it has from earlier controllers. Errors as of
  // Store::Load.
  absl::Status Restore();
  // Once, before anything is posted. `sink` outlives the server.
  void Start(SessionSink* sink);
  // Tells and closes every session and watcher, then ends the threads. Posts after it are dropped, questions
  // after it are not asked. Any thread but the loop's; again does nothing.
  void Stop(const std::string& reason);

  // ---- any thread; none of these blocks.
  core::SessionId NewSessionId();
  void Post(core::Event event);
  // Calls `question` on the loop thread, or, when the server stops, `refused` (on any thread).
  void Ask(std::function<void(const View&)> question, std::function<void()> refused);
  // `done` is called once, on the loop thread, or with Unavailable on any thread when the server stops.
  void SetPolicy(std::vector<std::pair<std::string, std::string>> fields,
                 std::function<void(absl::StatusOr<PolicyChange>)> done);
  // Plans a problem that no worker waits for, on a thread of its own, so that it delays no invocation. `done`
  // is called once, on any thread: with the plan and its plan_us, the planner's error, or ResourceExhausted
  // at once when max_simulations are waiting, or Unavailable when the server stops.
  void Simulate(planner::PlanningProblem problem, std::function<void(absl::StatusOr<LayerPlan>)> done);
  // Watches until Unwatch, or OnEnd (at once when there are too many, or the server stops).
  void Watch(std::shared_ptr<PlanWatcher> watcher);
  void Unwatch(std::shared_ptr<PlanWatcher> watcher);

 private:
  using PolicyDone = std::function<void(absl::StatusOr<PolicyChange>)>;
  struct Question {
    std::function<void(const View&)> ask;
    std::function<void()> refused;
  };
  struct PolicyRequest {
    core::SetPolicy event;
    PolicyDone done;
  };
  struct WatchRequest {
    std::shared_ptr<PlanWatcher> watcher;
    bool watch = true;
  };
  using Work = std::variant<core::Event, Question, PolicyRequest, WatchRequest>;

  void Enqueue(Work work);
  static void Drop(Work work);
  void RunLoop();
  void Do(Work work);
  void Step(const core::Event& event);
  void Carry(core::Action& action);
  void Record(core::PlanRecord record);
  void RecordReport(const core::RecordReport& report);
  void RecordEpoch();
  void StartPlanning(core::StartPlan job);
  core::PlanFinished Make(const core::StartPlan& job);
  void RunPlanner();
  void RunSimulator();
  int64_t NowMicroseconds() const;

  const ServerOptions options_;
  const PlanFunction plan_;
  store::Store* const store_;
  SessionSink* sink_ = nullptr;
  std::atomic<uint64_t> next_session_{1};
  std::chrono::steady_clock::time_point started_;

  // The loop thread's own.
  core::Core core_;
  core::History history_;
  std::vector<std::shared_ptr<PlanWatcher>> watchers_;
  PolicyDone policy_done_;                 // of the SetPolicy in hand
  std::deque<core::StartPlan> loop_jobs_;  // of the Step in hand, to be planned here
  bool core_stopped_ = false;
  // What the store has of the epoch: number, state, whether there is a model.
  std::tuple<Epoch, core::EpochState, bool> epoch_recorded_{};

  std::mutex queue_mutex_;
  std::condition_variable queue_ready_;
  std::deque<Work> queue_;  // bounded by its posters: a session has a few events in it, a pool thread one
  bool stopped_ = false;    // takes nothing more

  std::mutex jobs_mutex_;
  std::condition_variable jobs_ready_;
  std::deque<core::StartPlan> jobs_;  // at most one per layer
  PlanPlace place_;
  bool jobs_stopped_ = false;

  struct Simulation {
    planner::PlanningProblem problem;
    std::function<void(absl::StatusOr<LayerPlan>)> done;
  };
  std::mutex simulations_mutex_;
  std::condition_variable simulations_ready_;
  std::deque<Simulation> simulations_;  // at most max_simulations
  bool simulations_stopped_ = true;     // until Start

  std::mutex stop_mutex_;  // held while stopping; taken before the others
  std::thread loop_;
  std::vector<std::thread> planners_;
  std::thread simulator_;
};

}  // namespace lrmoe
