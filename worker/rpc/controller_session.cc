#include "worker/rpc/controller_session.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/logging.h"

namespace lrmoe::worker {
namespace {

int64_t NowUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Deadline AtUs(int64_t time_us) {
  return Deadline(std::chrono::microseconds(time_us));
}

}  // namespace

ControllerSession::ControllerSession(agent::Options options, Callbacks callbacks)
    : controller_(options.controller),
      leave_timeout_(options.leave_timeout_us / 1000 + 1),
      callbacks_(std::move(callbacks)),
      agent_(std::move(options), NowUs()),
      thread_([this] { Run(); }) {}

ControllerSession::~ControllerSession() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void ControllerSession::Push(agent::Event event, uint64_t stream) {
  Incoming incoming{std::move(event), stream};
  if (DoHere(incoming)) return;
  {
    std::lock_guard lock(mutex_);
    incoming_.push_back(std::move(incoming));
  }
  wake_.notify_one();
}

bool ControllerSession::DoHere(Incoming& incoming) {
  const auto* received = std::get_if<agent::Received>(&incoming.event);
  const bool quick = received != nullptr ? std::holds_alternative<ExecutionPlan>(received->message)
                                         : std::holds_alternative<agent::PlanWanted>(incoming.event);
  if (!quick) return false;
  std::unique_lock agent_lock(agent_mutex_, std::try_to_lock);
  if (!agent_lock.owns_lock()) return false;
  {
    std::lock_guard lock(mutex_);
    if (stopping_ || !incoming_.empty()) return false;
  }
  // Out of contact, any step may open a stream.
  if (!agent_.welcomed() || (incoming.stream != 0 && incoming.stream != stream_number_)) return false;
  Step(std::move(incoming.event));
  return true;
}

void ControllerSession::Step(agent::Event event) {
  agent_.Step(NowUs(), std::move(event), actions_);
  for (agent::Action& action : actions_) Carry(action);
  actions_.clear();
}

int64_t ControllerSession::StepQueued() {
  std::lock_guard agent_lock(agent_mutex_);
  std::deque<Incoming> events;
  {
    std::lock_guard lock(mutex_);
    events.swap(incoming_);
  }
  for (Incoming& incoming : events) {
    const bool current = incoming.stream == 0 || incoming.stream == stream_number_;
    if (std::holds_alternative<agent::StreamClosed>(incoming.event)) streams_.erase(incoming.stream);
    if (current) Step(std::move(incoming.event));
  }
  if (agent_.next_wake_us() <= NowUs()) Step(agent::Tick{});
  return agent_.next_wake_us();
}

void ControllerSession::Run() {
  while (true) {
    const int64_t wake_us = StepQueued();  // the first opens the first stream
    std::unique_lock lock(mutex_);
    const auto ready = [this] { return stopping_ || !incoming_.empty(); };
    if (wake_us == agent::kNever) {
      wake_.wait(lock, ready);
    } else {
      wake_.wait_until(lock, AtUs(wake_us), ready);  // what is done elsewhere meanwhile makes it later only
    }
    if (stopping_) break;
  }
  {
    std::lock_guard agent_lock(agent_mutex_);
    for (auto& [number, stream] : streams_) stream->Cancel();
  }
  {
    // Their callbacks use this object.
    std::unique_lock lock(mutex_);
    wake_.wait(lock, [this] { return open_streams_ == 0; });
  }
  streams_.clear();
}

ControllerStream* ControllerSession::stream() {
  const auto it = streams_.find(stream_number_);
  return it == streams_.end() ? nullptr : it->second.get();
}

void ControllerSession::OpenStream() {
  if (ControllerStream* before = stream()) before->Cancel();
  const uint64_t number = ++stream_number_;
  {
    std::lock_guard lock(mutex_);
    ++open_streams_;
  }
  streams_[number] = ControllerStream::Open(
      controller_, {.opened = [this, number] { Push(agent::StreamOpened{}, number); },
                    .received =
                        [this, number](absl::StatusOr<ControllerMessage> message) {
                          if (message.ok()) {
                            Push(agent::Received{*std::move(message)}, number);
                          } else {
                            Push(agent::ReceivedInvalid{message.status()}, number);
                          }
                        },
                    .closed =
                        [this, number](const absl::Status& status) {
                          std::lock_guard lock(mutex_);
                          incoming_.push_back({agent::StreamClosed{status}, number});
                          --open_streams_;
                          wake_.notify_one();  // under the lock: this object may go right after
                        }});
}

void ControllerSession::Carry(agent::Action& action) {
  using namespace agent;  // NOLINT: the actions' names
  if (std::holds_alternative<agent::OpenStream>(action)) {
    OpenStream();
  } else if (std::holds_alternative<CloseStream>(action)) {
    if (ControllerStream* current = stream()) current->CloseAfterSending();
  } else if (auto* send = std::get_if<agent::Send>(&action)) {
    if (ControllerStream* current = stream()) current->Send(send->message);
  } else if (auto* plan = std::get_if<DeliverPlan>(&action)) {
    const Invocation invocation = plan->plan.plan.invocation;
    Answer(invocation, std::move(plan->plan));
  } else if (auto* error = std::get_if<DeliverError>(&action)) {
    Answer(error->invocation, error->status);
  } else if (auto* end = std::get_if<EndEpoch>(&action)) {
    if (ControllerStream* current = stream()) current->Cancel();
    callbacks_.ended(end->kind, end->reason);
  } else if (std::holds_alternative<Left>(action)) {
    std::lock_guard lock(mutex_);
    left_ = true;
    answered_.notify_all();
  } else if (auto* drain = std::get_if<DrainAsked>(&action)) {
    callbacks_.drain_asked(drain->reason);
  } else if (auto* note = std::get_if<Note>(&action)) {
    LogInfo(note->text);
  }
}

void ControllerSession::Answer(const Invocation& invocation, absl::StatusOr<ExecutionPlan> answer) {
  {
    std::lock_guard lock(mutex_);
    if (waiter_ == nullptr || waiter_->invocation != invocation) return;  // gave up meanwhile
    waiter_->answer.emplace(std::move(answer));
  }
  answered_.notify_all();  // after the lock: whom it wakes wants it
}

absl::StatusOr<ExecutionPlan> ControllerSession::Plan(const Invocation& invocation,
                                                      std::span<const int64_t> counts, Deadline deadline) {
  Waiter waiter{invocation, std::nullopt};
  {
    std::lock_guard lock(mutex_);
    LRMOE_CHECK(waiter_ == nullptr);
    waiter_ = &waiter;
  }
  Push(agent::PlanWanted{SourceCounts{invocation, {counts.begin(), counts.end()}}});
  {
    std::unique_lock lock(mutex_);
    answered_.wait_until(lock, deadline, [&waiter] { return waiter.answer.has_value(); });
    waiter_ = nullptr;
  }
  if (waiter.answer) return *std::move(waiter.answer);
  Push(agent::PlanAbandoned{invocation});
  return absl::DeadlineExceededError(absl::StrCat("no plan for ", ToString(invocation),
                                                  " came from the controller at ", controller_, " in time"));
}

void ControllerSession::Report(const InvocationReport& report) {
  Push(agent::Measured{report});
}

void ControllerSession::SetModel(const ModelSpec& model) {
  Push(agent::ModelKnown{model});
}

void ControllerSession::Leave(const Leaving& leaving) {
  Push(agent::LeaveWanted{leaving});
  std::unique_lock lock(mutex_);
  // The agent keeps the limit; twice of it only guards against a session thread that is starved.
  answered_.wait_for(lock, 2 * leave_timeout_, [this] { return left_; });
}

}  // namespace lrmoe::worker
