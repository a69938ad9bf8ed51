#include "worker/agent/agent.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/check.h"

namespace lrmoe::agent {
namespace {

// Codes with which a controller says that trying again is pointless. Everything else may pass.
bool IsRefusal(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
      return true;
    default:
      return false;
  }
}

std::string Why(const absl::Status& status) {
  return status.message().empty() ? absl::StatusCodeToString(status.code()) : std::string(status.message());
}

}  // namespace

Agent::Agent(Options options, int64_t now_us)
    : options_(std::move(options)), random_(options_.seed), lost_at_us_(now_us), next_attempt_us_(now_us) {
  LRMOE_CHECK_GE(options_.controller_timeout_us, 100000);
  LRMOE_CHECK_LE(options_.controller_timeout_us, 3600000000);
  LRMOE_CHECK_GE(options_.first_backoff_us, 1000);
  LRMOE_CHECK_LE(options_.first_backoff_us, options_.max_backoff_us);
  LRMOE_CHECK_GE(options_.heartbeat_us, 10000);
  LRMOE_CHECK_GE(options_.leave_timeout_us, 1000);
  LRMOE_CHECK(options_.hello.epoch == Epoch{0});
}

void Agent::Step(int64_t now_us, Event event, std::vector<Action>& actions) {
  now_us_ = now_us;
  actions_ = &actions;
  std::visit([this](auto& e) { On(e); }, event);
  On(Tick{});  // whatever came, what is due is due
  actions_ = nullptr;
}

int64_t Agent::next_wake_us() const {
  switch (state_) {
    case State::kWaiting:
      return std::min(next_attempt_us_, lost_at_us_ + options_.controller_timeout_us);
    case State::kOpening:
      return lost_at_us_ + options_.controller_timeout_us;
    case State::kWelcomed:
      return next_heartbeat_us_;
    case State::kLeaving:
      return leave_deadline_us_;
    case State::kOpened:
    case State::kEnded:
      return kNever;
  }
  return kNever;
}

void Agent::On(const Tick&) {
  if (OutOfContact() && now_us_ - lost_at_us_ >= options_.controller_timeout_us) {
    std::string reason =
        absl::StrFormat("no session with the controller at %s for %.1f s", options_.controller,
                        static_cast<double>(options_.controller_timeout_us) / 1e6);
    if (!last_failure_.ok()) absl::StrAppend(&reason, " (last attempt: ", Why(last_failure_), ")");
    End(EndKind::kControllerLost, std::move(reason));
  } else if (state_ == State::kWaiting && now_us_ >= next_attempt_us_) {
    state_ = State::kOpening;
    Do(OpenStream{});
    Hello hello = options_.hello;
    hello.epoch = epoch_;
    Do(Send{std::move(hello)});
  } else if (state_ == State::kWelcomed && now_us_ >= next_heartbeat_us_) {
    next_heartbeat_us_ = now_us_ + options_.heartbeat_us;
    Do(Send{Heartbeat{.current_step = current_step_}});
  } else if (state_ == State::kLeaving && now_us_ >= leave_deadline_us_) {
    state_ = State::kEnded;
    Do(Left{});
  }
}

void Agent::On(const StreamOpened&) {
  if (state_ != State::kOpening) return;
  state_ = State::kOpened;
  lost_for_us_ = now_us_ - lost_at_us_;
}

void Agent::On(const StreamClosed& event) {
  if (state_ == State::kEnded || state_ == State::kWaiting) return;
  if (state_ == State::kLeaving) {
    state_ = State::kEnded;
    Do(Left{});
    return;
  }
  last_failure_ =
      event.status.ok() ? absl::UnavailableError("the controller closed the session") : event.status;
  if (IsRefusal(last_failure_.code())) {
    End(EndKind::kRefused, absl::StrCat("the controller at ", options_.controller,
                                        " refused this worker: ", Why(last_failure_)));
    return;
  }
  if (state_ == State::kWelcomed) {
    lost_at_us_ = now_us_;
    failed_attempts_ = 0;
    Do(Note{absl::StrCat("lost the controller at ", options_.controller, " (", Why(last_failure_),
                         "), trying to reach it again")});
  } else if (state_ == State::kOpened) {
    // A stream that opens but is never welcomed must not keep the worker trying for ever.
    lost_at_us_ = now_us_ - lost_for_us_;
  }
  ScheduleAttempt();
}

void Agent::ScheduleAttempt() {
  state_ = State::kWaiting;
  const int32_t doublings = std::min(failed_attempts_, 30);
  ++failed_attempts_;
  const int64_t longest = std::min(options_.first_backoff_us << doublings, options_.max_backoff_us);
  next_attempt_us_ = now_us_ + random_.Between(longest - longest / 2, longest);
}

void Agent::On(Received& event) {
  if (state_ == State::kLeaving || state_ == State::kEnded) return;
  std::visit([this](auto& message) { OnMessage(message); }, event.message);
}

void Agent::On(const ReceivedInvalid& event) {
  if (state_ == State::kLeaving || state_ == State::kEnded) return;
  End(EndKind::kRefused, absl::StrCat("the controller at ", options_.controller,
                                      " sent an invalid message: ", Why(event.status)));
}

void Agent::OnMessage(const Welcome& welcome) {
  if (epoch_ != Epoch{0} && welcome.epoch != epoch_) {
    End(EndKind::kAborted, absl::StrCat("the controller at ", options_.controller, " is at epoch ",
                                        static_cast<uint64_t>(welcome.epoch), ", this worker's epoch ",
                                        static_cast<uint64_t>(epoch_), " is over"));
    return;
  }
  const bool resumed = epoch_ != Epoch{0};
  epoch_ = welcome.epoch;
  state_ = State::kWelcomed;
  failed_attempts_ = 0;
  last_failure_ = absl::OkStatus();
  next_heartbeat_us_ = now_us_ + options_.heartbeat_us;
  Do(Note{absl::StrCat(resumed ? "resumed" : "joined", " epoch ", static_cast<uint64_t>(epoch_),
                       " at the controller ", options_.controller, ", planner ", welcome.policy.planner)});
  if (model_) Do(Send{*model_});
  for (const auto& [invocation, counts] : awaited_) Do(Send{SourceCounts{invocation, counts}});
  for (const InvocationReport& report : reports_) Do(Send{report});
  reports_.clear();
}

void Agent::OnMessage(ExecutionPlan& plan) {
  // Nobody waits: a second answer after a reconnect, or the engine gave up.
  if (awaited_.erase(plan.plan.invocation) == 0) return;
  Do(DeliverPlan{std::move(plan)});
}

void Agent::OnMessage(const PlanError& error) {
  if (awaited_.erase(error.invocation) == 0) return;
  Do(DeliverError{error.invocation, error.status});
}

void Agent::OnMessage(const PolicyChange& change) {
  Do(Note{absl::StrCat("from step ", change.from_step, " on plans are made with planner ",
                       change.policy.planner)});
}

void Agent::OnMessage(const Abort& abort) {
  End(EndKind::kAborted, absl::StrCat("the controller ended epoch ", static_cast<uint64_t>(epoch_), ": ",
                                      abort.reason.empty() ? "no reason given" : abort.reason));
}

void Agent::OnMessage(const Drain& drain) {
  Do(DrainAsked{drain.reason});
}

void Agent::On(const ModelKnown& event) {
  model_ = event.model;
  if (state_ == State::kWelcomed) Do(Send{event.model});
}

void Agent::On(const PlanWanted& event) {
  if (state_ == State::kLeaving || state_ == State::kEnded) {
    Do(DeliverError{event.counts.invocation,
                    end_.ok() ? absl::UnavailableError("this worker is leaving its epoch") : end_});
    return;
  }
  current_step_ = std::max(current_step_, event.counts.invocation.step);
  awaited_[event.counts.invocation] = event.counts.counts;
  if (state_ == State::kWelcomed) Do(Send{event.counts});
}

void Agent::On(const PlanAbandoned& event) {
  awaited_.erase(event.invocation);
}

void Agent::On(const Measured& event) {
  if (state_ == State::kWelcomed) {
    Do(Send{event.report});
  } else if (state_ != State::kLeaving && state_ != State::kEnded) {
    if (reports_.size() == kMaxQueuedReports) reports_.pop_front();
    reports_.push_back(event.report);
  }
}

void Agent::On(const LeaveWanted& event) {
  if (state_ == State::kLeaving) return;  // Left will come
  if (state_ == State::kEnded || OutOfContact()) {
    if (state_ == State::kOpening) Do(CloseStream{});
    state_ = State::kEnded;
    Do(Left{});
  } else {
    state_ = State::kLeaving;
    leave_deadline_us_ = now_us_ + options_.leave_timeout_us;
    Do(Send{event.leaving});
    Do(CloseStream{});
  }
  FailAwaited(absl::UnavailableError("this worker is leaving its epoch"));
}

void Agent::End(EndKind kind, std::string reason) {
  if (state_ != State::kWaiting) Do(CloseStream{});
  state_ = State::kEnded;
  end_ = absl::UnavailableError(reason);
  FailAwaited(end_);
  Do(EndEpoch{kind, std::move(reason)});
}

void Agent::FailAwaited(const absl::Status& status) {
  for (const auto& [invocation, counts] : awaited_) Do(DeliverError{invocation, status});
  awaited_.clear();
}

}  // namespace lrmoe::agent
