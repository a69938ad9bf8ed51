// The whole engine on a device against the same engine on the CPU device: rank threads of one process, no
// test framework.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "tests/support/device/device_checks.h"
#include "tests/support/engine/engine_runs.h"

namespace lrmoe::testing {

struct EngineDevice {
  std::function<absl::StatusOr<std::unique_ptr<kernels::Device>>(int32_t rank)> make_device;
  // Transports that reach the devices' memory.
  std::function<std::vector<std::unique_ptr<transport::Transport>>(int32_t num_ranks)> make_transports;
  int64_t scale = 1;  // tokens and widths, times this
};

// One forward and backward: types, ranks, retention, replicas, recomputation, exact and retained router
// gradient.
std::vector<CheckResult> CheckLayers(const EngineDevice& on, const std::vector<int32_t>& rank_counts);
// Plain experts and the criteria of the ablation.
CheckResult CheckCriteria(const EngineDevice& on);
// Layers of any shape, ranks without tokens, one hot expert, random quotas, all that a plan can say.
CheckResult CheckRandomLayers(const EngineDevice& on, int num_layers, uint64_t seed);
// Steps of several micro-batches with updates, gradient norms, replicas that are refreshed, and an
// evaluation; optimizer state on the host and on the device.
CheckResult CheckSteps(const EngineDevice& on);

}  // namespace lrmoe::testing
