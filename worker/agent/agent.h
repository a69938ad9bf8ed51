// The worker's side of the controller session, as a function of state, event and time: connecting with
// back-off, resuming an epoch after a reconnect, matching plans to the counts they answer, giving up. It does
// no I/O: the shell (worker/rpc/controller_session) feeds it events and carries out its actions. Times are
// microseconds of any clock that only moves forward; equal events at equal times give equal actions. One
// thread calls it.
#pragma once

#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "common/ids.h"
#include "common/random.h"
#include "common/session.h"

namespace lrmoe::agent {

struct Options {
  std::string controller;                   // address, for messages
  Hello hello;                              // epoch 0
  int64_t controller_timeout_us = 5000000;  // gives up after so long without a stream, 100 ms .. 1 h
  int64_t first_backoff_us = 20000;         // 1 ms .. max_backoff; doubles with every failed attempt
  int64_t max_backoff_us = 500000;          // each wait is drawn from its upper half
  int64_t heartbeat_us = 1000000;           // while welcomed, 10 ms .. 1 h
  int64_t leave_timeout_us = 1000000;       // for the controller to take note of a Leaving, 1 ms .. 1 min
  uint64_t seed = 0;                        // of the jitter
};

// ---- events

struct StreamOpened {};  // the controller's host took the Hello
struct StreamClosed {
  absl::Status status;
};  // also when it could not be opened
struct Received {
  ControllerMessage message;
};
struct ReceivedInvalid {
  absl::Status status;
};  // a message that failed validation
struct ModelKnown {
  ModelSpec model;
};  // a framework has attached
struct PlanWanted {
  SourceCounts counts;
};
struct PlanAbandoned {
  Invocation invocation;
};  // nobody waits for it any more
struct Measured {
  InvocationReport report;
};
struct LeaveWanted {
  Leaving leaving;
};
struct Tick {};  // due at next_wake_us()

using Event = std::variant<StreamOpened, StreamClosed, Received, ReceivedInvalid, ModelKnown, PlanWanted,
                           PlanAbandoned, Measured, LeaveWanted, Tick>;

// ---- actions, to be carried out in order

enum class EndKind : uint8_t {
  kAborted = 1,     // the controller ended the epoch
  kControllerLost,  // no stream for controller_timeout
  kRefused,         // the controller refuses this worker, or does not speak its protocol
};

struct OpenStream {};   // a new stream; what follows is sent on it
struct CloseStream {};  // once everything before was sent
struct Send {
  WorkerMessage message;
};
struct DeliverPlan {
  ExecutionPlan plan;
};                     // answers a PlanWanted
struct DeliverError {  // answers a PlanWanted
  Invocation invocation;
  absl::Status status;
};
struct EndEpoch {  // once; nothing is sent after it
  EndKind kind;
  std::string reason;
};
struct Left {};  // answers LeaveWanted, once
struct DrainAsked {
  std::string reason;
};
struct Note {
  std::string text;
};  // for the log

using Action =
    std::variant<OpenStream, CloseStream, Send, DeliverPlan, DeliverError, EndEpoch, Left, DrainAsked, Note>;

inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
// Reports kept while there is no session; the oldest go first. A few steps of a deep model.
inline constexpr size_t kMaxQueuedReports = 4096;

class Agent {
 public:
  // The first Step opens the first stream. Options are checked (programmer error).
  Agent(Options options, int64_t now_us);

  // Appends to `actions`. A plan that is received moves through.
  void Step(int64_t now_us, Event event, std::vector<Action>& actions);
  // When the next Tick is due; kNever when only an event can change anything.
  int64_t next_wake_us() const;

  Epoch epoch() const { return epoch_; }  // 0 before the first welcome
  bool welcomed() const { return state_ == State::kWelcomed; }

 private:
  enum class State : uint8_t {
    kWaiting,  // for the next attempt
    kOpening,  // stream asked for, not there yet
    kOpened,   // Hello is out; the controller welcomes when all ranks are there
    kWelcomed,
    kLeaving,  // Leaving is out
    kEnded,
  };

  void On(const StreamOpened& event);
  void On(const StreamClosed& event);
  void On(Received& event);
  void On(const ReceivedInvalid& event);
  void On(const ModelKnown& event);
  void On(const PlanWanted& event);
  void On(const PlanAbandoned& event);
  void On(const Measured& event);
  void On(const LeaveWanted& event);
  void On(const Tick& event);

  void OnMessage(const Welcome& welcome);
  void OnMessage(ExecutionPlan& plan);
  void OnMessage(const PolicyChange& change);
  void OnMessage(const Abort& abort);
  void OnMessage(const Drain& drain);
  void OnMessage(const PlanError& error);

  void Do(Action action) { actions_->push_back(std::move(action)); }
  void End(EndKind kind, std::string reason);
  void FailAwaited(const absl::Status& status);
  void ScheduleAttempt();
  bool OutOfContact() const { return state_ == State::kWaiting || state_ == State::kOpening; }

  const Options options_;
  Random random_;
  State state_ = State::kWaiting;
  Epoch epoch_{0};
  std::optional<ModelSpec> model_;
  std::map<Invocation, std::vector<int64_t>> awaited_;  // plans the engine waits for
  std::deque<InvocationReport> reports_;                // not sent yet
  int64_t current_step_ = 0;

  int64_t lost_at_us_;       // since when there is no stream; counts while OutOfContact()
  int64_t lost_for_us_ = 0;  // without a stream before this one, which was not welcomed yet
  int64_t next_attempt_us_;
  int64_t next_heartbeat_us_ = kNever;
  int64_t leave_deadline_us_ = kNever;
  int32_t failed_attempts_ = 0;
  absl::Status last_failure_;
  absl::Status end_;  // why it ended, once kEnded

  int64_t now_us_ = 0;                      // of the step that runs
  std::vector<Action>* actions_ = nullptr;  // of the step that runs
};

}  // namespace lrmoe::agent
