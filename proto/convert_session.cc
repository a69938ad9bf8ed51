// The messages of the controller session.
#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>

#include "common/status_macros.h"
#include "proto/convert.h"
#include "proto/range.h"

namespace lrmoe {
namespace {

using wire::InRange;
using wire::Measured;
using wire::Within;

constexpr size_t kMaxReason = 4096;  // bytes of a reason that a person reads; longer ones are cut by ToWire

// Length of the UTF-8 sequence that starts at `at`, 0 when it is none (proto3 strings must be UTF-8).
size_t SequenceLength(const std::string& text, size_t at) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const unsigned first = byte(at);
  if (first < 0x80) return 1;
  const size_t length = first >= 0xC2 && first < 0xE0   ? 2
                        : first >= 0xE0 && first < 0xF0 ? 3
                        : first >= 0xF0 && first < 0xF5 ? 4
                                                        : 0;
  for (size_t i = 1; i < length; ++i)
    if ((byte(at + i) & 0xC0) != 0x80) return 0;
  const unsigned second = byte(at + 1);
  const bool overlong = (first == 0xE0 && second < 0xA0) || (first == 0xF0 && second < 0x90);
  const bool beyond = (first == 0xED && second >= 0xA0) || (first == 0xF4 && second >= 0x90);
  return overlong || beyond ? 0 : length;
}

// What a person will read, made fit to travel: at most kMaxReason bytes of valid UTF-8. A bad text must not
// make the message that carries it unreadable.
std::string Cut(const std::string& reason) {
  std::string out;
  for (size_t at = 0; at < reason.size();) {
    const size_t length = SequenceLength(reason, at);
    if (out.size() + std::max<size_t>(length, 1) > kMaxReason) break;
    if (length == 0) {
      out += '?';
    } else {
      out.append(reason, at, length);
    }
    at += std::max<size_t>(length, 1);
  }
  return out;
}

void HelloToWire(const Hello& hello, v1::Hello* wire) {
  wire->set_protocol_version(kProtocolVersion);
  wire->set_rank(hello.rank_idx);
  wire->set_world_size(hello.world_size);
  wire->set_job(hello.job);
  wire->set_node(hello.node);
  wire->set_device(hello.device);
  wire->set_memory_budget_bytes(hello.memory_budget_bytes);
  wire->set_replica_slots(hello.replica_slots);
  wire->set_rows_per_ms(hello.rows_per_ms);
  wire->set_intra_node_gb_per_s(hello.intra_node_gb_per_s);
  wire->set_inter_node_gb_per_s(hello.inter_node_gb_per_s);
  wire->set_epoch(static_cast<uint64_t>(hello.epoch));
  wire->set_version(hello.version);
  wire->set_recompute_activation(hello.recompute_activation);
  wire->set_packs_bf16_weights(hello.packs_bf16_weights);
  wire->set_packs_fp32_weights(hello.packs_fp32_weights);
  wire->set_optimizer_on_device(hello.optimizer_on_device);
}

absl::StatusOr<Hello> HelloFromWire(const v1::Hello& wire) {
  LRMOE_RETURN_IF_ERROR(
      InRange("protocol_version", wire.protocol_version(), kProtocolVersion, kProtocolVersion));
  LRMOE_RETURN_IF_ERROR(InRange("world_size", wire.world_size(), 1, kMaxRanks));
  LRMOE_RETURN_IF_ERROR(InRange("rank", wire.rank(), 0, wire.world_size() - 1));
  LRMOE_RETURN_IF_ERROR(wire::Text("job", wire.job(), 1, 128));
  LRMOE_RETURN_IF_ERROR(wire::Text("node", wire.node(), 1, 256));
  LRMOE_RETURN_IF_ERROR(wire::Text("device", wire.device(), 0, 256));
  LRMOE_RETURN_IF_ERROR(wire::Text("version", wire.version(), 0, 64));
  LRMOE_RETURN_IF_ERROR(InRange("memory_budget_bytes", wire.memory_budget_bytes(), 0, INT64_MAX));
  LRMOE_RETURN_IF_ERROR(InRange("replica_slots", wire.replica_slots(), 0, kMaxExperts));
  LRMOE_RETURN_IF_ERROR(Measured("rows_per_ms", wire.rows_per_ms()));
  LRMOE_RETURN_IF_ERROR(Measured("intra_node_gb_per_s", wire.intra_node_gb_per_s()));
  LRMOE_RETURN_IF_ERROR(Measured("inter_node_gb_per_s", wire.inter_node_gb_per_s()));
  return Hello{wire.rank(),
               wire.world_size(),
               wire.job(),
               wire.node(),
               wire.device(),
               wire.memory_budget_bytes(),
               wire.replica_slots(),
               wire.rows_per_ms(),
               wire.intra_node_gb_per_s(),
               wire.inter_node_gb_per_s(),
               Epoch{wire.epoch()},
               wire.version(),
               wire.recompute_activation(),
               wire.packs_bf16_weights(),
               wire.packs_fp32_weights(),
               wire.optimizer_on_device()};
}

absl::StatusOr<SourceCounts> CountsFromWire(const v1::Counts& wire) {
  SourceCounts counts;
  LRMOE_ASSIGN_OR_RETURN(counts.invocation, FromWire(wire.invocation()));
  LRMOE_RETURN_IF_ERROR(InRange("number of counts", wire.counts_size(), 1, kMaxExperts));
  for (int expert = 0; expert < wire.counts_size(); ++expert)
    LRMOE_RETURN_IF_ERROR(InRange("counts", expert, wire.counts(expert), 0, kMaxCount));
  counts.counts.assign(wire.counts().begin(), wire.counts().end());
  return counts;
}

// StatusOr<T> -> StatusOr<Message>, with the message's name before the field an error names.
template <typename Message, typename T>
absl::StatusOr<Message> Wrap(absl::string_view name, absl::StatusOr<T> value) {
  if (!value.ok()) return Within(name, value.status());
  return Message(*std::move(value));
}

absl::StatusOr<PlanError> PlanErrorFromWire(const v1::PlanError& wire) {
  LRMOE_ASSIGN_OR_RETURN(Invocation invocation, FromWire(wire.invocation()));
  LRMOE_RETURN_IF_ERROR(InRange("code", wire.code(), 1, 16));
  LRMOE_RETURN_IF_ERROR(wire::Text("message", wire.message(), 0, kMaxReason));
  return PlanError{invocation, absl::Status(static_cast<absl::StatusCode>(wire.code()), wire.message())};
}

absl::StatusOr<PolicyChange> PolicyChangeFromWire(const v1::PolicyChange& wire) {
  LRMOE_RETURN_IF_ERROR(InRange("from_step", wire.from_step(), 0, kMaxStep + 2));
  LRMOE_ASSIGN_OR_RETURN(Policy policy, FromWire(wire.policy()));
  return PolicyChange{std::move(policy), wire.from_step()};
}

absl::StatusOr<Welcome> WelcomeFromWire(const v1::Welcome& wire) {
  if (wire.epoch() == 0) return wire::Bad("epoch", "0", "1..2^64-1");
  LRMOE_ASSIGN_OR_RETURN(Policy policy, FromWire(wire.policy()));
  return Welcome{Epoch{wire.epoch()}, std::move(policy)};
}

}  // namespace

void ToWire(const WorkerMessage& message, v1::WorkerMessage* wire) {
  std::visit(
      [wire](const auto& value) {
        using T = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<T, Hello>) {
          HelloToWire(value, wire->mutable_hello());
        } else if constexpr (std::is_same_v<T, SourceCounts>) {
          ToWire(value.invocation, wire->mutable_counts()->mutable_invocation());
          wire->mutable_counts()->mutable_counts()->Add(value.counts.begin(), value.counts.end());
        } else if constexpr (std::is_same_v<T, InvocationReport>) {
          ToWire(value, wire->mutable_report());
        } else if constexpr (std::is_same_v<T, Heartbeat>) {
          wire->mutable_heartbeat()->set_current_step(value.current_step);
        } else if constexpr (std::is_same_v<T, Leaving>) {
          wire->mutable_leaving()->set_reason(Cut(value.reason));
          wire->mutable_leaving()->set_failed(value.failed);
        } else {
          static_assert(std::is_same_v<T, ModelSpec>);
          ToWire(value, wire->mutable_model());
        }
      },
      message);
}

absl::StatusOr<WorkerMessage> FromWire(const v1::WorkerMessage& wire) {
  switch (wire.message_case()) {
    case v1::WorkerMessage::kHello:
      return Wrap<WorkerMessage>("hello", HelloFromWire(wire.hello()));
    case v1::WorkerMessage::kCounts:
      return Wrap<WorkerMessage>("counts", CountsFromWire(wire.counts()));
    case v1::WorkerMessage::kReport: {
      LRMOE_ASSIGN_OR_RETURN(InvocationReport report, FromWire(wire.report()));
      return WorkerMessage(report);
    }
    case v1::WorkerMessage::kHeartbeat:
      LRMOE_RETURN_IF_ERROR(InRange("heartbeat.current_step", wire.heartbeat().current_step(), 0, kMaxStep));
      return WorkerMessage(Heartbeat{wire.heartbeat().current_step()});
    case v1::WorkerMessage::kLeaving:
      LRMOE_RETURN_IF_ERROR(wire::Text("leaving.reason", wire.leaving().reason(), 0, kMaxReason));
      return WorkerMessage(Leaving{wire.leaving().reason(), wire.leaving().failed()});
    case v1::WorkerMessage::kModel: {
      LRMOE_ASSIGN_OR_RETURN(ModelSpec model, FromWire(wire.model()));
      return WorkerMessage(model);
    }
    case v1::WorkerMessage::MESSAGE_NOT_SET:
      break;
  }
  return wire::Bad("message", "unset or unknown", "hello, counts, report, heartbeat, leaving, model");
}

void ToWire(const ControllerMessage& message, v1::ControllerMessage* wire) {
  std::visit(
      [wire](const auto& value) {
        using T = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<T, Welcome>) {
          wire->mutable_welcome()->set_epoch(static_cast<uint64_t>(value.epoch));
          ToWire(value.policy, wire->mutable_welcome()->mutable_policy());
        } else if constexpr (std::is_same_v<T, ExecutionPlan>) {
          ToWire(value, wire->mutable_plan());
        } else if constexpr (std::is_same_v<T, PolicyChange>) {
          ToWire(value.policy, wire->mutable_policy()->mutable_policy());
          wire->mutable_policy()->set_from_step(value.from_step);
        } else if constexpr (std::is_same_v<T, Abort>) {
          wire->mutable_abort()->set_reason(Cut(value.reason));
        } else if constexpr (std::is_same_v<T, Drain>) {
          wire->mutable_drain()->set_reason(Cut(value.reason));
        } else {
          static_assert(std::is_same_v<T, PlanError>);
          ToWire(value.invocation, wire->mutable_plan_error()->mutable_invocation());
          wire->mutable_plan_error()->set_code(static_cast<uint32_t>(value.status.code()));
          wire->mutable_plan_error()->set_message(Cut(std::string(value.status.message())));
        }
      },
      message);
}

absl::StatusOr<ControllerMessage> FromWire(const v1::ControllerMessage& wire) {
  switch (wire.message_case()) {
    case v1::ControllerMessage::kWelcome:
      return Wrap<ControllerMessage>("welcome", WelcomeFromWire(wire.welcome()));
    case v1::ControllerMessage::kPlan:
      return Wrap<ControllerMessage>("plan", FromWire(wire.plan()));
    case v1::ControllerMessage::kPolicy:
      return Wrap<ControllerMessage>("policy", PolicyChangeFromWire(wire.policy()));
    case v1::ControllerMessage::kAbort:
      LRMOE_RETURN_IF_ERROR(wire::Text("abort.reason", wire.abort().reason(), 0, kMaxReason));
      return ControllerMessage(Abort{wire.abort().reason()});
    case v1::ControllerMessage::kDrain:
      LRMOE_RETURN_IF_ERROR(wire::Text("drain.reason", wire.drain().reason(), 0, kMaxReason));
      return ControllerMessage(Drain{wire.drain().reason()});
    case v1::ControllerMessage::kPlanError:
      return Wrap<ControllerMessage>("plan_error", PlanErrorFromWire(wire.plan_error()));
    case v1::ControllerMessage::MESSAGE_NOT_SET:
      break;
  }
  return wire::Bad("message", "unset or unknown", "welcome, plan, policy, abort, drain, plan_error");
}

}  // namespace lrmoe
