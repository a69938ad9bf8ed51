// What the worker protocol service asks of the engine: engine::Engine's own calls, and reading parameters. An
// interface, so that the service's tests can hold an engine still, make it fail, or watch what reaches it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/ids.h"
#include "common/layer_shape.h"
#include "kernels/interprocess.h"
#include "worker/engine/engine.h"

namespace lrmoe::worker {

enum class ExpertContent : uint8_t { kWeights = 1, kGradient = 2 };

// Calls, errors and threads as in worker/engine/engine.h, where not said otherwise.
class EnginePort {
 public:
  virtual ~EnginePort() = default;

  virtual absl::StatusOr<engine::ForwardResult> Forward(const engine::ForwardArgs& args) = 0;
  virtual absl::StatusOr<engine::BackwardResult> Backward(const engine::BackwardArgs& args) = 0;
  virtual absl::Status Discard(const Invocation& invocation) = 0;
  virtual absl::Status LoadExpert(int32_t layer, int32_t expert_idx, DataType type,
                                  std::span<const std::byte> w1, std::span<const std::byte> w2) = 0;
  virtual absl::Status FinishLoad(int32_t layer) = 0;
  virtual absl::Status OptimizerStep(const engine::AdamWStep& step) = 0;
  virtual absl::StatusOr<double> SquaredGradientNorm() = 0;
  virtual absl::Status ZeroGradients() = 0;
  virtual absl::Status SaveCheckpoint(const std::string& directory, int64_t step) = 0;
  virtual absl::StatusOr<int64_t> LoadCheckpoint(const std::string& directory, int64_t step) = 0;
  virtual absl::Status Refuse(engine::Operation operation, const Invocation& invocation,
                              const absl::Status& reason) = 0;
  virtual absl::Status Finish() = 0;
  // Behind every answered call: what it left to be done that its caller need not wait for. Any error ends the
  // epoch.
  virtual absl::Status AfterAnswer() = 0;

  // Local. fp32 masters or accumulated gradient of an owned expert: w1[fc1_width, H], w2[H, F], of exactly
  // that size. NotFound when this rank does not own it; FailedPrecondition for the weights of a layer that
  // was never loaded.
  virtual absl::Status ExportExpert(int32_t layer, int32_t expert_idx, ExpertContent content,
                                    std::span<float> w1, std::span<float> w2) = 0;
  virtual ParameterVersion version(int32_t layer) = 0;
  virtual int64_t optimizer_step() = 0;
  virtual const std::vector<int32_t>& owned() = 0;  // ascending
  // What the device shares with other processes; null: it computes on the CPU.
  virtual kernels::Interprocess* interprocess() = 0;
};

// Called on the engine thread when the first framework attaches. Collective.
using EngineFactory = std::function<absl::StatusOr<std::unique_ptr<EnginePort>>(const ModelSpec&)>;

}  // namespace lrmoe::worker
