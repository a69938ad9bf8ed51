#include "controller/core/core.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/status_macros.h"

namespace lrmoe::core {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

std::string Seconds(int64_t us) {
  const int64_t ms = us / 1000;
  return absl::StrCat(static_cast<double>(ms) / 1000.0, " s");
}

std::string Ranks(const std::vector<int32_t>& ranks) {
  // A thousand missing ranks are a count, not a list.
  constexpr size_t kShown = 16;
  std::vector<int32_t> shown(ranks.begin(), ranks.begin() + std::min(ranks.size(), kShown));
  std::string text = absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(shown, ", "));
  if (ranks.size() > kShown) absl::StrAppend(&text, " and ", ranks.size() - kShown, " more");
  return text;
}

}  // namespace

absl::string_view Name(EpochState state) {
  switch (state) {
    case EpochState::kWaiting:
      return "waiting";
    case EpochState::kRunning:
      return "running";
    case EpochState::kEnded:
      return "ended";
    case EpochState::kAborted:
      return "aborted";
  }
  return "unknown";
}

absl::string_view Name(MemberState state) {
  switch (state) {
    case MemberState::kAbsent:
      return "absent";
    case MemberState::kConnected:
      return "connected";
    case MemberState::kDisconnected:
      return "disconnected";
    case MemberState::kLeft:
      return "left";
  }
  return "unknown";
}

Core::Core(const CoreOptions& options, Epoch first_epoch) : options_(options), next_epoch_(first_epoch) {
  LRMOE_CHECK(Validate(options).ok());
  LRMOE_CHECK(first_epoch != Epoch{0});
  policies_.push_back({options.policy, 0});
}

void Core::Restore(const EpochRecord& last, Epoch next_epoch, int64_t current_step) {
  LRMOE_CHECK(sessions_.empty() && epoch_ == Epoch{0} && next_epoch > last.epoch);
  next_epoch_ = next_epoch;
  epoch_ = last.epoch;
  if (last.epoch == Epoch{0}) return;
  const bool cut_short = last.state == EpochState::kRunning;
  state_ = cut_short ? EpochState::kWaiting : last.state;
  reason_ =
      cut_short ? "the controller was restarted; the epoch goes on when its ranks are back" : last.reason;
  model_ = last.model;
  for (const Hello& hello : last.hellos)
    members_.push_back(Member{.hello = hello, .current_step = current_step});
}

EpochRecord Core::epoch_record() const {
  EpochRecord record{.epoch = epoch_, .state = state_, .reason = reason_, .model = model_};
  for (const Member& member : members_) record.hellos.push_back(member.hello);
  return record;
}

std::vector<Action> Core::Step(const Event& event, int64_t now_us) {
  LRMOE_CHECK_GE(now_us, now_us_);
  now_us_ = now_us;
  actions_.clear();
  std::visit([this](const auto& value) { On(value); }, event);
  return std::exchange(actions_, {});
}

void Core::On(const Tick&) {
  std::vector<SessionId> silent;
  for (const auto& [id, session] : sessions_)
    if (!session.rank_idx.has_value() && now_us_ - session.opened_us >= options_.hello_timeout_us)
      silent.push_back(id);
  for (SessionId session : silent)
    Refuse(session,
           absl::DeadlineExceededError(absl::StrCat("no hello within ", Seconds(options_.hello_timeout_us))));
  if (state_ == EpochState::kRunning) {
    for (size_t rank = 0; rank < members_.size(); ++rank) {
      const Member& member = members_[rank];
      if (member.state != MemberState::kDisconnected) continue;
      if (now_us_ - member.lost_us < options_.reconnect_grace_us) continue;
      AbortEpoch(absl::StrCat(Describe(static_cast<int32_t>(rank)), " was lost: ", member.lost_reason));
      return;
    }
  }
  NameMissing();
}

// Says once who keeps the others waiting.
void Core::NameMissing() {
  if (state_ == EpochState::kWaiting && !named_absent_ && AnyConnected() &&
      now_us_ - waiting_since_us_ >= options_.missing_after_us) {
    named_absent_ = true;
    Say(Severity::kWarning, absl::StrCat("job ", job_, " has waited ", Seconds(now_us_ - waiting_since_us_),
                                         " for ", Ranks(MissingRanks(now_us_))));
  }
  if (!rendezvous_.has_value()) return;
  for (const Rendezvous::Waiting& waiting : rendezvous_->Overdue(now_us_, options_.missing_after_us, true))
    Say(Severity::kWarning,
        absl::StrCat("the plan of ", ToString(waiting.invocation), " has waited ",
                     Seconds(now_us_ - waiting.since_us), " for ", Ranks(waiting.missing)));
}

int64_t Core::NextTick() const {
  int64_t next = kNever;
  for (const auto& [id, session] : sessions_)
    if (!session.rank_idx.has_value()) next = std::min(next, session.opened_us + options_.hello_timeout_us);
  if (state_ == EpochState::kRunning) {
    for (const Member& member : members_)
      if (member.state == MemberState::kDisconnected)
        next = std::min(next, member.lost_us + options_.reconnect_grace_us);
  }
  if (state_ == EpochState::kWaiting && !named_absent_ && AnyConnected())
    next = std::min(next, waiting_since_us_ + options_.missing_after_us);
  if (rendezvous_.has_value()) next = std::min(next, rendezvous_->NextOverdue(options_.missing_after_us));
  return next;
}

int32_t Core::ranks_expected() const {
  return options_.ranks > 0 ? options_.ranks : static_cast<int32_t>(members_.size());
}

int64_t Core::current_step() const {
  int64_t step = rendezvous_.has_value() ? std::max<int64_t>(rendezvous_->max_step(), 0) : 0;
  for (const Member& member : members_) step = std::max(step, member.current_step);
  return step;
}

std::vector<int32_t> Core::MissingRanks(int64_t now_us) {
  std::vector<bool> missing(ranks_expected(), false);
  if (state_ == EpochState::kEnded || state_ == EpochState::kAborted) return {};
  for (int32_t rank = 0; rank < ranks_expected(); ++rank)
    missing[rank] =
        rank >= static_cast<int32_t>(members_.size()) ||
        (members_[rank].state != MemberState::kConnected && members_[rank].state != MemberState::kLeft);
  if (rendezvous_.has_value() && state_ == EpochState::kRunning) {
    for (const Rendezvous::Waiting& waiting : rendezvous_->Overdue(now_us, options_.missing_after_us, false))
      for (int32_t rank : waiting.missing) missing[rank] = true;
  }
  std::vector<int32_t> ranks;
  for (int32_t rank = 0; rank < ranks_expected(); ++rank)
    if (missing[rank]) ranks.push_back(rank);
  return ranks;
}

const Policy& Core::PolicyOf(int64_t step) const {
  size_t last = 0;
  for (size_t i = 1; i < policies_.size() && policies_[i].from_step <= step; ++i) last = i;
  return policies_[last].policy;
}

void Core::On(const SetPolicy& event) {
  Policy policy = newest_policy();
  for (const auto& [name, value] : event.fields) {
    const absl::Status status = SetPolicyField(policy, name, value);
    if (status.ok()) continue;
    actions_.push_back(PolicyOutcome{status});
    return;
  }
  // The first step that no rank has begun: its plans are the first that can be equal on all ranks.
  const bool begun =
      state_ == EpochState::kRunning && rendezvous_.has_value() && rendezvous_->max_step() >= 0;
  const int64_t from_step = begun ? current_step() + 1 : 0;
  if (from_step == 0) policies_.clear();
  const int64_t oldest = rendezvous_.has_value() ? rendezvous_->OldestPendingStep(current_step()) : 0;
  while (policies_.size() >= 2 && policies_[1].from_step <= oldest) policies_.erase(policies_.begin());
  if (policies_.size() >= static_cast<size_t>(options_.max_policy_changes)) {
    actions_.push_back(PolicyOutcome{
        absl::ResourceExhaustedError(absl::StrCat("policy changes not yet in force are ", policies_.size(),
                                                  "; allowed: 1..", options_.max_policy_changes - 1))});
    return;
  }
  if (!policies_.empty() && policies_.back().from_step >= from_step) policies_.pop_back();
  policies_.push_back({policy, from_step});
  actions_.push_back(PolicyOutcome{policies_.back()});
  if (state_ == EpochState::kRunning) SendToAll(policies_.back());
  std::vector<std::string> named;
  for (const auto& [name, value] : event.fields) named.push_back(absl::StrCat(name, " = ", value));
  Say(Severity::kInfo, absl::StrCat("policy from step ", from_step, ": ", absl::StrJoin(named, ", ")));
}

void Core::On(const DrainRequested& event) {
  draining_ = event.reason.empty() ? "drain requested" : event.reason;
  Say(Severity::kInfo, absl::StrCat("draining: ", draining_));
  if (state_ == EpochState::kRunning) SendToAll(Drain{draining_});
}

void Core::On(const Stop& event) {
  stopping_ = event.reason.empty() ? "controller stopping" : event.reason;
  if (!job_.empty() && (state_ == EpochState::kWaiting || state_ == EpochState::kRunning))
    AbortEpoch(stopping_);
  while (!sessions_.empty()) Refuse(sessions_.begin()->first, absl::UnavailableError(stopping_));
}

void Core::SendTo(std::vector<SessionId> sessions, ControllerMessage message) {
  if (sessions.empty()) return;
  actions_.push_back(
      Send{std::move(sessions), std::make_shared<const ControllerMessage>(std::move(message))});
}

void Core::SendToAll(const ControllerMessage& message) {
  std::vector<SessionId> sessions;
  for (const Member& member : members_)
    if (member.session.has_value()) sessions.push_back(*member.session);
  SendTo(std::move(sessions), message);
}

void Core::Say(Severity severity, std::string text) {
  actions_.push_back(Log{severity, std::move(text)});
}

}  // namespace lrmoe::core
