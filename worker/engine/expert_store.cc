#include "worker/engine/expert_store.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status_macros.h"

namespace lrmoe::engine {
namespace {

constexpr size_t kAlignment = 64;  // a cache line, and the widest vector
constexpr size_t kHugePage = size_t{2} << 20;

struct Free {
  void operator()(void* p) const { std::free(p); }
};
template <typename T>
using Buffer = std::unique_ptr<T[], Free>;

// Zeroed, so that the pages are there and not only promised. Null when memory cannot be had.
template <typename T>
Buffer<T> Allocate(int64_t count) {
  const size_t size = (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
  void* p = nullptr;
  if (posix_memalign(&p, size >= kHugePage ? kHugePage : kAlignment, size) != 0) return nullptr;
  // GEMMs read short pieces of rows that are pages apart. Whole huge pages only: not a byte more is used.
  // That the kernel gives none is no error.
  if (size >= kHugePage) (void)madvise(p, size / kHugePage * kHugePage, MADV_HUGEPAGE);
  std::memset(p, 0, size);
  return Buffer<T>(static_cast<T*>(p));
}

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

// An instance with the memory it points to. Owned experts have the three optimizer buffers, replicas have
// not.
struct Holding {
  ExpertInstance instance;
  Buffer<std::byte> weights;
  Buffer<float> gradient;
  Buffer<float> master, m, v;
};

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

  int64_t parameters() const { return model.shape.parameters_per_expert(); }

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

  // False when memory cannot be had.
  bool Add(int32_t layer, int32_t expert_idx, bool with_state) {
    auto holding = std::make_unique<Holding>();
    const int64_t n = parameters();
    holding->weights = Allocate<std::byte>(n * SizeInBytes(model.shape.dtype));
    holding->gradient = Allocate<float>(n);
    if (!holding->weights || !holding->gradient) return false;
    if (with_state) {
      holding->master = Allocate<float>(n);
      holding->m = Allocate<float>(n);
      holding->v = Allocate<float>(n);
      if (!holding->master || !holding->m || !holding->v) return false;
    }
    holding->instance = {expert_idx, holding->weights.get(), holding->gradient.get(), ParameterVersion{}};
    At(layer, expert_idx) = std::move(holding);
    ++At(layer).num_instances;
    return true;
  }
};

ExpertStore::ExpertStore(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ExpertStore::~ExpertStore() = default;

absl::StatusOr<std::unique_ptr<ExpertStore>> ExpertStore::Create(const ModelSpec& model,
                                                                 std::vector<int32_t> owner, int32_t rank) {
  LRMOE_RETURN_IF_ERROR(Validate(model));
  if (static_cast<int64_t>(owner.size()) != model.shape.num_experts)
    return absl::InvalidArgumentError(absl::StrCat(
        "owner has ", owner.size(), " experts; allowed: num_experts = ", model.shape.num_experts));
  auto impl = std::make_unique<Impl>();
  impl->model = model;
  impl->rank = rank;
  for (int32_t expert_idx = 0; expert_idx < model.shape.num_experts; ++expert_idx) {
    if (owner[expert_idx] == rank) impl->owned.push_back(expert_idx);
  }
  impl->owner = std::move(owner);
  impl->layers.resize(model.num_layers);
  for (int32_t layer = 0; layer < model.num_layers; ++layer) {
    impl->layers[layer].holdings.resize(model.shape.num_experts);
    for (int32_t expert_idx : impl->owned) {
      if (!impl->Add(layer, expert_idx, /*with_state=*/true))
        return absl::ResourceExhaustedError(absl::StrCat(
            "rank ", rank, ": no memory for layer ", layer, " expert ", expert_idx, " (", impl->parameters(),
            " parameters, ", impl->owned.size(), " experts per layer, ", model.num_layers, " layers)"));
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

ExpertInstance* ExpertStore::Find(int32_t layer, int32_t expert_idx) {
  const std::unique_ptr<Holding>& holding = impl_->At(layer, expert_idx);
  return holding ? &holding->instance : nullptr;
}

OptimizerState ExpertStore::State(int32_t layer, int32_t expert_idx) {
  const std::unique_ptr<Holding>& holding = impl_->At(layer, expert_idx);
  LRMOE_CHECK_EQ(impl_->owner[expert_idx], impl_->rank);
  const size_t n = parameters();
  return {{holding->master.get(), n}, {holding->m.get(), n}, {holding->v.get(), n}};
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
  if (!holding) LRMOE_CHECK(impl_->Add(layer, expert_idx, /*with_state=*/false));
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
  LoadElements(type, w1.data(), split, weight_type, holding.weights.get(), holding.master.get());
  LoadElements(type, w2.data(), parameters() - split, weight_type,
               holding.weights.get() + split * SizeInBytes(weight_type), holding.master.get() + split);
  return absl::OkStatus();
}

void ExpertStore::ZeroGradients(int32_t layer) {
  for (const std::unique_ptr<Holding>& holding : impl_->At(layer).holdings) {
    if (holding) std::fill_n(holding->gradient.get(), parameters(), 0.0f);
  }
}

int64_t ExpertStore::bytes(int32_t layer) const {
  return impl_->At(layer).num_instances * parameters() * (SizeInBytes(impl_->model.shape.dtype) + 4);
}

}  // namespace lrmoe::engine
