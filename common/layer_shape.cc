#include "common/layer_shape.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace lrmoe {

int64_t SizeInBytes(DataType type) {
  return type == DataType::kBf16 ? 2 : 4;
}

absl::string_view Name(DataType type) {
  return type == DataType::kBf16 ? "bf16" : "fp32";
}

absl::string_view Name(Activation activation) {
  return activation == Activation::kSilu ? "silu" : "gelu";
}

absl::StatusOr<DataType> ParseDataType(absl::string_view name) {
  if (name == "bf16") return DataType::kBf16;
  if (name == "fp32") return DataType::kFp32;
  return absl::InvalidArgumentError(absl::StrCat("dtype is \"", name, "\"; allowed: bf16, fp32"));
}

namespace {

absl::Status CheckRange(absl::string_view field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; allowed: ", low, "..", high));
}

}  // namespace

absl::Status Validate(const LayerShape& shape) {
  LRMOE_RETURN_IF_ERROR(CheckRange("num_experts", shape.num_experts, 1, 4096));
  LRMOE_RETURN_IF_ERROR(CheckRange("top_k", shape.top_k, 1, std::min(shape.num_experts, 64)));
  LRMOE_RETURN_IF_ERROR(CheckRange("hidden_size", shape.hidden_size, 1, 65536));
  LRMOE_RETURN_IF_ERROR(CheckRange("intermediate_size", shape.intermediate_size, 1, 262144));
  if (shape.gated && shape.activation != Activation::kSilu)
    return absl::InvalidArgumentError("activation is gelu with gated experts; allowed: silu (SwiGLU)");
  return absl::OkStatus();
}

absl::Status Validate(const ModelSpec& spec) {
  LRMOE_RETURN_IF_ERROR(CheckRange("num_layers", spec.num_layers, 1, 1024));
  return Validate(spec.shape);
}

}  // namespace lrmoe
