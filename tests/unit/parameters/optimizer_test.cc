#include <catch2/catch.hpp>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "common/random.h"
#include "worker/engine/optimizer.h"

namespace lrmoe::engine {
namespace {

using namespace std::chrono_literals;

std::unique_ptr<ExpertStore> MakeStore(DataType dtype) {
  ModelSpec spec;
  spec.num_layers = 3;
  spec.shape = {.num_experts = 4, .top_k = 2, .hidden_size = 16, .intermediate_size = 24, .dtype = dtype};
  auto store = ExpertStore::Create(spec, {0, 1, 0, 0}, 0);
  REQUIRE(store.ok());
  for (int32_t layer = 0; layer < 3; ++layer) {
    Random random(layer);
    for (int32_t expert_idx : (*store)->owned()) {
      for (float& value : (*store)->State(layer, expert_idx).master)
        value = static_cast<float>(random.Uniform());
      for (int64_t i = 0; i < (*store)->parameters(); ++i)
        (*store)->Find(layer, expert_idx)->gradient[i] = static_cast<float>(random.Uniform() - 0.5);
    }
    (*store)->SetVersion(layer, ParameterVersion{1});
  }
  return std::move(store).value();
}

std::unique_ptr<kernels::Device> MakeDevice() {
  return std::move(kernels::CreateCpuDevice(1)).value();
}

// Forwards to a real device, but AdamW waits until the gate opens.
class GatedDevice : public kernels::Device {
 public:
  struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool open = false;
    void Open() {
      std::lock_guard lock(mutex);
      open = true;
      changed.notify_all();
    }
  };
  explicit GatedDevice(Gate* gate) : gate_(gate), real_(MakeDevice()) {}

  absl::string_view gemm_path() const override { return real_->gemm_path(); }
  void AdamW(const AdamWStep& step, int64_t n, float* master, float* m, float* v, const float* gradient,
             kernels::Type type, void* weights) override {
    std::unique_lock lock(gate_->mutex);
    gate_->changed.wait(lock, [this] { return gate_->open; });
    real_->AdamW(step, n, master, m, v, gradient, type, weights);
  }

  absl::Status GroupedGemm(kernels::GemmKind, kernels::Type, int64_t, int64_t,
                           std::span<const kernels::GemmGroup>) override {
    return absl::UnimplementedError("not used by the queue");
  }
  void ActivationForward(kernels::ExpertActivation, kernels::Type, int64_t, int64_t, const void*, void*,
                         float*) override {
    FAIL();
  }
  void ActivationBackward(kernels::ExpertActivation, kernels::Type, int64_t, int64_t, const void*,
                          const void*, const float*, void*, void*, float*) override {
    FAIL();
  }
  void GatherRows(kernels::Type, int64_t, const void*, std::span<const int32_t>, void*) override { FAIL(); }
  void CombineRows(kernels::Type, int64_t, int64_t, int32_t, const void*, const int32_t*, const float*,
                   void*) override {
    FAIL();
  }
  void SumRows(kernels::Type, int64_t, const void*, std::span<const int32_t>, std::span<const int64_t>,
               void*) override {
    FAIL();
  }
  void RowNorm2(kernels::Type, int64_t, int64_t, const void*, float*) override { FAIL(); }
  void RowAbsSum(kernels::Type, int64_t, int64_t, const void*, float*) override { FAIL(); }
  void RowDot(kernels::Type, int64_t, const void*, std::span<const int32_t>, const void*,
              std::span<const int32_t>, float*) override {
    FAIL();
  }
  double SquaredNorm(int64_t n, const float* values) override { return real_->SquaredNorm(n, values); }
  void AddInPlace(int64_t, float*, const float*) override { FAIL(); }
  void Fp32ToBf16(int64_t, const float*, kernels::Bf16*) override { FAIL(); }
  void Bf16ToFp32(int64_t, const kernels::Bf16*, float*) override { FAIL(); }

 private:
  Gate* const gate_;
  const std::unique_ptr<kernels::Device> real_;
};

TEST_CASE("the queue writes packed weights that are the plain ones", "[optimizer]") {
  const auto device = MakeDevice();
  for (DataType dtype : {DataType::kBf16, DataType::kFp32}) {
    if (!device->PacksWeights(TypeOf(dtype))) continue;
    std::vector<std::unique_ptr<ExpertStore>> stores;  // packed, plain
    for (const bool packed : {true, false}) {
      ModelSpec spec;
      spec.num_layers = 1;
      spec.shape = {
          .num_experts = 2, .top_k = 1, .hidden_size = 64, .intermediate_size = 128, .dtype = dtype};
      auto store = ExpertStore::Create(spec, {0, 0}, 0, device.get(), {.packed = packed});
      REQUIRE(store.ok());
      Random random(5);
      for (int32_t expert_idx : {0, 1}) {
        for (float& value : (*store)->State(0, expert_idx).master)
          value = static_cast<float>(random.Uniform());
        for (int64_t i = 0; i < (*store)->parameters(); ++i)
          (*store)->Find(0, expert_idx)->gradient[i] = static_cast<float>(random.Uniform() - 0.5);
      }
      (*store)->SetVersion(0, ParameterVersion{1});
      auto queue = OptimizerQueue::Create(store->get(), MakeDevice());
      REQUIRE(queue.ok());
      (*queue)->Enqueue(0, {.step = 1, .lr = 0.01});
      REQUIRE((*queue)->Wait(After(60s)).ok());
      stores.push_back(*std::move(store));
    }
    for (int32_t expert_idx : {0, 1}) {
      std::vector<std::byte> copy;
      const auto packed = stores[0]->HostWeights(0, expert_idx, copy);
      const ExpertInstance& plain = *stores[1]->Find(0, expert_idx);
      REQUIRE(packed.ok());
      CHECK(std::equal(packed->begin(), packed->end(), plain.weights));
    }
  }
}

TEST_CASE("the queue updates every owned expert as the device would", "[optimizer]") {
  for (DataType dtype : {DataType::kBf16, DataType::kFp32}) {
    const auto store = MakeStore(dtype), twin = MakeStore(dtype);
    const auto device = MakeDevice();
    auto queue = OptimizerQueue::Create(store.get(), MakeDevice());
    REQUIRE(queue.ok());
    const auto type = TypeOf(dtype);
    for (int64_t step = 1; step <= 3; ++step) {
      const AdamWStep adamw{.step = step, .lr = 0.01};
      for (int32_t layer : {2, 0}) (*queue)->Enqueue(layer, adamw);
      REQUIRE((*queue)->Wait(After(60s)).ok());
      for (int32_t layer = 0; layer < 3; ++layer) {
        CHECK(store->version(layer) == ParameterVersion{layer == 1 ? uint64_t{1} : 1 + step});
        for (int32_t expert_idx : twin->owned()) {
          const OptimizerState want = twin->State(layer, expert_idx), got = store->State(layer, expert_idx);
          ExpertInstance* expert = twin->Find(layer, expert_idx);
          if (layer != 1)
            device->AdamW(adamw, twin->parameters(), want.master.data(), want.m.data(), want.v.data(),
                          expert->gradient, type, expert->weights);
          REQUIRE(std::equal(got.master.begin(), got.master.end(), want.master.begin()));
          REQUIRE(std::equal(got.v.begin(), got.v.end(), want.v.begin()));
          REQUIRE(std::equal(expert->weights, expert->weights + twin->parameters() * SizeInBytes(dtype),
                             store->Find(layer, expert_idx)->weights));
          REQUIRE(store->Find(layer, expert_idx)->gradient[3] == expert->gradient[3]);  // nothing is zeroed
        }
      }
    }
  }
}

TEST_CASE("a wait past its deadline names the layer and can be repeated", "[optimizer]") {
  const auto store = MakeStore(DataType::kBf16);
  GatedDevice::Gate gate;
  auto queue = OptimizerQueue::Create(store.get(), std::make_unique<GatedDevice>(&gate));
  REQUIRE(queue.ok());
  REQUIRE((*queue)->Wait(After(0s)).ok());  // empty: nothing to wait for
  (*queue)->Enqueue(1, {});
  (*queue)->Enqueue(2, {});
  const absl::Status late = (*queue)->Wait(After(0s));
  CHECK(late.code() == absl::StatusCode::kDeadlineExceeded);
  CHECK(late.message() == "optimizer update of layer 1 not done in time; 2 layers left");
  CHECK(store->version(1) == ParameterVersion{1});
  gate.Open();
  REQUIRE((*queue)->Wait(After(60s)).ok());
  CHECK(store->version(0) == ParameterVersion{1});
  CHECK(store->version(1) == ParameterVersion{2});
  CHECK(store->version(2) == ParameterVersion{2});
}

TEST_CASE("destruction drains the queue", "[optimizer]") {
  const auto store = MakeStore(DataType::kFp32);
  const float before = store->State(0, 0).master[0];
  {
    auto queue = OptimizerQueue::Create(store.get(), MakeDevice());
    REQUIRE(queue.ok());
    for (int32_t layer = 0; layer < 3; ++layer) (*queue)->Enqueue(layer, {});
  }
  CHECK(store->State(0, 0).master[0] != before);
  CHECK(store->State(2, 3).m[0] != 0);
}

}  // namespace
}  // namespace lrmoe::engine
