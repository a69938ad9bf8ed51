// A training process's session with its local worker, for C++ frameworks. Attaching opens it, destroying it
// detaches. Tensors lie in arenas: memory shared with the worker, where it reads and writes them in place.
//
// Errors are the worker's (worker/rpc, worker/engine), Unavailable when the worker is gone or its epoch is
// over, DeadlineExceeded when it does not answer within Options::call_timeout. Collective: every rank's
// framework makes the same calls in the same order; those calls wait for each other. Threads: one thread at a
// time calls the operations.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/ids.h"
#include "common/layer_shape.h"
#include "common/plan.h"
#include "common/report.h"

namespace lrmoe::client {

struct Options {
  std::string socket;               // path, absolute; a launched training process finds it in LRMOE_SOCKET
  std::string name = "c++ client";  // for messages, at most 256 bytes
  ModelSpec model;                  // equal on all ranks
  int32_t expected_world_size = 0;  // 0: any
  std::chrono::milliseconds connect_timeout{10000};
  std::chrono::milliseconds call_timeout{600000};  // per call; attaching waits for every rank's framework
};

// Memory shared with the worker, zero-filled, page-aligned. Tensors in it start at multiples of 64 bytes.
// Unmapped and given back when destroyed, which must happen before its Session is.
class Arena {
 public:
  virtual ~Arena() = default;
  std::span<std::byte> memory() const { return memory_; }

 protected:
  std::span<std::byte> memory_;
};

// The plan of an invocation in a few numbers, and what this rank measured.
struct InvocationSummary {
  double retention_rate = 1.0;
  ImbalanceSummary imbalance;
  int64_t planned_kept_rows = 0, planned_routed_rows = 0;  // over all ranks
  int32_t new_replicas = 0;
  double plan_us = 0;
  std::string policy;
  InvocationReport report;
};

// T tokens of this rank, k choices, hidden size H from the model. All spans lie in arenas of the session.
struct ForwardTensors {
  int64_t num_tokens = 0;               // T; 0 is normal
  std::span<const std::byte> x;         // [T, H] compute type
  std::span<const int32_t> expert_idx;  // [T, k]
  std::span<const float> alpha;         // [T, k]
  std::span<std::byte> y;               // [T, H] compute type, written
  bool needs_backward = true;           // false: evaluation
};
struct BackwardTensors {
  int64_t num_tokens = 0;
  std::span<const std::byte> dy;  // [T, H] compute type
  std::span<std::byte> dx;        // [T, H] compute type, written
  std::span<float> dalpha;        // [T, k], written
  std::span<uint8_t> kept;        // [T, k], written; may be empty: not wanted
};

struct AdamWSettings {
  int64_t step = 1;  // 1-based number of this update
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01, gradient_scale = 1.0;
};

struct LoadedCheckpoint {
  int64_t step = 0;
  int64_t optimizer_step = 0;
};

class Session {
 public:
  // Collective the first time. Unavailable naming the socket when no worker serves it.
  static absl::StatusOr<std::unique_ptr<Session>> Attach(const Options& options);
  virtual ~Session() = default;

  virtual int32_t rank() const = 0;
  virtual int32_t world_size() const = 0;
  virtual const std::vector<int32_t>& owned_experts() const = 0;  // ascending, the same for every layer

  // OK while the epoch runs; Unavailable with the worker's reason after it ended. Any thread.
  virtual absl::Status health() const = 0;

  virtual absl::StatusOr<std::unique_ptr<Arena>> CreateArena(int64_t bytes) = 0;

  // Owned experts only. gate_up[2F, H] (or [F, H] when not gated) and down[H, F], of `type`.
  virtual absl::Status LoadExpert(int32_t layer, int32_t expert_idx, DataType type,
                                  std::span<const std::byte> gate_up, std::span<const std::byte> down) = 0;
  virtual absl::StatusOr<ParameterVersion> FinishLoad(int32_t layer) = 0;  // collective
  // fp32, written: master weights, or the accumulated gradient.
  virtual absl::Status ReadWeights(int32_t layer, int32_t expert_idx, std::span<float> gate_up,
                                   std::span<float> down) = 0;
  virtual absl::Status ReadGradients(int32_t layer, int32_t expert_idx, std::span<float> gate_up,
                                     std::span<float> down) = 0;

  // Collective, all of them.
  virtual absl::StatusOr<InvocationSummary> Forward(const Invocation& invocation,
                                                    const ForwardTensors& tensors) = 0;
  virtual absl::StatusOr<InvocationSummary> Backward(const Invocation& invocation,
                                                     const BackwardTensors& tensors) = 0;
  virtual absl::Status Discard(const Invocation& invocation) = 0;
  virtual absl::StatusOr<ParameterVersion> OptimizerStep(const AdamWSettings& settings) = 0;
  virtual absl::StatusOr<double> SquaredGradientNorm() = 0;
  virtual absl::Status ZeroGradients() = 0;
  virtual absl::Status SaveCheckpoint(const std::string& directory, int64_t step) = 0;  // absolute path
  virtual absl::StatusOr<LoadedCheckpoint> LoadCheckpoint(const std::string& directory, int64_t step) = 0;
};

}  // namespace lrmoe::client
