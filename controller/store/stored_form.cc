#include "controller/store/stored_form.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "proto/convert.h"

namespace lrmoe::store {
namespace {

template <typename Wire, typename Value>
std::string Serialize(const Value& value) {
  Wire wire;
  ToWire(value, &wire);
  return wire.SerializeAsString();
}

template <typename Wire>
auto Parse(absl::string_view what, absl::string_view bytes) -> decltype(FromWire(Wire())) {
  Wire wire;
  if (!wire.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())))
    return absl::DataLossError(absl::StrCat(what, " cannot be read"));
  auto value = FromWire(wire);
  if (!value.ok())
    return absl::DataLossError(absl::StrCat(what, " is not valid: ", value.status().message()));
  return value;
}

}  // namespace

std::string ToBytes(const ExecutionPlan& plan) {
  return Serialize<v1::ExecutionPlan>(plan);
}
std::string ToBytes(const InvocationReport& report) {
  return Serialize<v1::InvocationReport>(report);
}
std::string ToBytes(const Hello& hello) {
  return Serialize<v1::WorkerMessage>(WorkerMessage(hello));
}
std::string ToBytes(const ModelSpec& model) {
  return Serialize<v1::ModelSpec>(model);
}

absl::StatusOr<ExecutionPlan> PlanOf(absl::string_view bytes) {
  return Parse<v1::ExecutionPlan>("a plan", bytes);
}
absl::StatusOr<InvocationReport> ReportOf(absl::string_view bytes) {
  return Parse<v1::InvocationReport>("a report", bytes);
}
absl::StatusOr<Hello> HelloOf(absl::string_view bytes) {
  LRMOE_ASSIGN_OR_RETURN(WorkerMessage message, Parse<v1::WorkerMessage>("a hello", bytes));
  if (Hello* hello = std::get_if<Hello>(&message)) return std::move(*hello);
  return absl::DataLossError("a hello is another message");
}
absl::StatusOr<ModelSpec> ModelOf(absl::string_view bytes) {
  return Parse<v1::ModelSpec>("a model", bytes);
}

}  // namespace lrmoe::store
