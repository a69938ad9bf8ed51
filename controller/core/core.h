// The controller's brain: sessions, epochs, rendezvous of counts, plans and policy. A pure state machine: an
// event and the time go in, actions come out; equal inputs give equal actions.
//
// One epoch at a time. It waits until every rank of one job has said hello, runs, and ends when all ranks
// have left or is aborted when one is lost or fails. While it waits or runs with a rank connected, another
// job's hello is refused.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "controller/core/events.h"
#include "controller/core/options.h"
#include "controller/core/rendezvous.h"

namespace lrmoe::core {

enum class EpochState : uint8_t { kWaiting, kRunning, kEnded, kAborted };
absl::string_view Name(EpochState state);  // "waiting", "running", "ended", "aborted"

enum class MemberState : uint8_t { kAbsent, kConnected, kDisconnected, kLeft };
absl::string_view Name(MemberState state);  // "absent", "connected", "disconnected", "left"

// What is known of one rank of the current epoch.
struct Member {
  MemberState state = MemberState::kAbsent;
  Hello hello;                       // valid unless absent; of a restored epoch's ranks always
  std::optional<SessionId> session;  // while connected
  bool sent_counts = false;          // so it has had its Welcome
  std::optional<ModelSpec> model;
  int64_t last_seen_us = 0;
  int64_t lost_us = 0;  // while disconnected
  std::string lost_reason;
  int64_t current_step = 0;
  int64_t peak_bytes = 0;  // largest reported
};

// What outlives the controller of an epoch: enough to show it, to plan for its cluster and to number the
// next.
struct EpochRecord {
  Epoch epoch{0};  // 0: none has begun
  EpochState state = EpochState::kWaiting;
  std::string reason;         // why it ended or was aborted
  std::vector<Hello> hellos;  // [G]
  std::optional<ModelSpec> model;
  bool operator==(const EpochRecord&) const = default;
};

// One thread calls everything here.
class Core {
 public:
  // `options` are valid. `first_epoch` numbers the first epoch, from 1.
  explicit Core(const CoreOptions& options, Epoch first_epoch = Epoch{1});

  // Once, before the first step: what an earlier controller left. Its epoch is shown as the last one until a
  // job comes; ranks that outlived it resume it. `next_epoch` is above every number that was used.
  void Restore(const EpochRecord& last, Epoch next_epoch, int64_t current_step);

  // Time is of any monotonic clock, in microseconds, and never goes back.
  std::vector<Action> Step(const Event& event, int64_t now_us);
  // When the next Tick is due if nothing else happens; INT64_MAX: never.
  int64_t NextTick() const;

  EpochState state() const { return state_; }
  Epoch epoch() const { return epoch_; }                 // current or last; 0: none has begun
  const std::string& reason() const { return reason_; }  // why it ended or was aborted
  // Of the current or last epoch, by rank; empty before the first hello.
  const std::vector<Member>& members() const { return members_; }
  int32_t ranks_expected() const;
  const std::optional<ModelSpec>& model() const { return model_; }
  int64_t current_step() const;
  // Not connected, or late with counts that others have waited for longer than the limit. Ascending.
  std::vector<int32_t> MissingRanks(int64_t now_us);
  // In force from the newest announced change on.
  const Policy& newest_policy() const { return policies_.back().policy; }
  // Of the current epoch, once it has begun.
  EpochRecord epoch_record() const;

 private:
  struct Session {
    int64_t opened_us = 0;
    std::optional<int32_t> rank_idx;  // once it said hello
  };
  struct PlanJob {
    Rendezvous::Ready ready;
    Policy policy;
  };

  // sessions.cc: who is here.
  void On(const SessionOpened& event);
  void On(const SessionClosed& event);
  void On(const SessionMessage& event);
  void On(const SessionInvalid& event);
  void OnHello(SessionId session, const Hello& hello);
  absl::Status CheckJob(const Hello& hello) const;
  absl::Status CheckMemoryModel(const Hello& hello) const;
  absl::Status CheckRank(const Hello& hello) const;
  void StartWaiting(const Hello& hello);
  void BeginEpoch();
  void OnLeaving(SessionId session, int32_t rank_idx, const Leaving& leaving);
  void OnModel(int32_t rank_idx, const ModelSpec& model);
  void AdoptModel(int32_t rank_idx);
  absl::Status CheckModel(const ModelSpec& model) const;
  void OnViolation(SessionId session, std::optional<int32_t> rank_idx, const absl::Status& error);
  void Refuse(SessionId session, const absl::Status& status);
  bool AnyConnected() const;
  void AbortEpoch(const std::string& reason);
  void DropPlanning();
  std::string Describe(int32_t rank_idx) const;  // "rank 3 (node n1)"

  // core.cc: the rest.
  void On(const SetPolicy& event);
  void On(const DrainRequested& event);
  void On(const Stop& event);
  void On(const Tick& event);
  void NameMissing();
  const Policy& PolicyOf(int64_t step) const;

  // planning.cc: counts in, plans out.
  void On(const PlanFinished& event);
  void OnCounts(SessionId session, int32_t rank_idx, const SourceCounts& counts);
  void OnReport(int32_t rank_idx, const InvocationReport& report);
  void Carry(Rendezvous::Outcome outcome);
  void StartReadyPlans();
  void AbortIfWaitingForLeft();

  void SendTo(std::vector<SessionId> sessions, ControllerMessage message);
  void SendToAll(const ControllerMessage& message);
  void Say(Severity severity, std::string text);

  const CoreOptions options_;
  int64_t now_us_ = 0;
  std::vector<Action> actions_;  // of the event in hand

  std::map<SessionId, Session> sessions_;
  EpochState state_ = EpochState::kWaiting;
  Epoch epoch_{0};
  Epoch next_epoch_;
  std::string job_;  // empty: no job yet
  std::string reason_;
  std::vector<Member> members_;
  std::optional<ModelSpec> model_;
  int32_t model_rank_idx_ = 0;  // who said it first
  int64_t waiting_since_us_ = 0;
  bool named_absent_ = false;
  std::string draining_;  // reason; empty: no
  std::string stopping_;

  std::vector<PolicyChange>
      policies_;  // by from_step, strictly ascending, the first in force from step 0 or passed
  std::optional<Rendezvous> rendezvous_;  // once the model is known
  std::map<int32_t, PlanJob>
      planning_;  // by layer: one at a time, so that placement is the same in every run
  std::deque<Rendezvous::Ready> ready_;                            // complete, their layer being planned
  std::map<int32_t, std::vector<std::vector<int32_t>>> resident_;  // by layer, [G] experts held as replicas
};

}  // namespace lrmoe::core
