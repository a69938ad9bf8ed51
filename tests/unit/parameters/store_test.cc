#include <catch2/catch.hpp>
#include <cstring>
#include <vector>

#include "common/random.h"
#include "worker/engine/expert_store.h"

namespace lrmoe::engine {
namespace {

ModelSpec Spec(DataType dtype) {
  ModelSpec spec;
  spec.num_layers = 2;
  spec.shape = {.num_experts = 5, .top_k = 2, .hidden_size = 3, .intermediate_size = 7, .dtype = dtype};
  return spec;
}

std::unique_ptr<ExpertStore> MakeStore(DataType dtype) {
  auto store = ExpertStore::Create(Spec(dtype), {0, 1, 0, 1, 2}, 0);
  REQUIRE(store.ok());
  return std::move(store).value();
}

template <typename T>
std::span<const std::byte> Bytes(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

TEST_CASE("a new store holds the owned experts, zeroed and without weights", "[store]") {
  const auto store = MakeStore(DataType::kBf16);
  CHECK(store->owned() == std::vector<int32_t>{0, 2});
  CHECK(store->parameters() == 3 * 7 * 3);
  CHECK(store->w2_offset() == 2 * 7 * 3);
  CHECK(store->version(0) == ParameterVersion{0});
  for (int32_t layer : {0, 1}) {
    CHECK(store->bytes(layer) == 2 * 63 * (2 + 4));
    CHECK(store->Find(layer, 1) == nullptr);
    CHECK(store->Replicas(layer).empty());
    for (int32_t expert_idx : store->owned()) {
      const ExpertInstance* instance = store->Find(layer, expert_idx);
      REQUIRE(instance != nullptr);
      CHECK(instance->expert_idx == expert_idx);
      CHECK(reinterpret_cast<uintptr_t>(instance->weights) % 64 == 0);
      CHECK(reinterpret_cast<uintptr_t>(instance->gradient) % 64 == 0);
      const OptimizerState state = store->State(layer, expert_idx);
      CHECK((state.master.size() == 63 && state.m.size() == 63 && state.v.size() == 63));
      for (int64_t i = 0; i < 63; ++i)
        CHECK((instance->gradient[i] == 0 && state.m[i] == 0 && state.v[i] == 0));
    }
  }
}

TEST_CASE("a store that packs gives back what was put in, and holds both forms") {
  const auto device = std::move(kernels::CreateCpuDevice(1)).value();
  for (const DataType dtype : {DataType::kBf16, DataType::kFp32}) {
    const auto type = TypeOf(dtype);
    if (!device->PacksWeights(type)) continue;
    ModelSpec spec = Spec(dtype);
    spec.shape.hidden_size = 128;
    spec.shape.intermediate_size = 64;
    const auto made = ExpertStore::Create(spec, {0, 1, 0, 1, 2}, 0, device.get(), {.packed = true});
    REQUIRE(made.ok());
    ExpertStore& store = **made;
    const int64_t parameters = store.parameters(), bytes = parameters * SizeInBytes(dtype);
    CHECK(store.bytes(0) == 2 * (2 * bytes + 4 * parameters));
    Random random(3);
    std::vector<float> values(parameters);
    for (float& value : values) value = static_cast<float>(random.Below(256)) - 128;  // exact in bf16
    const auto w1 = Bytes(values).first(4 * store.w2_offset()),
               w2 = Bytes(values).subspan(4 * store.w2_offset());
    REQUIRE(store.Load(0, 2, DataType::kFp32, w1, w2).ok());
    std::vector<std::byte> copy, plain;
    const auto held = store.HostWeights(0, 2, copy);
    REQUIRE(held.ok());
    plain.assign(held->begin(), held->end());
    for (int64_t i = 0; i < parameters; ++i) {
      uint32_t bits = 0;
      std::memcpy(reinterpret_cast<char*>(&bits) + 4 - SizeInBytes(dtype), &plain[i * SizeInBytes(dtype)],
                  SizeInBytes(dtype));
      float value;
      std::memcpy(&value, &bits, 4);
      REQUIRE(value == values[i]);
    }
    // A replica that got the forward form has the same weights, and makes the backward form of it.
    const ExpertInstance& owned = *store.Find(0, 2);
    const ExpertInstance& replica = store.AddReplica(0, 1);
    std::copy_n(owned.weights, bytes, replica.weights);
    store.RepackWeights(0, 1);
    CHECK(std::equal(owned.backward_weights, owned.backward_weights + bytes, replica.backward_weights));
    CHECK_FALSE(std::equal(owned.weights, owned.weights + bytes, owned.backward_weights));
    REQUIRE(store.SetWeights(0, 1, plain).ok());
    CHECK(std::equal(owned.backward_weights, owned.backward_weights + bytes, replica.backward_weights));
    CHECK(std::equal(owned.weights, owned.weights + bytes, replica.weights));
  }
}

TEST_CASE("loading sets weights and master, from either type into either type", "[store]") {
  Random random(1);
  for (DataType dtype : {DataType::kBf16, DataType::kFp32}) {
    for (DataType from : {DataType::kBf16, DataType::kFp32}) {
      const auto store = MakeStore(dtype);
      std::vector<float> values(63);
      for (float& value : values) value = static_cast<float>(random.Uniform() - 0.5);
      std::vector<uint16_t> halves(63);
      for (int i = 0; i < 63; ++i) {
        uint32_t bits;
        std::memcpy(&bits, &values[i], 4);
        halves[i] = static_cast<uint16_t>(bits >> 16);
        if (from == DataType::kBf16) bits &= 0xFFFF0000u;
        std::memcpy(&values[i], &bits, 4);
      }
      const auto source = from == DataType::kBf16 ? Bytes(halves) : Bytes(values);
      const size_t split = 42 * SizeInBytes(from);
      REQUIRE(store->Load(1, 2, from, source.first(split), source.subspan(split)).ok());
      const ExpertInstance* instance = store->Find(1, 2);
      const OptimizerState state = store->State(1, 2);
      for (int i = 0; i < 63; ++i) {
        REQUIRE(state.master[i] == values[i]);
        float weight;
        if (dtype == DataType::kFp32) {
          std::memcpy(&weight, instance->weights + 4 * i, 4);
          REQUIRE(weight == values[i]);
        } else {
          uint16_t half;
          std::memcpy(&half, instance->weights + 2 * i, 2);
          const uint32_t bits = uint32_t{half} << 16;
          std::memcpy(&weight, &bits, 4);
          REQUIRE(std::abs(weight - values[i]) <= std::abs(values[i]) / 256);
        }
      }
      CHECK(store->State(0, 2).master[0] == 0);
    }
  }
}

TEST_CASE("loading refuses what does not fit, by name", "[store]") {
  const auto store = MakeStore(DataType::kFp32);
  const std::vector<float> w1(42), w2(21), wrong(20);
  const auto code = [&](int32_t layer, int32_t expert_idx, const auto& first, const auto& second) {
    return store->Load(layer, expert_idx, DataType::kFp32, Bytes(first), Bytes(second)).code();
  };
  CHECK(code(0, 0, w1, w2) == absl::StatusCode::kOk);
  CHECK(code(0, 0, w1, wrong) == absl::StatusCode::kInvalidArgument);
  CHECK(code(0, 0, w2, w1) == absl::StatusCode::kInvalidArgument);
  CHECK(code(0, 1, w1, w2) == absl::StatusCode::kInvalidArgument);
  CHECK(code(0, 5, w1, w2) == absl::StatusCode::kInvalidArgument);
  CHECK(code(0, -1, w1, w2) == absl::StatusCode::kInvalidArgument);
  CHECK(code(2, 0, w1, w2) == absl::StatusCode::kInvalidArgument);
  const absl::Status status = store->Load(0, 0, DataType::kBf16, Bytes(w1), Bytes(w2));
  CHECK(status.message() == "w1 has 168 bytes; allowed: 84");
}

TEST_CASE("replicas come and go; their bytes count", "[store]") {
  const auto store = MakeStore(DataType::kBf16);
  const int64_t one = 63 * (2 + 4);
  ExpertInstance& replica = store->AddReplica(1, 3);
  CHECK(replica.expert_idx == 3);
  CHECK(replica.version == ParameterVersion{0});
  replica.version = ParameterVersion{4};
  replica.gradient[5] = 1;
  CHECK(&store->AddReplica(1, 3) == &replica);
  CHECK(&store->AddReplica(1, 0) == store->Find(1, 0));  // an owned expert is there already
  store->AddReplica(1, 1);
  CHECK(store->Replicas(1) == std::vector<int32_t>{1, 3});
  CHECK(store->Replicas(0).empty());
  CHECK(store->bytes(1) == 4 * one);
  CHECK(store->bytes(0) == 2 * one);
  store->Find(1, 2)->gradient[62] = 7;
  store->ZeroGradients(1);
  CHECK(store->Find(1, 3)->gradient_is_zero);
  CHECK(store->Gradient(1, 3)[5] == 0);
  CHECK(store->Gradient(1, 2)[62] == 0);
  store->Gradient(1, 2)[62] = 7;
  CHECK(store->Gradient(1, 2)[62] == 7);  // zeros are written once
  CHECK(store->Find(1, 3)->version == ParameterVersion{4});
  store->DropReplica(1, 3);
  store->DropReplica(1, 3);
  CHECK(store->Find(1, 3) == nullptr);
  CHECK(store->bytes(1) == 3 * one);
  CHECK(store->AddReplica(1, 3).version == ParameterVersion{0});
}

TEST_CASE("versions belong to a layer's owned experts", "[store]") {
  const auto store = MakeStore(DataType::kBf16);
  store->AddReplica(0, 1);
  store->SetVersion(0, ParameterVersion{3});
  CHECK(store->version(0) == ParameterVersion{3});
  CHECK(store->version(1) == ParameterVersion{0});
  CHECK(store->Find(0, 2)->version == ParameterVersion{3});
  CHECK(store->Find(0, 1)->version == ParameterVersion{0});
  store->SetOptimizerStep(9);
  CHECK(store->optimizer_step() == 9);
}

TEST_CASE("a store of a bad model is refused", "[store]") {
  ModelSpec spec = Spec(DataType::kBf16);
  CHECK(ExpertStore::Create(spec, {0, 1}, 0).status().code() == absl::StatusCode::kInvalidArgument);
  spec.num_layers = 0;
  CHECK(ExpertStore::Create(spec, {0, 1, 0, 1, 2}, 0).status().code() == absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace lrmoe::engine
