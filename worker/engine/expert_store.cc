#include "worker/engine/expert_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/memory_model.h"
#include "common/status_macros.h"
#include "worker/engine/expert_holding.h"

namespace lrmoe::engine {
namespace {

static_assert(kPackedMultiple == kernels::kPackedMultiple);  // the memory model counts what kernels pack

// Rounds to nearest even; NaN stays NaN.
uint16_t Fp32ToBf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

float Bf16ToFp32(uint16_t value) {
  const uint32_t bits = uint32_t{value} << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

// `count` elements of `type` at src, which need not be aligned, into an expert's weights and fp32 masters.
void LoadElements(DataType type, const std::byte* src, int64_t count, DataType weight_type,
                  std::byte* weights, float* master) {
  for (int64_t i = 0; i < count; ++i) {
    if (type == DataType::kFp32) {
      std::memcpy(master + i, src + 4 * i, 4);
    } else {
      uint16_t value;
      std::memcpy(&value, src + 2 * i, 2);
      master[i] = Bf16ToFp32(value);
    }
  }
  if (weight_type == DataType::kFp32) {
    std::memcpy(weights, master, 4 * count);
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t value = Fp32ToBf16(master[i]);
    std::memcpy(weights + 2 * i, &value, 2);
  }
}

absl::Status CheckSize(absl::string_view field, size_t size, int64_t expected) {
  if (static_cast<int64_t>(size) == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " has ", size, " bytes; allowed: ", expected));
}

// Calls visit(n, k, byte offset) for W1 and W2, sizes as FC1 and FC2 take them.
template <typename Visit>
void ForEachMatrix(const LayerShape& shape, Visit visit) {
  const int64_t h = shape.hidden_size, f = shape.intermediate_size, width = shape.fc1_width();
  visit(width, h, int64_t{0});
  visit(h, f, width * h * SizeInBytes(shape.dtype));
}

}  // namespace

struct ExpertStore::Impl {
  ModelSpec model;
  std::vector<int32_t> owner;
  int32_t rank = 0;
  std::vector<int32_t> owned;
  struct Layer {
    std::vector<std::unique_ptr<Holding>> holdings;  // [E]; null: no instance here
    int64_t num_instances = 0;
    ParameterVersion version{};
  };
  std::vector<Layer> layers;
  int64_t optimizer_step = 0;

  kernels::Device* device = nullptr;
  StoreLayout layout;

  int64_t parameters() const { return model.shape.parameters_per_expert(); }
  int64_t weight_bytes() const { return parameters() * SizeInBytes(model.shape.dtype); }
  bool in_host_memory() const { return device == nullptr || device->Holds(this); }
  // [parameters()] values of an expert from the device's memory.
  absl::StatusOr<std::span<const float>> Download(const float* values, std::vector<float>& copy);

  Layer& At(int32_t layer) {
    LRMOE_CHECK_GE(layer, 0);
    LRMOE_CHECK_LT(layer, model.num_layers);
    return layers[layer];
  }
  std::unique_ptr<Holding>& At(int32_t layer, int32_t expert_idx) {
    LRMOE_CHECK_GE(expert_idx, 0);
    LRMOE_CHECK_LT(expert_idx, model.shape.num_experts);
    return At(layer).holdings[expert_idx];
  }

  absl::Status Add(int32_t layer, int32_t expert_idx, bool is_owned) {
    LRMOE_ASSIGN_OR_RETURN(
        At(layer, expert_idx),
        AllocateExpert({parameters(), weight_bytes(), device, layout}, expert_idx, is_owned));
    ++At(layer).num_instances;
    return absl::OkStatus();
  }
};

ExpertStore::ExpertStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ExpertStore::~ExpertStore() = default;

absl::StatusOr<std::unique_ptr<ExpertStore>> ExpertStore::Create(const ModelSpec& model,
                                                                 std::vector<int32_t> owner, int32_t rank,
                                                                 kernels::Device* device,
                                                                 const StoreLayout& layout) {
  LRMOE_RETURN_IF_ERROR(Validate(model));
  if (static_cast<int64_t>(owner.size()) != model.shape.num_experts)
    return absl::InvalidArgumentError(absl::StrCat(
        "owner has ", owner.size(), " experts; allowed: num_experts = ", model.shape.num_experts));
  auto impl = std::make_unique<Impl>();
  impl->model = model;
  impl->rank = rank;
  impl->device = device;
  impl->layout = layout;
  LRMOE_CHECK(!layout.packed || (device != nullptr && impl->in_host_memory() &&
                                 device->PacksWeights(TypeOf(model.shape.dtype))));
  LRMOE_CHECK(!layout.optimizer_on_device || !impl->in_host_memory());
  for (int32_t expert_idx = 0; expert_idx < model.shape.num_experts; ++expert_idx) {
    if (owner[expert_idx] == rank) impl->owned.push_back(expert_idx);
  }
  impl->owner = std::move(owner);
  impl->layers.resize(model.num_layers);
  for (int32_t layer = 0; layer < model.num_layers; ++layer) {
    impl->layers[layer].holdings.resize(model.shape.num_experts);
    for (int32_t expert_idx : impl->owned) {
      if (const absl::Status added = impl->Add(layer, expert_idx, /*is_owned=*/true); !added.ok())
        return absl::Status(
            added.code(),
            absl::StrCat("rank ", rank, ": no memory for layer ", layer, " expert ", expert_idx, " (",
                         impl->parameters(), " parameters, ", impl->owned.size(), " experts per layer, ",
                         model.num_layers, " layers): ", std::string(added.message())));
    }
  }
  return std::unique_ptr<ExpertStore>(new ExpertStore(std::move(impl)));
}

const ModelSpec& ExpertStore::model() const {
  return impl_->model;
}
const std::vector<int32_t>& ExpertStore::owner() const {
  return impl_->owner;
}
const std::vector<int32_t>& ExpertStore::owned() const {
  return impl_->owned;
}
int64_t ExpertStore::parameters() const {
  return impl_->parameters();
}
int64_t ExpertStore::w2_offset() const {
  return impl_->model.shape.fc1_width() * impl_->model.shape.hidden_size;
}

kernels::Device& ExpertStore::device() {
  LRMOE_CHECK(impl_->device != nullptr);
  return *impl_->device;
}
bool ExpertStore::in_host_memory() const {
  return impl_->in_host_memory();
}
bool ExpertStore::packed() const {
  return impl_->layout.packed;
}
bool ExpertStore::optimizer_on_device() const {
  return impl_->layout.optimizer_on_device;
}

ExpertInstance* ExpertStore::Find(int32_t layer, int32_t expert_idx) {
  const std::unique_ptr<Holding>& holding = impl_->At(layer, expert_idx);
  return holding ? &holding->instance : nullptr;
}

OptimizerState ExpertStore::State(int32_t layer, int32_t expert_idx) {
  const std::unique_ptr<Holding>& holding = impl_->At(layer, expert_idx);
  LRMOE_CHECK_EQ(impl_->owner[expert_idx], impl_->rank);
  return holding->state;
}

ParameterVersion ExpertStore::version(int32_t layer) const {
  return impl_->At(layer).version;
}

void ExpertStore::SetVersion(int32_t layer, ParameterVersion version) {
  Impl::Layer& at = impl_->At(layer);
  at.version = version;
  for (int32_t expert_idx : impl_->owned) at.holdings[expert_idx]->instance.version = version;
}

int64_t ExpertStore::optimizer_step() const {
  return impl_->optimizer_step;
}
void ExpertStore::SetOptimizerStep(int64_t step) {
  impl_->optimizer_step = step;
}

ExpertInstance& ExpertStore::AddReplica(int32_t layer, int32_t expert_idx) {
  std::unique_ptr<Holding>& holding = impl_->At(layer, expert_idx);
  // The planner admits a replica only when the memory model has room for it, so no memory here is a broken
  // promise.
  if (!holding) LRMOE_CHECK(impl_->Add(layer, expert_idx, /*is_owned=*/false).ok());
  return holding->instance;
}

void ExpertStore::DropReplica(int32_t layer, int32_t expert_idx) {
  std::unique_ptr<Holding>& holding = impl_->At(layer, expert_idx);
  LRMOE_CHECK_NE(impl_->owner[expert_idx], impl_->rank);
  if (!holding) return;
  holding.reset();
  --impl_->At(layer).num_instances;
}

std::vector<int32_t> ExpertStore::Replicas(int32_t layer) const {
  std::vector<int32_t> replicas;
  for (const std::unique_ptr<Holding>& holding : impl_->At(layer).holdings) {
    if (holding && impl_->owner[holding->instance.expert_idx] != impl_->rank)
      replicas.push_back(holding->instance.expert_idx);
  }
  return replicas;
}

absl::Status ExpertStore::Load(int32_t layer, int32_t expert_idx, DataType type,
                               std::span<const std::byte> w1, std::span<const std::byte> w2) {
  const ModelSpec& spec = impl_->model;
  if (layer < 0 || layer >= spec.num_layers)
    return absl::InvalidArgumentError(
        absl::StrCat("layer is ", layer, "; allowed: 0..", spec.num_layers - 1));
  if (expert_idx < 0 || expert_idx >= spec.shape.num_experts || impl_->owner[expert_idx] != impl_->rank)
    return absl::InvalidArgumentError(
        absl::StrCat("expert_idx is ", expert_idx, "; allowed: an expert owned by rank ", impl_->rank));
  const int64_t split = w2_offset();
  LRMOE_RETURN_IF_ERROR(CheckSize("w1", w1.size(), split * SizeInBytes(type)));
  LRMOE_RETURN_IF_ERROR(CheckSize("w2", w2.size(), (parameters() - split) * SizeInBytes(type)));
  Holding& holding = *impl_->At(layer, expert_idx);
  const DataType weight_type = spec.shape.dtype;
  const bool in_place = in_host_memory() && !packed();
  std::vector<std::byte> weights_aside(in_place ? 0 : impl_->weight_bytes());
  std::vector<float> master_aside(optimizer_on_device() ? parameters() : 0);
  std::byte* const weights = in_place ? holding.weights.get() : weights_aside.data();
  float* const master = optimizer_on_device() ? master_aside.data() : holding.master.get();
  LoadElements(type, w1.data(), split, weight_type, weights, master);
  LoadElements(type, w2.data(), parameters() - split, weight_type, weights + split * SizeInBytes(weight_type),
               master + split);
  if (optimizer_on_device())
    LRMOE_RETURN_IF_ERROR(SetState(layer, expert_idx, StatePart::kMaster, master_aside));
  return in_place ? absl::OkStatus() : SetWeights(layer, expert_idx, weights_aside);
}

void PackWeights(kernels::Device& device, const LayerShape& shape, const std::byte* plain,
                 const ExpertInstance& instance) {
  using kernels::GemmKind;
  const kernels::Type type = TypeOf(shape.dtype);
  ForEachMatrix(shape, [&](int64_t n, int64_t k, int64_t at) {
    device.PackWeights(GemmKind::kForward, type, n, k, plain + at, instance.weights + at);
    device.PackWeights(GemmKind::kInputGradient, type, k, n, plain + at, instance.backward_weights + at);
  });
}

void ExpertStore::RepackWeights(int32_t layer, int32_t expert_idx) {
  if (!packed()) return;
  const ExpertInstance& instance = impl_->At(layer, expert_idx)->instance;
  ForEachMatrix(impl_->model.shape, [&](int64_t n, int64_t k, int64_t at) {
    impl_->device->RepackWeights(TypeOf(impl_->model.shape.dtype), n, k, instance.weights + at,
                                 instance.backward_weights + at);
  });
}

absl::StatusOr<std::span<const std::byte>> ExpertStore::HostWeights(int32_t layer, int32_t expert_idx,
                                                                    std::vector<std::byte>& copy) {
  const ExpertInstance& instance = impl_->At(layer, expert_idx)->instance;
  const auto bytes = static_cast<size_t>(impl_->weight_bytes());
  if (in_host_memory() && !packed()) return std::span<const std::byte>(instance.weights, bytes);
  copy.resize(bytes);
  if (packed()) {
    ForEachMatrix(impl_->model.shape, [&](int64_t n, int64_t k, int64_t at) {
      impl_->device->UnpackWeights(TypeOf(impl_->model.shape.dtype), n, k, instance.weights + at,
                                   copy.data() + at);
    });
    return std::span<const std::byte>(copy);
  }
  impl_->device->Download(copy.data(), instance.weights, impl_->weight_bytes());
  LRMOE_RETURN_IF_ERROR(impl_->device->Wait());
  return std::span<const std::byte>(copy);
}

absl::StatusOr<std::span<const float>> ExpertStore::Impl::Download(const float* values,
                                                                   std::vector<float>& copy) {
  copy.resize(parameters());
  device->Download(copy.data(), values, parameters() * static_cast<int64_t>(sizeof(float)));
  LRMOE_RETURN_IF_ERROR(device->Wait());
  return std::span<const float>(copy);
}

absl::StatusOr<std::span<const float>> ExpertStore::HostGradient(int32_t layer, int32_t expert_idx,
                                                                 std::vector<float>& copy) {
  const float* const gradient = Gradient(layer, expert_idx);
  if (!in_host_memory()) return impl_->Download(gradient, copy);
  return std::span(gradient, static_cast<size_t>(parameters()));
}

absl::StatusOr<std::span<const float>> ExpertStore::HostState(int32_t layer, int32_t expert_idx,
                                                              StatePart part, std::vector<float>& copy) {
  const std::span<const float> values = PartOf(State(layer, expert_idx), part);
  if (optimizer_on_device()) return impl_->Download(values.data(), copy);
  return values;
}

absl::Status ExpertStore::SetState(int32_t layer, int32_t expert_idx, StatePart part,
                                   std::span<const float> values) {
  const std::span<float> to = PartOf(State(layer, expert_idx), part);
  LRMOE_CHECK_EQ(values.size(), to.size());
  if (!optimizer_on_device()) {
    std::copy(values.begin(), values.end(), to.begin());
    return absl::OkStatus();
  }
  impl_->device->Upload(to.data(), values.data(), static_cast<int64_t>(values.size_bytes()));
  return impl_->device->Wait();
}

absl::Status ExpertStore::SetWeights(int32_t layer, int32_t expert_idx, std::span<const std::byte> weights) {
  LRMOE_CHECK_EQ(static_cast<int64_t>(weights.size()), impl_->weight_bytes());
  const ExpertInstance& instance = impl_->At(layer, expert_idx)->instance;
  if (packed()) {
    PackWeights(*impl_->device, impl_->model.shape, weights.data(), instance);
    return absl::OkStatus();
  }
  if (in_host_memory()) {
    std::copy(weights.begin(), weights.end(), instance.weights);
    return absl::OkStatus();
  }
  impl_->device->Upload(instance.weights, weights.data(), impl_->weight_bytes());
  return impl_->device->Wait();
}

void ExpertStore::ZeroGradients(int32_t layer) {
  for (const std::unique_ptr<Holding>& holding : impl_->At(layer).holdings)
    if (holding) holding->instance.gradient_is_zero = true;
}

float* ExpertStore::Gradient(int32_t layer, int32_t expert_idx) {
  ExpertInstance& instance = impl_->At(layer, expert_idx)->instance;
  if (std::exchange(instance.gradient_is_zero, false)) {
    if (in_host_memory())
      std::fill_n(instance.gradient, parameters(), 0.0f);
    else
      impl_->device->Fill(instance.gradient, 0, parameters() * static_cast<int64_t>(sizeof(float)));
  }
  return instance.gradient;
}

int64_t ExpertStore::bytes(int32_t layer) const {
  const int64_t forms = packed() ? 2 : 1;
  const int64_t state = optimizer_on_device() ? static_cast<int64_t>(impl_->owned.size()) *
                                                    kOptimizerBytesPerParameter * parameters()
                                              : 0;
  return impl_->At(layer).num_instances * (forms * impl_->weight_bytes() + 4 * parameters()) + state;
}

}  // namespace lrmoe::engine
