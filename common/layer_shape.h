// The shape of one MoE layer: what a framework attaches with, what planner, memory model and engine agree on.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lrmoe {

enum class DataType : uint8_t { kBf16 = 1, kFp32 = 2 };
enum class Activation : uint8_t { kSilu = 1, kGelu = 2 };  // gated experts use kSilu: SwiGLU

int64_t SizeInBytes(DataType type);
absl::string_view Name(DataType type);  // "bf16", "fp32"
absl::StatusOr<DataType> ParseDataType(absl::string_view name);
absl::string_view Name(Activation activation);  // "silu", "gelu"

// Limits are checked by Validate; they bound every product of these numbers to 2^62.
struct LayerShape {
  int32_t num_experts = 0;        // E, 1..4096
  int32_t top_k = 0;              // k, 1..min(E, 64)
  int32_t hidden_size = 0;        // H, 1..65536
  int32_t intermediate_size = 0;  // F, 1..262144
  bool gated = true;              // W1 holds gate rows, then up rows
  Activation activation = Activation::kSilu;
  DataType dtype = DataType::kBf16;

  bool operator==(const LayerShape&) const = default;
  // Width of an `a` row and number of rows of W1: 2F when gated, else F.
  int64_t fc1_width() const { return int64_t{gated ? 2 : 1} * intermediate_size; }
  // Weights of one expert: W1[fc1_width, H] and W2[H, F].
  int64_t parameters_per_expert() const { return (fc1_width() + intermediate_size) * hidden_size; }
};

// InvalidArgument naming the field, its value and the allowed range.
absl::Status Validate(const LayerShape& shape);

// What a worker group runs: `num_layers` MoE layers of one shape. 1..1024 layers.
struct ModelSpec {
  int32_t num_layers = 0;
  LayerShape shape;
  bool operator==(const ModelSpec&) const = default;
};
absl::Status Validate(const ModelSpec& spec);

}  // namespace lrmoe
