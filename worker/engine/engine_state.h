// What the engine's operations share. Not part of the engine's interface: engine.h is.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/memory_model.h"
#include "kernels/kernels.h"
#include "worker/engine/agreement.h"
#include "worker/engine/buffers.h"
#include "worker/engine/context.h"
#include "worker/engine/engine.h"
#include "worker/engine/exchange.h"
#include "worker/engine/expert_store.h"
#include "worker/engine/optimizer.h"
#include "worker/engine/plan_provider.h"
#include "worker/engine/replicas.h"
#include "worker/transport/transport.h"

namespace lrmoe::engine {

struct EngineState {
  EngineState(const EngineOptions& engine_options, transport::Transport* engine_transport,
              PlanProvider* plan_provider)
      : options(engine_options),
        transport(engine_transport),
        plans(plan_provider),
        contexts(engine_options.max_open_contexts),
        replicas(engine_options.model.num_layers) {}

  EngineOptions options;
  transport::Transport* transport;
  PlanProvider* plans;
  std::unique_ptr<kernels::Device> device;
  std::unique_ptr<ExpertStore> store;
  std::unique_ptr<OptimizerQueue> optimizer;
  std::unique_ptr<Arena> arena;        // in host memory: all, or what the host copies beside device_rows
  std::unique_ptr<Arena> device_rows;  // null when the device shares the host's memory
  ContextTable contexts;               // holds blocks of the arenas: destroyed before them
  ReplicaDirectory replicas;
  MemoryCoefficients memory[2];           // by exact router gradient
  std::vector<std::vector<bool>> loaded;  // [layer][owned expert]
  int64_t peak_bytes = 0;

  const LayerShape& shape() const { return options.model.shape; }
  kernels::Type type() const { return TypeOf(shape().dtype); }
  kernels::ExpertActivation activation() const {
    if (shape().gated) return kernels::ExpertActivation::kSwiGlu;
    return shape().activation == Activation::kSilu ? kernels::ExpertActivation::kSilu
                                                   : kernels::ExpertActivation::kGelu;
  }
  int64_t element_bytes() const { return SizeInBytes(shape().dtype); }
  int64_t row_bytes() const { return shape().hidden_size * element_bytes(); }  // of x, y, g, dx
  int32_t rank() const { return transport->rank(); }
  int32_t num_ranks() const { return transport->size(); }
  // Rows, pairs, weights and gradients in transit: memory of the device.
  Arena& rows() const { return device_rows ? *device_rows : *arena; }
  // Where the device can read a caller's rows: where they are, or a copy that `copy` holds.
  absl::StatusOr<const std::byte*> OnDevice(std::span<const std::byte> rows, Buffer& copy) const;
  // Where the device can write rows for a caller: where he wants them, or a place that `copy` holds.
  absl::StatusOr<std::byte*> ForDevice(std::span<std::byte> rows, Buffer& copy) const;
  // Brings what ForDevice made to the caller.
  void Deliver(std::span<std::byte> rows, const Buffer& copy) const {
    if (copy.size() > 0) device->Download(rows.data(), copy.data(), copy.size());
  }
  PhaseClock StartClock() const {
    return {options.num_threads > 1, options.wait_between_phases ? device.get() : nullptr};
  }

  absl::StatusOr<Agreement> Agree(const Proposal& proposal) const {
    return engine::Agree(*transport, proposal, After(options.collective_timeout));
  }
  // Bytes of experts and replicas, all layers.
  int64_t ExpertBytes() const;
  // This rank's work under a plan.
  RankWork WorkOf(const ExecutionPlan& execution, int64_t num_tokens) const;
  MemoryBytes Predict(const ExecutionPlan& execution, int64_t num_tokens) const;
  // Drops replicas that neither the layer's latest plan nor an open context needs.
  void DropUnusedReplicas(int32_t layer);
  // Ends the epoch after a failure between two exchanges: peers wait for this rank and must learn of it.
  // Waits for the device, which may still read the caller's memory and write to the pass's.
  absl::Status Fail(const absl::Status& status);
};

// InvalidArgument naming the field when an argument has another size than its shape says.
inline absl::Status CheckSize(absl::string_view field, size_t size, int64_t wanted) {
  if (static_cast<int64_t>(size) == wanted) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " has ", size, ", expected ", wanted));
}

absl::StatusOr<ForwardResult> RunForward(EngineState& state, const ForwardArgs& args);
absl::StatusOr<BackwardResult> RunBackward(EngineState& state, const BackwardArgs& args);

}  // namespace lrmoe::engine
