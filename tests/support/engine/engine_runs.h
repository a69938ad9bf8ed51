// Runs engines as threads of one process on a MoeProblem and gathers what they produce.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tests/support/engine/moe_reference.h"
#include "tests/support/engine/plan_rendezvous.h"
#include "worker/engine/engine.h"
#include "worker/transport/transport.h"

namespace lrmoe::testing {

// Gathered over ranks, in token order.
struct LayerOutput {
  std::vector<float> y, dx;                  // [N, H]
  std::vector<float> dalpha;                 // [N, k]
  std::vector<uint8_t> kept;                 // [N, k]
  std::vector<std::vector<float>> dw1, dw2;  // [E], from the owners
  bool operator==(const LayerOutput&) const = default;
};

struct RunSetup {
  engine::EngineOptions options;  // model is set from the problem (num_layers stays)
  PlanFunction plan;
  std::function<std::unique_ptr<transport::Transport>(int32_t rank, std::unique_ptr<transport::Transport>)>
      wrap;
  // What each engine computes on; empty: the CPU device.
  std::function<absl::StatusOr<std::unique_ptr<kernels::Device>>(int32_t rank)> make_device = {};
  // Transports of the ranks; empty: inproc.
  std::function<std::vector<std::unique_ptr<transport::Transport>>(int32_t num_ranks)> make_transports = {};
};

// Of each pair of a source: the instance that executes it, and its place in send order, from the words of
// worker/engine/routing.h.
struct PlacedPairs {
  std::vector<int32_t> instance, position;
};
PlacedPairs PlacePairs(const LayerPlan& plan, std::span<const int32_t> expert_idx, int32_t rank);

// One rank's side of a run. Methods on different ranks' objects run at the same time.
class RankRun {
 public:
  RankRun(const MoeProblem& problem, int32_t rank, engine::Engine* engine, LayerOutput* output);

  engine::Engine& engine() { return *engine_; }
  int32_t rank() const { return rank_; }
  // Puts weights of all layers in.
  absl::Status Load();
  absl::StatusOr<engine::ForwardResult> Forward(const Invocation& invocation, bool needs_backward = true);
  absl::StatusOr<engine::BackwardResult> Backward(const Invocation& invocation);
  // Copies the owners' gradients of a layer into the output.
  void ReadGradients(int32_t layer);
  // The arguments that Forward and Backward would pass, for tests that spoil them.
  engine::ForwardArgs ForwardArguments(const Invocation& invocation);
  engine::BackwardArgs BackwardArguments(const Invocation& invocation);

 private:
  void Decode(const std::vector<std::byte>& rows, std::vector<float>& all);

  const MoeProblem& problem_;
  int32_t rank_;
  engine::Engine* engine_;
  LayerOutput* output_;
  int64_t first_token_, num_tokens_;
  std::vector<std::byte> x_, dy_, y_, dx_;
  std::vector<float> dalpha_;
  std::vector<uint8_t> kept_;
};

using RankScenario = std::function<absl::Status(RankRun&)>;

// Creates the engines (one thread each), loads weights, runs the scenario. Statuses by rank; creation and
// loading failures included.
std::vector<absl::Status> RunRanks(const MoeProblem& problem, const RunSetup& setup, LayerOutput& output,
                                   const RankScenario& scenario,
                                   std::vector<std::vector<engine::InvocationReport>>* reports = nullptr);

// Forward and backward of one invocation on all ranks.
std::vector<absl::Status> RunLayer(const MoeProblem& problem, const RunSetup& setup, LayerOutput& output,
                                   std::vector<std::vector<engine::InvocationReport>>* reports = nullptr);

// Converts to and from the compute type.
std::vector<std::byte> Encode(DataType type, std::span<const float> values);
std::vector<float> Decode(DataType type, std::span<const std::byte> bytes);

}  // namespace lrmoe::testing
