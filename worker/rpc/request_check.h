// Requests of the worker protocol, validated once: what passes may be used unchecked. Descriptors become
// spans of an arena, or of device memory for rows; the result keeps them alive. Errors are InvalidArgument
// (NotFound for an arena or device memory, FailedPrecondition for device memory without events) and
// name the field, its value and the allowed range. What only the engine can judge (ids and weights inside the
// tensors, open contexts) is its business; it must assume that the client changes shared memory while it
// reads. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/layer_shape.h"
#include "lrmoe/v1/worker.pb.h"
#include "worker/engine/engine.h"
#include "worker/rpc/arena.h"
#include "worker/rpc/device_memory.h"
#include "worker/rpc/engine_port.h"

namespace lrmoe::worker {

using HeldMemory = std::vector<std::shared_ptr<const void>>;  // arenas, tokens of device memory

struct ForwardCall {
  engine::ForwardArgs args;
  HeldMemory held;
  std::shared_ptr<const SharedEvents> events;  // null: nothing lies in device memory
};
absl::StatusOr<ForwardCall> CheckForward(const v1::ForwardRequest& request, const ModelSpec& model,
                                         const ArenaSet& arenas, const DeviceShares& device);

struct BackwardCall {
  engine::BackwardArgs args;
  HeldMemory held;
  std::shared_ptr<const SharedEvents> events;  // null: nothing lies in device memory
};
absl::StatusOr<BackwardCall> CheckBackward(const v1::BackwardRequest& request, const ModelSpec& model,
                                           const ArenaSet& arenas, const DeviceShares& device);

struct LoadExpertCall {
  int32_t layer = 0, expert_idx = 0;
  DataType type = DataType::kFp32;
  std::span<const std::byte> w1, w2;
  HeldMemory held;
};
absl::StatusOr<LoadExpertCall> CheckLoadExpert(const v1::LoadExpertRequest& request, const ModelSpec& model,
                                               const ArenaSet& arenas);

struct ExportExpertCall {
  int32_t layer = 0, expert_idx = 0;
  ExpertContent content = ExpertContent::kWeights;
  std::span<float> w1, w2;
  HeldMemory held;
};
absl::StatusOr<ExportExpertCall> CheckExportExpert(const v1::ExportExpertRequest& request,
                                                   const ModelSpec& model, const ArenaSet& arenas);

// In range for `model`.
absl::StatusOr<Invocation> CheckInvocation(const v1::Invocation& invocation, const ModelSpec& model);
absl::Status CheckLayer(int32_t layer, const ModelSpec& model);
absl::StatusOr<engine::AdamWStep> CheckOptimizerStep(const v1::OptimizerStepRequest& request);
absl::Status CheckCheckpointStep(int64_t step);
// An absolute path: worker and client need not share a working directory.
absl::Status CheckDirectory(const std::string& directory);

}  // namespace lrmoe::worker
