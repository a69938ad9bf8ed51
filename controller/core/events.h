// What goes into the core and what comes out of it. Values only; the shell turns actions into I/O.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/ids.h"
#include "common/session.h"
#include "controller/planner/problem.h"

namespace lrmoe::core {

// One stream of a worker, numbered by the shell from 1; never reused.
enum class SessionId : uint64_t {};

// Which planning job a result belongs to. The ticket tells a job from an earlier one of the same invocation
// (which failed and was tried again, or was made before the ranks went back to a checkpoint).
struct PlanTag {
  Epoch epoch{0};
  uint64_t ticket = 0;
  Invocation invocation;
  auto operator<=>(const PlanTag&) const = default;
};

// ---- events

struct SessionOpened {
  SessionId session;
};
// The stream ended, whatever the reason; nothing more comes from it.
struct SessionClosed {
  SessionId session;
  std::string reason;
};
struct SessionMessage {
  SessionId session;
  WorkerMessage message;
};
// The stream carried something that did not pass validation. Ignorable when nothing but a measurement is
// lost.
struct SessionInvalid {
  SessionId session;
  absl::Status error;
  bool ignorable = false;
};
struct PlanFinished {
  PlanTag tag;
  absl::StatusOr<LayerPlan> plan;
  double plan_us = 0;  // measured around the planner
};
// Changes the named policy fields (names and texts of SetPolicyField), all or none.
struct SetPolicy {
  std::vector<std::pair<std::string, std::string>> fields;
};
struct DrainRequested {
  std::string reason;
};
// The controller ends: every session is told and closed.
struct Stop {
  std::string reason;
};
struct Tick {};

using Event = std::variant<SessionOpened, SessionClosed, SessionMessage, SessionInvalid, PlanFinished,
                           SetPolicy, DrainRequested, Stop, Tick>;

// ---- actions, to be carried out in order

// The same message to each session.
struct Send {
  std::vector<SessionId> sessions;
  std::shared_ptr<const ControllerMessage> message;
};
// Ends the stream with `status` after what was sent before it. The core has forgotten the session.
struct CloseSession {
  SessionId session;
  absl::Status status;
};
struct StartPlan {
  PlanTag tag;
  planner::PlanningProblem problem;
};
// A plan was made and sent: for history and watchers.
struct RecordPlan {
  std::shared_ptr<const ExecutionPlan> plan;
  Epoch epoch{0};
  int64_t routed_rows = 0;
};
// No plan: `status` went to every rank.
struct RecordFailure {
  Invocation invocation;
  absl::Status status;
};
struct RecordReport {
  int32_t rank_idx = 0;
  InvocationReport report;
};
// Outcome of SetPolicy; exactly one per event.
struct PolicyOutcome {
  absl::StatusOr<PolicyChange> change;
};
enum class Severity : uint8_t { kInfo, kWarning, kError };
struct Log {
  Severity severity = Severity::kInfo;
  std::string text;
};

using Action =
    std::variant<Send, CloseSession, StartPlan, RecordPlan, RecordFailure, RecordReport, PolicyOutcome, Log>;

}  // namespace lrmoe::core
