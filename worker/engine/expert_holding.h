// One expert on this rank with the memory behind it. Not part of the store's interface: expert_store.h is.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>

#include "absl/status/statusor.h"
#include "worker/engine/expert_store.h"

namespace lrmoe::engine {

struct FreeHost {
  void operator()(void* p) const { std::free(p); }
};
template <typename T>
using HostBuffer = std::unique_ptr<T[], FreeHost>;

// Pointers and what they point into: host memory, or one range of the device's.
struct Holding {
  ExpertInstance instance;
  OptimizerState state;  // empty in a replica
  HostBuffer<std::byte> weights, backward_weights;
  HostBuffer<float> gradient, master, m, v;
  std::unique_ptr<kernels::Memory> on_device;
};

// What the experts of one store have in common.
struct HoldingShape {
  int64_t parameters = 0;
  int64_t weight_bytes = 0;           // in one form
  kernels::Device* device = nullptr;  // null: weights and gradients in host memory
  StoreLayout layout;
};

// Zeroed, so that the pages are there and not only promised. `owned`: with optimizer state.
// ResourceExhausted, or what the device says.
absl::StatusOr<std::unique_ptr<Holding>> AllocateExpert(const HoldingShape& shape, int32_t expert_idx,
                                                        bool owned);

}  // namespace lrmoe::engine
