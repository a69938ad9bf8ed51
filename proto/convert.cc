#include "proto/convert.h"

#include <set>
#include <string>
#include <utility>

#include "common/status_macros.h"
#include "proto/range.h"

namespace lrmoe {
namespace {

using wire::InRange;
using wire::Measured;

constexpr int64_t kMaxRows = int64_t{1} << 50;  // kMaxCount pairs on each of kMaxRanks ranks
constexpr int64_t kMaxBytes = int64_t{1} << 62;

void PhasesToWire(const InvocationReport::Phases& phases, v1::PhaseTimes* wire) {
  wire->set_plan(phases.plan_ms);
  wire->set_weights(phases.weights_ms);
  wire->set_dispatch(phases.dispatch_ms);
  wire->set_compute(phases.compute_ms);
  wire->set_return_(phases.return_ms);
  wire->set_score(phases.score_ms);
  wire->set_select(phases.select_ms);
  wire->set_pack(phases.pack_ms);
  wire->set_gradients(phases.gradients_ms);
  wire->set_total(phases.total_ms);
  wire->set_cpu(phases.cpu_ms);
}

absl::Status PhasesFromWire(const v1::PhaseTimes& wire, InvocationReport::Phases& phases) {
  const struct {
    absl::string_view name;
    double value;
    double* out;
  } fields[] = {
      {"plan", wire.plan(), &phases.plan_ms},
      {"weights", wire.weights(), &phases.weights_ms},
      {"dispatch", wire.dispatch(), &phases.dispatch_ms},
      {"compute", wire.compute(), &phases.compute_ms},
      {"return", wire.return_(), &phases.return_ms},
      {"score", wire.score(), &phases.score_ms},
      {"select", wire.select(), &phases.select_ms},
      {"pack", wire.pack(), &phases.pack_ms},
      {"gradients", wire.gradients(), &phases.gradients_ms},
      {"total", wire.total(), &phases.total_ms},
      {"cpu", wire.cpu(), &phases.cpu_ms},
  };
  for (const auto& field : fields) {
    LRMOE_RETURN_IF_ERROR(Measured(field.name, field.value));
    *field.out = field.value;
  }
  return absl::OkStatus();
}

v1::DataType WireType(DataType type) {
  return type == DataType::kBf16 ? v1::DATA_TYPE_BF16 : v1::DATA_TYPE_FP32;
}

v1::Activation WireActivation(Activation activation) {
  return activation == Activation::kSilu ? v1::ACTIVATION_SILU : v1::ACTIVATION_GELU;
}

}  // namespace

void ToWire(const Invocation& invocation, v1::Invocation* wire) {
  wire->set_step(invocation.step);
  wire->set_layer(invocation.layer);
  wire->set_micro_batch(invocation.micro_batch);
}

absl::StatusOr<Invocation> FromWire(const v1::Invocation& wire) {
  LRMOE_RETURN_IF_ERROR(InRange("invocation.step", wire.step(), 0, kMaxStep));
  LRMOE_RETURN_IF_ERROR(InRange("invocation.layer", wire.layer(), 0, kMaxLayers - 1));
  LRMOE_RETURN_IF_ERROR(InRange("invocation.micro_batch", wire.micro_batch(), 0, kMaxMicroBatches - 1));
  return Invocation{wire.step(), wire.layer(), wire.micro_batch()};
}

void ToWire(const ModelSpec& model, v1::ModelSpec* wire) {
  wire->set_num_layers(model.num_layers);
  wire->set_num_experts(model.shape.num_experts);
  wire->set_top_k(model.shape.top_k);
  wire->set_hidden_size(model.shape.hidden_size);
  wire->set_intermediate_size(model.shape.intermediate_size);
  wire->set_gated(model.shape.gated);
  wire->set_activation(WireActivation(model.shape.activation));
  wire->set_dtype(WireType(model.shape.dtype));
}

absl::StatusOr<ModelSpec> FromWire(const v1::ModelSpec& wire) {
  ModelSpec model;
  model.num_layers = wire.num_layers();
  model.shape.num_experts = wire.num_experts();
  model.shape.top_k = wire.top_k();
  model.shape.hidden_size = wire.hidden_size();
  model.shape.intermediate_size = wire.intermediate_size();
  model.shape.gated = wire.gated();
  switch (wire.activation()) {
    case v1::ACTIVATION_SILU:
      model.shape.activation = Activation::kSilu;
      break;
    case v1::ACTIVATION_GELU:
      model.shape.activation = Activation::kGelu;
      break;
    default:
      return wire::Bad("model.activation", absl::StrCat(wire.activation()), "1 (silu), 2 (gelu)");
  }
  switch (wire.dtype()) {
    case v1::DATA_TYPE_BF16:
      model.shape.dtype = DataType::kBf16;
      break;
    case v1::DATA_TYPE_FP32:
      model.shape.dtype = DataType::kFp32;
      break;
    default:
      return wire::Bad("model.dtype", absl::StrCat(wire.dtype()), "1 (bf16), 2 (fp32)");
  }
  LRMOE_RETURN_IF_ERROR(wire::Within("model", Validate(model)));
  return model;
}

void ToWire(const Policy& policy, v1::PolicySettings* wire) {
  for (const auto& [name, value] : PolicyFields(policy)) {
    v1::PolicySettings::Field* field = wire->add_fields();
    field->set_name(name);
    field->set_value(value);
  }
}

absl::StatusOr<Policy> FromWire(const v1::PolicySettings& wire) {
  return ApplyWire(Policy{}, wire);
}

absl::StatusOr<Policy> ApplyWire(const Policy& base, const v1::PolicySettings& wire) {
  Policy policy = base;
  std::set<std::string> seen;
  LRMOE_RETURN_IF_ERROR(InRange("policy.fields", wire.fields_size(), 0, 64));
  for (const v1::PolicySettings::Field& field : wire.fields()) {
    LRMOE_RETURN_IF_ERROR(wire::Text("policy field name", field.name(), 1, 64));
    LRMOE_RETURN_IF_ERROR(wire::Text(field.name(), field.value(), 0, 32768));
    if (!seen.insert(field.name()).second) return wire::Bad(field.name(), "given twice", "once");
    LRMOE_RETURN_IF_ERROR(SetPolicyField(policy, field.name(), field.value()));
  }
  return policy;
}

void ToWire(const InvocationReport& report, v1::InvocationReport* wire) {
  ToWire(report.invocation, wire->mutable_invocation());
  PhasesToWire(report.forward, wire->mutable_forward_ms());
  PhasesToWire(report.backward, wire->mutable_backward_ms());
  wire->set_routed_rows(report.routed_rows);
  wire->set_kept_rows(report.kept_rows);
  wire->set_forward_rows(report.forward_rows);
  wire->set_backward_rows(report.backward_rows);
  wire->set_moved_rows(report.moved_rows);
  wire->set_dispatch_bytes(report.dispatch_bytes);
  wire->set_return_bytes(report.return_bytes);
  wire->set_scalar_bytes(report.scalar_bytes);
  wire->set_peak_bytes(report.peak_bytes);
  wire->set_predicted_bytes(report.predicted_bytes);
  wire->set_kept_score(report.kept_score);
  wire->set_total_score(report.total_score);
}

absl::StatusOr<InvocationReport> FromWire(const v1::InvocationReport& wire) {
  InvocationReport report;
  LRMOE_ASSIGN_OR_RETURN(report.invocation, FromWire(wire.invocation()));
  LRMOE_RETURN_IF_ERROR(wire::Within("report.forward_ms", PhasesFromWire(wire.forward_ms(), report.forward)));
  LRMOE_RETURN_IF_ERROR(
      wire::Within("report.backward_ms", PhasesFromWire(wire.backward_ms(), report.backward)));
  const struct {
    absl::string_view name;
    int64_t value;
    int64_t limit;
    int64_t* out;
  } fields[] = {
      {"report.routed_rows", wire.routed_rows(), kMaxRows, &report.routed_rows},
      {"report.kept_rows", wire.kept_rows(), wire.routed_rows(), &report.kept_rows},
      {"report.forward_rows", wire.forward_rows(), kMaxRows, &report.forward_rows},
      {"report.backward_rows", wire.backward_rows(), kMaxRows, &report.backward_rows},
      {"report.moved_rows", wire.moved_rows(), kMaxRows, &report.moved_rows},
      {"report.dispatch_bytes", wire.dispatch_bytes(), kMaxBytes, &report.dispatch_bytes},
      {"report.return_bytes", wire.return_bytes(), kMaxBytes, &report.return_bytes},
      {"report.scalar_bytes", wire.scalar_bytes(), kMaxBytes, &report.scalar_bytes},
      {"report.peak_bytes", wire.peak_bytes(), kMaxBytes, &report.peak_bytes},
      {"report.predicted_bytes", wire.predicted_bytes(), INT64_MAX, &report.predicted_bytes},
  };
  for (const auto& field : fields) {
    LRMOE_RETURN_IF_ERROR(InRange(field.name, field.value, 0, field.limit));
    *field.out = field.value;
  }
  LRMOE_RETURN_IF_ERROR(Measured("report.kept_score", wire.kept_score()));
  LRMOE_RETURN_IF_ERROR(Measured("report.total_score", wire.total_score()));
  report.kept_score = wire.kept_score();
  report.total_score = wire.total_score();
  return report;
}

}  // namespace lrmoe
