// The worker's session with the controller: runs the agent (worker/agent), does its I/O, and provides the
// engine with plans. A thread of its own does what takes time: opening and ending streams, waiting, telling
// others. What lies between counts and plan is done by whoever brings it, as long as nothing came before it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/agent/agent.h"
#include "worker/engine/plan_provider.h"
#include "worker/rpc/controller_stream.h"

namespace lrmoe::worker {

class ControllerSession final : public engine::PlanProvider {
 public:
  struct Callbacks {  // on the session's thread; must not call back into it
    std::function<void(agent::EndKind, const std::string& reason)> ended;  // once; not after Leave
    std::function<void(const std::string& reason)> drain_asked;
  };

  // Starts connecting to options.controller ("host:port") at once.
  ControllerSession(agent::Options options, Callbacks callbacks);
  ~ControllerSession() override;  // cancels what is open, joins

  // As PlanProvider says: Plan from one thread at a time, Report from any. Plan returns Unavailable with the
  // reason once the epoch is over, DeadlineExceeded naming the controller when no answer came in time.
  absl::StatusOr<ExecutionPlan> Plan(const Invocation& invocation, std::span<const int64_t> counts,
                                     Deadline deadline) override;
  void Report(const InvocationReport& report) override;

  // Any thread.
  void SetModel(const ModelSpec& model);
  // Any thread but the callbacks'. Says goodbye; returns when the controller has noted it, or after
  // options.leave_timeout_us at most. Plans awaited get Unavailable.
  void Leave(const Leaving& leaving);

 private:
  struct Incoming {
    agent::Event event;
    uint64_t stream = 0;  // events of an older stream than the current one are dropped; 0: not from a stream
  };
  struct Waiter {
    Invocation invocation;
    std::optional<absl::StatusOr<ExecutionPlan>> answer;
  };

  void Push(agent::Event event, uint64_t stream = 0);
  // Does what the event asks for on this thread. False, and nothing happened, when it has to queue: behind
  // what came before, or because it may lead to more than a message and an answer.
  bool DoHere(Incoming& incoming);
  void Run();
  int64_t StepQueued();  // returns when the agent is to be woken
  void Step(agent::Event event);
  void Carry(agent::Action& action);
  void OpenStream();
  ControllerStream* stream();  // the current one, null when it is closed
  void Answer(const Invocation& invocation, absl::StatusOr<ExecutionPlan> answer);

  const std::string controller_;
  const std::chrono::milliseconds leave_timeout_;
  const Callbacks callbacks_;
  // Held over taking events and carrying out what they lead to, so that order is kept. Only the session
  // thread waits for it; others try. Taken before mutex_.
  std::mutex agent_mutex_;
  agent::Agent agent_;                  // guarded by agent_mutex_
  std::vector<agent::Action> actions_;  // guarded by agent_mutex_; of the step in hand
  // By number, until closed; guarded by agent_mutex_, changed by the session thread only.
  std::map<uint64_t, std::unique_ptr<ControllerStream>> streams_;
  uint64_t stream_number_ = 0;  // of the current one; as streams_

  std::mutex mutex_;
  std::condition_variable wake_;      // incoming_, stopping_
  std::condition_variable answered_;  // waiter_, left_
  std::deque<Incoming>
      incoming_;              // guarded by mutex_; bounded by what the stream and the engine have in flight
  Waiter* waiter_ = nullptr;  // guarded by mutex_
  bool left_ = false;         // guarded by mutex_
  bool stopping_ = false;     // guarded by mutex_
  int open_streams_ = 0;      // guarded by mutex_; whose callbacks may still come
  std::thread thread_;        // last: it uses the rest
};

}  // namespace lrmoe::worker
