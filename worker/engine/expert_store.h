// The expert parameters of one rank: owned experts with masters, moments and gradients, and replicas of other
// ranks'. Layout of one expert everywhere (weights, gradient, master, moments): W1[fc1_width, H] (gate rows,
// then up rows), then W2[H, F], row-major, contiguous. A store may hold the weights packed instead, once per
// direction (kernels.h): each form as large as the plain one, W1's before W2's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "common/ids.h"
#include "common/layer_shape.h"
#include "kernels/kernels.h"

namespace lrmoe::engine {

inline kernels::Type TypeOf(DataType type) {
  return type == DataType::kBf16 ? kernels::Type::kBf16 : kernels::Type::kFp32;
}

// One expert in compute precision with its gradient, in the device's memory. Pointers stay valid as long as
// the store (owned experts) or until the replica is dropped.
struct ExpertInstance {
  int32_t expert_idx = 0;
  std::byte* weights = nullptr;           // compute type; packed for the forward pass
  std::byte* backward_weights = nullptr;  // packed for the backward pass; not packed: `weights`
  float* gradient = nullptr;              // fp32, accumulated over micro-batches until zeroed
  bool gradient_is_zero = false;          // what `gradient` holds counts as zeros; see ExpertStore::Gradient
  ParameterVersion version{};             // of the weights held
};

// fp32 optimizer state of an owned expert, parameters_per_expert each: in host memory (not part of the
// device memory budget), or in the device's (part of it), see StoreLayout.
struct OptimizerState {
  std::span<float> master, m, v;
};
enum class StatePart : uint8_t { kMaster, kFirstMoment, kSecondMoment };
inline std::span<float> PartOf(const OptimizerState& state, StatePart part) {
  return part == StatePart::kMaster ? state.master : part == StatePart::kFirstMoment ? state.m : state.v;
}

// How a store holds its experts.
struct StoreLayout {
  // The device packs the compute type, shares the host's memory, and H and F are multiples of
  // kernels::kPackedMultiple.
  bool packed = false;
  bool optimizer_on_device = false;  // the device's memory is not the host's
};

// Not thread-safe; used by the engine thread. The optimizer queue works on spans it was given (see
// optimizer.h).
class ExpertStore {
 public:
  // `owner` [E]: the owning rank of each expert, in every layer alike. Allocates weights, gradients (zero),
  // masters and moments (zero) of the owned experts; ResourceExhausted when memory cannot be had. Weights and
  // gradients lie in the memory of `device`, which outlives the store; null: host memory.
  static absl::StatusOr<std::unique_ptr<ExpertStore>> Create(const ModelSpec& model,
                                                             std::vector<int32_t> owner, int32_t rank,
                                                             kernels::Device* device = nullptr,
                                                             const StoreLayout& layout = {});
  ~ExpertStore();

  const ModelSpec& model() const;
  const std::vector<int32_t>& owner() const;
  const std::vector<int32_t>& owned() const;  // expert indices owned by this rank, ascending
  int64_t parameters() const;                 // per expert
  int64_t w2_offset() const;                  // elements from the start of an expert to its W2

  kernels::Device& device();    // the store was given one
  bool in_host_memory() const;  // weights and gradients
  bool packed() const;
  bool optimizer_on_device() const;

  // The instance of an expert on this rank, or nullptr when it holds none.
  ExpertInstance* Find(int32_t layer, int32_t expert_idx);
  OptimizerState State(int32_t layer, int32_t expert_idx);  // where it lies; expert must be owned

  // Version of a layer's owned experts: 0 before its weights are loaded, then 1, +1 per update. Equal on all
  // ranks.
  ParameterVersion version(int32_t layer) const;
  void SetVersion(int32_t layer,
                  ParameterVersion version);  // owned experts of the layer now have this version
  int64_t optimizer_step() const;             // updates done so far, for bias correction
  void SetOptimizerStep(int64_t step);

  // Replicas. Add returns the existing instance, or a new one with zero gradient and version 0.
  ExpertInstance& AddReplica(int32_t layer, int32_t expert_idx);
  void DropReplica(int32_t layer, int32_t expert_idx);
  std::vector<int32_t> Replicas(int32_t layer) const;  // ascending

  // One owned expert from outside (fp32 or compute type; W1 and W2 in the layout above). Also sets the
  // master. InvalidArgument when the expert is not owned or sizes differ; FailedPrecondition never.
  absl::Status Load(int32_t layer, int32_t expert_idx, DataType type, std::span<const std::byte> w1,
                    std::span<const std::byte> w2);

  // The backward form of an instance from its forward form, which was written. Nothing where not packed.
  void RepackWeights(int32_t layer, int32_t expert_idx);

  // Plain weights, gradient and state where the host can read them: where they are, or in `copy`.
  absl::StatusOr<std::span<const std::byte>> HostWeights(int32_t layer, int32_t expert_idx,
                                                         std::vector<std::byte>& copy);
  absl::StatusOr<std::span<const float>> HostGradient(int32_t layer, int32_t expert_idx,
                                                      std::vector<float>& copy);
  absl::StatusOr<std::span<const float>> HostState(int32_t layer, int32_t expert_idx, StatePart part,
                                                   std::vector<float>& copy);
  absl::Status SetState(int32_t layer, int32_t expert_idx, StatePart part, std::span<const float> values);
  // The weights of one instance from host memory, in the compute type and plain.
  absl::Status SetWeights(int32_t layer, int32_t expert_idx, std::span<const std::byte> weights);

  // Owned and replica gradients. Only marks them: the first to come writes instead of adding, which spares
  // the memory a pass of zeros and the reading of them.
  void ZeroGradients(int32_t layer);
  // An instance's gradient for someone who adds to it or reads it: zeros are there where they count.
  float* Gradient(int32_t layer, int32_t expert_idx);

  // Weights and gradients of owned experts and replicas, and state on the device, as the memory model counts.
  int64_t bytes(int32_t layer) const;

 private:
  struct Impl;
  explicit ExpertStore(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Plain weights of an expert of that shape into both packed forms of an instance, by a device that packs.
void PackWeights(kernels::Device& device, const LayerShape& shape, const std::byte* plain,
                 const ExpertInstance& instance);

}  // namespace lrmoe::engine
