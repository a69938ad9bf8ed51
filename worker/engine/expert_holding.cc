#include "worker/engine/expert_holding.h"

#include <sys/mman.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace lrmoe::engine {
namespace {

constexpr size_t kAlignment = 64;  // a cache line, and the widest vector
constexpr size_t kHugePage = size_t{2} << 20;
constexpr int64_t kDeviceAlignment = 256;  // what device memory comes in

// Null when memory cannot be had.
template <typename T>
HostBuffer<T> Allocate(int64_t count) {
  const size_t size = (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
  void* p = nullptr;
  if (posix_memalign(&p, size >= kHugePage ? kHugePage : kAlignment, size) != 0) return nullptr;
  // GEMMs read short pieces of rows that are pages apart. Whole huge pages only: not a byte more is used.
  // That the kernel gives none is no error.
  if (size >= kHugePage) (void)madvise(p, size / kHugePage * kHugePage, MADV_HUGEPAGE);
  std::memset(p, 0, size);
  return HostBuffer<T>(static_cast<T*>(p));
}

bool AddHostTensors(const HoldingShape& shape, Holding& holding) {
  holding.weights = Allocate<std::byte>(shape.weight_bytes);
  holding.gradient = Allocate<float>(shape.parameters);
  holding.instance.weights = holding.instance.backward_weights = holding.weights.get();
  holding.instance.gradient = holding.gradient.get();
  if (shape.layout.packed) {
    holding.backward_weights = Allocate<std::byte>(shape.weight_bytes);
    holding.instance.backward_weights = holding.backward_weights.get();
  }
  return holding.weights && holding.gradient && holding.instance.backward_weights;
}

bool AddHostState(const HoldingShape& shape, Holding& holding) {
  const int64_t n = shape.parameters;
  holding.master = Allocate<float>(n);
  holding.m = Allocate<float>(n);
  holding.v = Allocate<float>(n);
  const auto size = static_cast<size_t>(n);
  holding.state = {{holding.master.get(), size}, {holding.m.get(), size}, {holding.v.get(), size}};
  return holding.master && holding.m && holding.v;
}

// One range for everything, because device memory comes in large pieces.
absl::Status AddDeviceTensors(const HoldingShape& shape, bool with_state, Holding& holding) {
  const auto round = [](int64_t bytes) {
    return (bytes + kDeviceAlignment - 1) / kDeviceAlignment * kDeviceAlignment;
  };
  const int64_t floats = round(shape.parameters * static_cast<int64_t>(sizeof(float)));
  const int64_t bytes = round(shape.weight_bytes) + floats * (with_state ? 4 : 1);
  LRMOE_ASSIGN_OR_RETURN(holding.on_device, shape.device->Reserve(bytes));
  LRMOE_RETURN_IF_ERROR(holding.on_device->Commit(bytes));
  std::byte* at = holding.on_device->base();
  holding.instance.weights = holding.instance.backward_weights = at;
  at += round(shape.weight_bytes);
  const auto take = [&] { return reinterpret_cast<float*>(std::exchange(at, at + floats)); };
  holding.instance.gradient = take();
  if (with_state) {
    const auto size = static_cast<size_t>(shape.parameters);
    for (std::span<float>* part : {&holding.state.master, &holding.state.m, &holding.state.v})
      *part = {take(), size};
  }
  shape.device->Fill(holding.on_device->base(), 0, bytes);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Holding>> AllocateExpert(const HoldingShape& shape, int32_t expert_idx,
                                                        bool owned) {
  auto holding = std::make_unique<Holding>();
  holding->instance.expert_idx = expert_idx;
  const bool host_tensors = shape.device == nullptr || shape.device->Holds(holding.get());
  const bool host_state = owned && !shape.layout.optimizer_on_device;
  if (!host_tensors)
    LRMOE_RETURN_IF_ERROR(AddDeviceTensors(shape, owned && shape.layout.optimizer_on_device, *holding));
  if ((host_tensors && !AddHostTensors(shape, *holding)) || (host_state && !AddHostState(shape, *holding)))
    return absl::ResourceExhaustedError(
        absl::StrCat("host memory for ", shape.parameters, " parameters of expert ", expert_idx));
  return holding;
}

}  // namespace lrmoe::engine
