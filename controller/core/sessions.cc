// Core: who is here. Streams, hellos, epochs.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "controller/core/core.h"

namespace lrmoe::core {
namespace {

std::string NumRanks(size_t count) {
  return absl::StrCat(count, count == 1 ? " rank" : " ranks");
}

}  // namespace

void Core::On(const SessionOpened& event) {
  sessions_[event.session] = {now_us_, std::nullopt};
  if (!stopping_.empty()) {
    Refuse(event.session, absl::UnavailableError(stopping_));
  } else if (sessions_.size() > static_cast<size_t>(options_.max_sessions)) {
    Refuse(event.session,
           absl::ResourceExhaustedError(absl::StrCat("open sessions are ", sessions_.size(), "; allowed: 0..",
                                                     options_.max_sessions)));
  }
}

void Core::On(const SessionClosed& event) {
  const auto found = sessions_.find(event.session);
  if (found == sessions_.end()) return;  // closed by us
  const std::optional<int32_t> rank_idx = found->second.rank_idx;
  sessions_.erase(found);
  if (!rank_idx.has_value()) return;
  Member& member = members_[*rank_idx];
  member.session.reset();
  if (state_ == EpochState::kWaiting) {
    Say(Severity::kWarning,
        absl::StrCat(Describe(*rank_idx), " went away before the epoch began: ", event.reason));
    member = Member{};
    return;
  }
  member.state = MemberState::kDisconnected;
  member.lost_us = now_us_;
  member.lost_reason = event.reason.empty() ? "its session ended without a word" : event.reason;
  if (state_ != EpochState::kRunning) return;
  if (options_.reconnect_grace_us == 0) {
    AbortEpoch(absl::StrCat(Describe(*rank_idx), " was lost: ", member.lost_reason));
    return;
  }
  Say(Severity::kWarning, absl::StrCat(Describe(*rank_idx), " lost its session (", member.lost_reason,
                                       "); it has ", options_.reconnect_grace_us / 1000, " ms to come back"));
}

void Core::On(const SessionMessage& event) {
  const auto found = sessions_.find(event.session);
  if (found == sessions_.end()) return;
  if (const Hello* hello = std::get_if<Hello>(&event.message)) {
    OnHello(event.session, *hello);
    return;
  }
  if (!found->second.rank_idx.has_value()) {
    Refuse(event.session, absl::FailedPreconditionError("the first message of a session must be its hello"));
    return;
  }
  const int32_t rank_idx = *found->second.rank_idx;
  Member& member = members_[rank_idx];
  member.last_seen_us = now_us_;
  if (const SourceCounts* counts = std::get_if<SourceCounts>(&event.message)) {
    OnCounts(event.session, rank_idx, *counts);
  } else if (const InvocationReport* report = std::get_if<InvocationReport>(&event.message)) {
    OnReport(rank_idx, *report);
  } else if (const Heartbeat* heartbeat = std::get_if<Heartbeat>(&event.message)) {
    member.current_step = heartbeat->current_step;
  } else if (const Leaving* leaving = std::get_if<Leaving>(&event.message)) {
    OnLeaving(event.session, rank_idx, *leaving);
  } else {
    OnModel(rank_idx, std::get<ModelSpec>(event.message));
  }
}

void Core::On(const SessionInvalid& event) {
  const auto found = sessions_.find(event.session);
  if (found == sessions_.end()) return;
  const std::optional<int32_t> rank_idx = found->second.rank_idx;
  if (event.ignorable && rank_idx.has_value()) {
    Say(Severity::kWarning, absl::StrCat(Describe(*rank_idx), ": ", event.error.message(), "; ignored"));
    return;
  }
  OnViolation(event.session, rank_idx, event.error);
}

// A member that breaks the protocol takes its epoch with it: its next message cannot be trusted either.
void Core::OnViolation(SessionId session, std::optional<int32_t> rank_idx, const absl::Status& error) {
  if (rank_idx.has_value() && state_ == EpochState::kRunning) {
    AbortEpoch(absl::StrCat(Describe(*rank_idx), " sent what is not allowed: ", error.message()));
    return;
  }
  Refuse(session, error);
}

void Core::OnHello(SessionId session, const Hello& hello) {
  if (sessions_.at(session).rank_idx.has_value()) {
    OnViolation(session, sessions_.at(session).rank_idx, absl::FailedPreconditionError("a second hello"));
    return;
  }
  const bool new_job = job_.empty() || (hello.job != job_ && !AnyConnected());
  absl::Status status = CheckJob(hello);
  if (status.ok() && !new_job) status = CheckRank(hello);
  if (!status.ok()) {
    Say(Severity::kWarning, absl::StrCat("refused rank ", hello.rank_idx, " (node ", hello.node, ") of job ",
                                         hello.job, ": ", status.message()));
    Refuse(session, status);
    return;
  }
  if (new_job) StartWaiting(hello);
  Member& member = members_[hello.rank_idx];
  if (member.session.has_value()) {  // it came back before its old stream was seen to end
    Refuse(*std::exchange(member.session, std::nullopt),
           absl::AbortedError("the rank came back on a new session"));
  }
  member.hello = hello;
  member.state = MemberState::kConnected;
  member.session = session;
  member.last_seen_us = now_us_;
  sessions_.at(session).rank_idx = hello.rank_idx;
  if (state_ == EpochState::kRunning) {
    Say(Severity::kInfo, absl::StrCat(Describe(hello.rank_idx), " is back"));
    SendTo({session}, Welcome{epoch_, newest_policy()});
    if (!draining_.empty()) SendTo({session}, Drain{draining_});
    return;
  }
  const bool complete = std::all_of(members_.begin(), members_.end(),
                                    [](const Member& each) { return each.state == MemberState::kConnected; });
  if (complete) BeginEpoch();
}

// Whether the job may have this controller, and whether it has the right size.
absl::Status Core::CheckJob(const Hello& hello) const {
  if (options_.ranks > 0 && hello.world_size != options_.ranks)
    return absl::InvalidArgumentError(absl::StrCat("world_size is ", hello.world_size,
                                                   "; allowed: ", options_.ranks,
                                                   ", the ranks this controller was started for"));
  if (hello.world_size > options_.max_ranks)
    return absl::InvalidArgumentError(
        absl::StrCat("world_size is ", hello.world_size, "; allowed: 1..", options_.max_ranks));
  if (job_.empty()) return absl::OkStatus();
  if (hello.job != job_) {
    if (!AnyConnected()) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat("job ", job_, " has this controller (", Name(state_),
                                                      ", ", NumRanks(members_.size()), "); job ", hello.job,
                                                      " can start when it has ended"));
  }
  if (state_ == EpochState::kAborted || state_ == EpochState::kEnded)
    return absl::FailedPreconditionError(absl::StrCat("job ", job_, " is over: ", reason_));
  if (hello.world_size != static_cast<int32_t>(members_.size()))
    return absl::InvalidArgumentError(absl::StrCat("world_size is ", hello.world_size, " on rank ",
                                                   hello.rank_idx, "; other ranks of job ", job_, " said ",
                                                   members_.size()));
  return CheckMemoryModel(hello);
}

// One memory model plans for all ranks.
absl::Status Core::CheckMemoryModel(const Hello& hello) const {
  const auto activations = [](const Hello& of) { return of.recompute_activation ? "recompute" : "save"; };
  const auto optimizer = [](const Hello& of) { return of.optimizer_on_device ? "device" : "host"; };
  const auto packed = [](const Hello& of) {
    constexpr const char* kTypes[2][2] = {{"none", "fp32"}, {"bf16", "bf16 and fp32"}};
    return kTypes[of.packs_bf16_weights][of.packs_fp32_weights];
  };
  for (const Member& member : members_) {
    if (member.state == MemberState::kAbsent) continue;
    const auto differs = [&](const char* field, const char* value, const char* allowed) {
      return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, " on rank ", hello.rank_idx,
                                                     "; allowed: ", allowed, ", as rank ",
                                                     member.hello.rank_idx, " of job ", job_, " said"));
    };
    if (member.hello.recompute_activation != hello.recompute_activation)
      return differs("activation_memory", activations(hello), activations(member.hello));
    if (member.hello.optimizer_on_device != hello.optimizer_on_device)
      return differs("optimizer_state", optimizer(hello), optimizer(member.hello));
    if (packed(member.hello) != packed(hello))
      return differs("types of packed_weights", packed(hello), packed(member.hello));
  }
  return absl::OkStatus();
}

absl::Status Core::CheckRank(const Hello& hello) const {
  const Member& member = members_[hello.rank_idx];
  if (state_ == EpochState::kWaiting) {
    if (member.state == MemberState::kAbsent) return absl::OkStatus();
    return absl::AlreadyExistsError(absl::StrCat(Describe(hello.rank_idx), " of job ", job_,
                                                 " is connected already; there is a second one on node ",
                                                 hello.node));
  }
  if (member.state == MemberState::kLeft)
    return absl::FailedPreconditionError(
        absl::StrCat(Describe(hello.rank_idx), " has left epoch ", static_cast<uint64_t>(epoch_)));
  // One that never heard its Welcome does not know its epoch yet.
  const bool unheard = hello.epoch == Epoch{0} && !member.sent_counts;
  if (hello.epoch == Epoch{0} && member.state == MemberState::kConnected)
    return absl::AlreadyExistsError(absl::StrCat(Describe(hello.rank_idx), " of job ", job_,
                                                 " is connected already; there is a second one on node ",
                                                 hello.node));
  if (hello.epoch != epoch_ && !unheard)
    return absl::FailedPreconditionError(absl::StrCat(
        "epoch is ", static_cast<uint64_t>(hello.epoch), "; allowed: ", static_cast<uint64_t>(epoch_),
        ", the running one (a worker that was restarted needs a new job)"));
  if (hello.node != member.hello.node)
    return absl::FailedPreconditionError(absl::StrCat("node is ", hello.node,
                                                      "; allowed: ", member.hello.node, ", where rank ",
                                                      hello.rank_idx, " of this epoch runs"));
  return absl::OkStatus();
}

void Core::StartWaiting(const Hello& hello) {
  if (state_ == EpochState::kRunning)
    AbortEpoch(absl::StrCat("every rank was lost; job ", hello.job, " took its place"));
  job_ = hello.job;
  state_ = EpochState::kWaiting;
  reason_.clear();
  members_.assign(hello.world_size, Member{});
  model_.reset();
  waiting_since_us_ = now_us_;
  named_absent_ = false;
  draining_.clear();
  Say(Severity::kInfo, absl::StrCat("job ", job_, " is gathering its ", NumRanks(hello.world_size)));
}

void Core::BeginEpoch() {
  // Ranks that all resume one epoch have outlived a controller; they keep its number.
  Epoch lowest = members_.front().hello.epoch, highest = lowest;
  for (const Member& member : members_) {
    lowest = std::min(lowest, member.hello.epoch);
    highest = std::max(highest, member.hello.epoch);
  }
  const auto after = [](Epoch epoch) { return Epoch{static_cast<uint64_t>(epoch) + 1}; };
  const bool resumed = lowest == highest && lowest != Epoch{0};
  epoch_ = resumed ? lowest : std::max(next_epoch_, highest == Epoch{0} ? highest : after(highest));
  next_epoch_ = std::max(next_epoch_, after(epoch_));
  state_ = EpochState::kRunning;
  policies_ = {{newest_policy(), 0}};
  DropPlanning();
  Say(Severity::kInfo, absl::StrCat("epoch ", static_cast<uint64_t>(epoch_), resumed ? " resumes" : " begins",
                                    " with ", NumRanks(members_.size()), " of job ", job_));
  SendToAll(Welcome{epoch_, newest_policy()});
  for (size_t rank = 0; rank < members_.size() && state_ == EpochState::kRunning; ++rank)
    if (members_[rank].model.has_value()) AdoptModel(static_cast<int32_t>(rank));
}

void Core::OnLeaving(SessionId session, int32_t rank_idx, const Leaving& leaving) {
  if (leaving.failed) {
    AbortEpoch(absl::StrCat(Describe(rank_idx), " failed: ", leaving.reason));
    return;
  }
  Member& member = members_[rank_idx];
  member.session.reset();
  member.state = MemberState::kLeft;
  Say(Severity::kInfo,
      absl::StrCat(Describe(rank_idx), " left", leaving.reason.empty() ? "" : ": ", leaving.reason));
  Refuse(session, absl::OkStatus());
  if (state_ == EpochState::kWaiting) {
    member = Member{};
    return;
  }
  const bool all_left = std::all_of(members_.begin(), members_.end(),
                                    [](const Member& each) { return each.state == MemberState::kLeft; });
  if (all_left) {
    state_ = EpochState::kEnded;
    reason_ = "all ranks left";
    DropPlanning();
    Say(Severity::kInfo, absl::StrCat("epoch ", static_cast<uint64_t>(epoch_), " ended: ", reason_));
    return;
  }
  AbortIfWaitingForLeft();
}

void Core::OnModel(int32_t rank_idx, const ModelSpec& model) {
  members_[rank_idx].model = model;
  if (state_ == EpochState::kRunning) AdoptModel(rank_idx);
}

absl::Status Core::CheckModel(const ModelSpec& model) const {
  if (model.num_layers > options_.max_layers)
    return absl::InvalidArgumentError(
        absl::StrCat("num_layers is ", model.num_layers, "; allowed: 1..", options_.max_layers));
  if (model.shape.num_experts > options_.max_experts)
    return absl::InvalidArgumentError(
        absl::StrCat("num_experts is ", model.shape.num_experts, "; allowed: 1..", options_.max_experts));
  return absl::OkStatus();
}

void Core::AdoptModel(int32_t rank_idx) {
  const ModelSpec& model = *members_[rank_idx].model;
  if (model_.has_value()) {
    if (*model_ == model) return;
    const auto text = [](const ModelSpec& spec) {
      return absl::StrCat(spec.num_layers, " layers, ", spec.shape.num_experts, " experts, top ",
                          spec.shape.top_k, ", hidden ", spec.shape.hidden_size, ", intermediate ",
                          spec.shape.intermediate_size, ", ", std::string(Name(spec.shape.dtype)), ", ",
                          std::string(Name(spec.shape.activation)),
                          spec.shape.gated ? ", gated" : ", not gated");
    };
    AbortEpoch(absl::StrCat("models differ: ", Describe(rank_idx), " has ", text(model), "; ",
                            Describe(model_rank_idx_), " has ", text(*model_)));
    return;
  }
  const absl::Status status = CheckModel(model);
  if (!status.ok()) {
    AbortEpoch(absl::StrCat("the model of ", Describe(rank_idx), " is refused: ", status.message()));
    return;
  }
  model_ = model;
  model_rank_idx_ = rank_idx;
  rendezvous_.emplace(static_cast<int32_t>(members_.size()), model.shape.num_experts, model.num_layers,
                      Rendezvous::Limits{options_.max_queued_invocations, options_.max_plans_kept,
                                         options_.max_plan_bytes_kept});
}

// Closes the stream with `status` and forgets it.
void Core::Refuse(SessionId session, const absl::Status& status) {
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return;
  if (found->second.rank_idx.has_value()) {
    Member& member = members_[*found->second.rank_idx];
    if (member.session == session) {
      member.session.reset();
      if (state_ == EpochState::kWaiting) {
        member = Member{};
      } else if (member.state == MemberState::kConnected) {
        member.state = MemberState::kDisconnected;
        member.lost_us = now_us_;
        member.lost_reason = std::string(status.message());
      }
    }
  }
  sessions_.erase(found);
  actions_.push_back(CloseSession{session, status});
}

bool Core::AnyConnected() const {
  return std::any_of(members_.begin(), members_.end(),
                     [](const Member& member) { return member.session.has_value(); });
}

void Core::AbortEpoch(const std::string& reason) {
  Say(Severity::kError, epoch_ == Epoch{0} || state_ == EpochState::kWaiting
                            ? absl::StrCat("job ", job_, " aborted before its epoch began: ", reason)
                            : absl::StrCat("epoch ", static_cast<uint64_t>(epoch_), " aborted: ", reason));
  SendToAll(Abort{reason});
  state_ = EpochState::kAborted;
  reason_ = reason;
  DropPlanning();
  for (Member& member : members_)
    if (member.session.has_value()) Refuse(*member.session, absl::AbortedError(reason));
}

void Core::DropPlanning() {
  rendezvous_.reset();
  planning_.clear();
  ready_.clear();
  resident_.clear();
}

std::string Core::Describe(int32_t rank_idx) const {
  return absl::StrCat("rank ", rank_idx, " (node ", members_[rank_idx].hello.node, ")");
}

}  // namespace lrmoe::core
