// Runs the real engine on the ranks of a layer, each a thread of this process, and keeps what they report.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/layer_shape.h"
#include "common/plan.h"
#include "common/policy.h"
#include "common/report.h"
#include "kernels/kernels.h"
#include "tools/bench/layer_problem.h"
#include "worker/engine/phase_clock.h"
#include "worker/transport/transport.h"

namespace lrmoe::bench {

// One way to run the layer. Arms share tensors, and engines and weights but for those that overlap, and take
// turns, so that their ratios are of one run.
struct Arm {
  std::string policy;      // planner
  double retention = 1.0;  // the only candidate rate
  bool overlap = false;    // rows are exchanged while ranks compute
};

struct LayerRun {
  LayerShape shape;
  int64_t num_tokens = 512;  // of each rank
  double skew = 0;
  int32_t num_ranks = 1;
  int num_threads = 1;  // of each rank
  int32_t replica_slots = 2;
  int64_t memory_budget_bytes = INT64_MAX;  // of each rank
  bool recompute_activation = false;
  bool accumulate = false;   // gradients add up; else each backward pass is the first since they were zeroed
  bool pack_weights = true;  // where the device and the sizes allow
  RouterGradient router_gradient = RouterGradient::kExact;
  bool rows_on_device = false;       // x, y and their gradients lie in the memory of make_device's device
  bool wait_between_phases = false;  // as EngineOptions
  int steps = 10;                    // measured, of each arm
  uint64_t seed = 1;
  // Not 0: a network that brings each rank's bytes out at this speed, in real time, instead of none. Ranks of
  // one process only.
  double link_mbit_per_s = 0;
  std::vector<Arm> arms;
  // What each rank computes on, and transports that reach it; empty: the CPU, inproc.
  std::function<absl::StatusOr<std::unique_ptr<kernels::Device>>()> make_device = {};
  std::function<std::vector<std::unique_ptr<transport::Transport>>(int32_t num_ranks)> make_transports = {};
};

struct ArmResult {
  // reports[step][rank]: forward and backward of one invocation.
  std::vector<std::vector<InvocationReport>> reports;
  std::vector<std::vector<std::vector<engine::ExchangeTime>>> exchanges;  // the same steps and ranks
  // Of the last step, by rank: bytes sent by transport operation, kept pairs.
  std::vector<std::map<std::string, int64_t>> sent_bytes;
  std::vector<std::vector<uint8_t>> kept;
  ExecutionPlan execution;
};

struct LayerResult {
  std::string gemm_path;
  bool packed_weights = false;
  std::vector<RankInput> inputs;  // [G]
  std::vector<ArmResult> arms;
};

// Errors of the engine or the planner, with the arm named where one is to blame.
absl::StatusOr<LayerResult> RunLayer(const LayerRun& run);
// One rank of the layer, the others are other processes that call the same; reports of this rank only.
absl::StatusOr<LayerResult> RunRank(const LayerRun& run, std::unique_ptr<transport::Transport> transport);

}  // namespace lrmoe::bench
