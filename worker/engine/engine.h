// The engine of one rank: complete forward, scored and compacted backward, parameters of the owned experts.
//
// Collective operations (marked so): every rank calls the same ones in the same order. Each starts with an
// agreement exchange of (operation, invocation, shape, validity); when ranks disagree, or one rank's
// arguments are bad, every rank gets the same error, which names the ranks and both sides, nothing has
// changed, and the engine stays usable. A rank whose caller's request was found bad before it reached the
// engine takes part with Refuse. After DeadlineExceeded or Unavailable the epoch is dead and every later
// collective returns Unavailable; so it is after a failure of one rank between exchanges (a kernel, memory),
// which ends the epoch because peers wait for that rank.
//
// Threads: one thread calls everything here.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/deadline.h"
#include "common/ids.h"
#include "common/layer_shape.h"
#include "common/plan.h"
#include "kernels/kernels.h"
#include "worker/engine/expert_store.h"
#include "worker/engine/operation.h"
#include "worker/engine/optimizer.h"
#include "worker/engine/phase_clock.h"
#include "worker/engine/plan_provider.h"
#include "worker/transport/transport.h"

namespace lrmoe::engine {

struct EngineOptions {
  ModelSpec model;
  int num_threads = 1;                      // compute threads, 1..256
  int64_t memory_budget_bytes = INT64_MAX;  // of this rank over all layers; a context beyond it is refused
  int32_t max_open_contexts = 256;          // forwards saved for backward, over all layers; 1..65536
  std::chrono::milliseconds collective_timeout{60000};  // per exchange
  std::chrono::milliseconds finish_timeout{86400000};  // of Finish: ranks may be done at very different times
  std::chrono::milliseconds plan_timeout{60000};
  // Node of each rank, equal on all ranks: kept pairs that must move prefer their node. Empty: one node.
  std::vector<int32_t> nodes;
  // activation_memory = recompute: FC1 rows are not saved but made again from x in the backward pass.
  bool recompute_activation = false;
  // Weights are held packed, once per direction, where the device and the sizes allow; equal on all ranks.
  bool pack_weights = true;
  // Masters and moments lie in the device's memory, which is not the host's, and are updated there; equal on
  // all ranks.
  bool optimizer_on_device = false;
  // Rows travel while the rank computes, as far as the transport moves them meanwhile; results do not change.
  // Rows that return from the forward do so in pieces of at least this many bytes. Both equal on all ranks.
  bool overlap = false;
  int64_t least_piece_bytes = int64_t{64} << 10;  // 1 and more
  // Phases end when the device has done their work, so that their times are what it took; for benches. Else
  // it works on meanwhile.
  bool wait_between_phases = false;
  // Every tensor block is filled with NaN before use; for tests.
  bool poison_buffers = false;
};

// Shapes: T tokens of this rank (may be 0 and differ between ranks), k, H from the model. x, y, dy, dx are in
// the compute type, in host memory or in the device's (copied, where the device cannot reach it: one [T, H]
// more than the memory model has). Spans must have exactly the stated number of bytes or elements.
struct ForwardArgs {
  Invocation invocation;
  int64_t num_tokens = 0;               // T, 0..2^31 / k
  std::span<const std::byte> x;         // [T, H]
  std::span<const int32_t> expert_idx;  // [T, k], 0..E-1, distinct within a token
  std::span<const float> alpha;         // [T, k], finite
  std::span<std::byte> y;               // [T, H], out
  bool needs_backward = true;           // false: evaluation, nothing is saved
};

struct BackwardArgs {
  Invocation invocation;          // of an open forward
  std::span<const std::byte> dy;  // [T, H]
  std::span<std::byte> dx;        // [T, H], out
  std::span<float> dalpha;  // [T, k], out; router_gradient retained: 0 for dropped pairs, rescaled for kept
  std::span<uint8_t> kept;  // [T, k] 0 or 1, out; may be empty
};

struct ForwardResult {
  ExecutionPlan plan;
  InvocationReport report;
  std::vector<ExchangeTime> exchanges;
};
struct BackwardResult {
  InvocationReport report;
  std::vector<ExchangeTime> exchanges;
};

class Engine {
 public:
  // `transport` and `plans` outlive the engine. Collective (agreement on the model). `device` computes and
  // its memory holds rows, weights and gradients; the transport must take rows from there. Null: the CPU. An
  // error instead, when it could not be had, becomes the error of all ranks.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(
      const EngineOptions& options, transport::Transport* transport, PlanProvider* plans,
      absl::StatusOr<std::unique_ptr<kernels::Device>> device = nullptr);
  ~Engine();

  // Collective. y is complete: nothing is ever dropped in the forward pass. A second forward of an open
  // invocation (recomputation) replaces its context. A forward of a later step frees contexts of earlier
  // steps of that layer. The planner's errors (ResourceExhausted: infeasible) and a plan beyond the memory
  // budget come back on all ranks alike and leave the engine usable.
  absl::StatusOr<ForwardResult> Forward(const ForwardArgs& args);
  // Collective. Accumulates weight gradients at the owners (replica gradients are summed there before it
  // returns). Frees the context, also on error, unless the ranks' calls or arguments were refused by the
  // agreement. OutOfRange on all ranks, naming rank, token, slot, expert and value, when a score is NaN or
  // infinite; the engine stays usable.
  absl::StatusOr<BackwardResult> Backward(const BackwardArgs& args);
  // Collective. Frees the context of a forward that gets no backward. NotFound when there is none.
  absl::Status Discard(const Invocation& invocation);

  // Local. One owned expert of one layer; see ExpertStore::Load.
  absl::Status LoadExpert(int32_t layer, int32_t expert_idx, DataType type, std::span<const std::byte> w1,
                          std::span<const std::byte> w2);
  // Collective. The layer's weights are complete on this rank: its version goes up by one. FailedPrecondition
  // when some owned expert was never loaded, naming it.
  absl::Status FinishLoad(int32_t layer);

  // Collective. Updates every loaded layer's owned experts once, on a queue; returns when the queue is empty.
  // Gradients are left as they are.
  absl::Status OptimizerStep(const AdamWStep& step);
  // Collective. Brings the owners' weights to the replicas of each layer's latest plan that became stale, so
  // that a plan that keeps them finds them current. Meant for right behind OptimizerStep, when its caller has
  // been answered; one that is still stale in a forward is brought then. No replica is stale: no exchange.
  absl::Status RefreshReplicas();
  // Collective. Sum of squares of all experts' accumulated gradients, over all ranks and layers, equal on all
  // ranks.
  absl::StatusOr<double> SquaredGradientNorm();
  // Collective.
  absl::Status ZeroGradients();

  // Collective. See checkpoint.h. Gradients and contexts are not part of a checkpoint; loading zeroes
  // gradients and drops open contexts.
  absl::Status SaveCheckpoint(const std::string& directory, int64_t step);
  absl::StatusOr<int64_t> LoadCheckpoint(const std::string& directory, int64_t step);

  // Collective. Takes part in `operation` with an error: every rank's call returns it, with this rank named.
  absl::Status Refuse(Operation operation, const Invocation& invocation, const absl::Status& reason);

  // Collective. Orderly end: returns once all ranks are here.
  absl::Status Finish();

  ExpertStore& store();
  kernels::Device& device();
  int64_t open_contexts() const;
  int64_t peak_bytes() const;     // measured over all layers since Create, as the memory model counts bytes
  int64_t arena_growths() const;  // times that tensor memory had to grow; constant in a steady state

 private:
  struct Impl;
  explicit Engine(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace lrmoe::engine
