#include "nlohmann/json.hpp"
#include "tests/unit/checkpoint/fixture.h"

namespace lrmoe::engine {
namespace {

void CheckFails(const absl::Status& status, absl::StatusCode code, const std::string& part) {
  INFO(status.ToString());
  CHECK(status.code() == code);
  CHECK_THAT(std::string(status.message()), Catch::Contains(part));
}

TEST_CASE("a checkpoint comes back bit for bit, on any number of ranks", "[checkpoint]") {
  for (const DataType dtype : {DataType::kBf16, DataType::kFp32}) {
    for (const bool gated : {true, false}) {
      const ModelSpec model = SmallModel(dtype, gated);
      for (const auto& [saved_on, loaded_on] :
           {std::pair{1, 1}, {2, 2}, {1, 3}, {4, 2}, {3, 5}, {7, 2}, {2, 7}}) {  // seven: some own nothing
        INFO(Describe(model) << ", saved on " << saved_on << ", loaded on " << loaded_on);
        const TemporaryDirectory directory;
        Stores saved = FilledStores(model, saved_on, 42);
        REQUIRE(Save(saved, directory.path(), 300).ok());
        Stores loaded = FilledStores(model, loaded_on, 7);
        const absl::StatusOr<int64_t> step = Load(loaded, directory.path(), -1);
        REQUIRE(step.status().ToString() == "OK");
        CHECK(*step == 300);
        CHECK(Contents(loaded) == Contents(saved));
      }
    }
  }
}

TEST_CASE("the newest step is found by number, an older one by name", "[checkpoint]") {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/made/on/the/way";
  for (const int64_t step : {9, 100, 20}) {
    Stores stores = FilledStores(SmallModel(), 2, step);
    REQUIRE(Save(stores, path, step).ok());
  }
  for (const char* name : {"step-0200", "step-", "step-x", "step-101.tmp", "step--5", "other"}) {
    std::filesystem::create_directory(path + "/" + name);
  }
  Stores loaded = EmptyStores(SmallModel(), 2);
  CHECK(Load(loaded, path, -1).value() == 100);
  CHECK(Load(loaded, path, 9).value() == 9);
  CHECK(Contents(loaded) == Contents(FilledStores(SmallModel(), 2, 9)));
  CheckFails(Load(loaded, path, 10).status(), absl::StatusCode::kNotFound, "step-10: no such checkpoint");
}

TEST_CASE("saving a step again replaces it, also on another number of ranks", "[checkpoint]") {
  const TemporaryDirectory directory;
  Stores first = FilledStores(SmallModel(), 3, 1), second = FilledStores(SmallModel(), 2, 2);
  REQUIRE(Save(first, directory.path(), 5).ok());
  // A save of more ranks that crashed leaves its shards behind.
  REQUIRE(WriteShard(*first[2], directory.path(), 5, 2, 3).ok());
  REQUIRE(WriteShard(*first[1], directory.path(), 6, 1, 3).ok());
  REQUIRE(Save(second, directory.path(), 5).ok());
  Stores loaded = EmptyStores(SmallModel(), 1);
  REQUIRE(Load(loaded, directory.path(), -1).ok());
  CHECK(Contents(loaded) == Contents(second));
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory.path())) {
    names.push_back(std::filesystem::relative(entry.path(), directory.path()).string());
  }
  std::sort(names.begin(), names.end());
  CHECK(names == std::vector<std::string>{
                     "step-5", "step-5/manifest.json", "step-5/model-00000-of-00002.safetensors",
                     "step-5/model-00001-of-00002.safetensors", "step-5/optimizer-00000-of-00002.safetensors",
                     "step-5/optimizer-00001-of-00002.safetensors"});
}

TEST_CASE("loading drops replicas and zeroes gradients", "[checkpoint]") {
  const TemporaryDirectory directory;
  Stores saved = FilledStores(SmallModel(), 2, 3);
  REQUIRE(Save(saved, directory.path(), 1).ok());
  Stores loaded = EmptyStores(SmallModel(), 2);
  const int32_t foreign = loaded[1]->owned()[0], own = loaded[0]->owned()[0];
  loaded[0]->AddReplica(1, foreign);
  loaded[0]->Find(1, own)->gradient[3] = 5.0f;
  REQUIRE(Load(loaded, directory.path(), 1).ok());
  CHECK(loaded[0]->Find(1, foreign) == nullptr);
  CHECK(loaded[0]->Gradient(1, own)[3] == 0.0f);
  CHECK(loaded[0]->Find(1, own)->version == saved[0]->version(1));
}

TEST_CASE("another model is refused, naming both", "[checkpoint]") {
  const TemporaryDirectory directory;
  Stores saved = FilledStores(SmallModel(), 1, 3);
  REQUIRE(Save(saved, directory.path(), 1).ok());
  std::vector<ModelSpec> others(6, SmallModel());
  others[0].num_layers = 3;
  others[1].shape.num_experts = 6;
  others[2].shape.hidden_size = 8;
  others[3].shape.intermediate_size = 8;
  others[4].shape.gated = false;
  others[5].shape.dtype = DataType::kFp32;
  for (const ModelSpec& other : others) {
    Stores stores = FilledStores(other, 1, 8);
    const std::string before = Contents(stores);
    const absl::Status status = Load(stores, directory.path(), 1).status();
    CheckFails(status, absl::StatusCode::kFailedPrecondition, Describe(SmallModel()));
    CheckFails(status, absl::StatusCode::kFailedPrecondition, Describe(other));
    CHECK(Contents(stores) == before);
  }
}

TEST_CASE("what cannot be saved or committed says why", "[checkpoint]") {
  const TemporaryDirectory directory;
  Stores stores = EmptyStores(SmallModel(), 2);
  CheckFails(WriteShard(*stores[0], directory.path(), 1, 0, 2), absl::StatusCode::kFailedPrecondition,
             "layer 0");
  stores = FilledStores(SmallModel(), 2, 1);
  CheckFails(WriteShard(*stores[0], directory.path(), -1, 0, 2), absl::StatusCode::kInvalidArgument,
             "step is -1");
  CheckFails(WriteShard(*stores[0], "/proc/no-such-place", 1, 0, 2), absl::StatusCode::kNotFound,
             "/proc/no-such-place");
  REQUIRE(WriteShard(*stores[0], directory.path(), 1, 0, 2).ok());
  CheckFails(CommitCheckpoint(directory.path(), 1, 2), absl::StatusCode::kNotFound, "shard-00001.json");
  // The second rank writes the experts of the first.
  REQUIRE(WriteShard(*stores[0], directory.path(), 1, 1, 2).ok());
  CheckFails(CommitCheckpoint(directory.path(), 1, 2), absl::StatusCode::kDataLoss, "is in 2 shards");
  stores[1]->SetOptimizerStep(77);
  REQUIRE(WriteShard(*stores[1], directory.path(), 1, 1, 2).ok());
  CheckFails(CommitCheckpoint(directory.path(), 1, 2), absl::StatusCode::kFailedPrecondition,
             "optimizer step 77");
  CheckFails(CommitCheckpoint(directory.path(), 1, 1), absl::StatusCode::kFailedPrecondition, "of 2 ranks");
  CheckFails(Load(stores, directory.path(), -1).status(), absl::StatusCode::kNotFound, "holds no checkpoint");
  CheckFails(Load(stores, directory.path() + "/none", -1).status(), absl::StatusCode::kNotFound, "none");
}

// A second reader, as short as the format's description allows.
TEST_CASE("the files are safetensors with Hugging Face names", "[checkpoint]") {
  const TemporaryDirectory directory;
  Stores stores = FilledStores(SmallModel(), 1, 3);
  ExpertStore& store = *stores[0];
  REQUIRE(Save(stores, directory.path(), 1).ok());
  const LayerShape& shape = store.model().shape;
  const int64_t f = shape.intermediate_size, h = shape.hidden_size;
  auto read = [&](const std::string& file) {
    const std::string text = ReadFileText(directory.path() + "/step-1/" + file);
    uint64_t length = 0;
    std::memcpy(&length, text.data(), 8);
    CHECK(length % 8 == 0);
    return std::pair(nlohmann::json::parse(text.substr(8, length)), text.substr(8 + length));
  };
  const auto [header, data] = read("model-00000-of-00001.safetensors");
  CHECK(header["__metadata__"]["format"] == "pt");
  CHECK(header.size() == 1 + 2 * 5 * 3);
  auto expect = [&](const nlohmann::json& entry, const std::string& all, std::vector<int64_t> dims,
                    const char* dtype, const void* wanted) {
    CHECK(entry["dtype"] == dtype);
    CHECK(entry["shape"] == dims);
    const size_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
    CHECK(end - begin == size_t(dims[0] * dims[1]) * (std::string(dtype) == "BF16" ? 2 : 4));
    CHECK(std::memcmp(all.data() + begin, wanted, end - begin) == 0);
  };
  const std::byte* const weights = store.Find(1, 3)->weights;
  const std::string name = "model.layers.1.mlp.experts.3.";
  expect(header[name + "gate_proj.weight"], data, {f, h}, "BF16", weights);
  expect(header[name + "up_proj.weight"], data, {f, h}, "BF16", weights + 2 * f * h);
  expect(header[name + "down_proj.weight"], data, {h, f}, "BF16", weights + 2 * store.w2_offset());
  const auto [fp32, fp32_data] = read("optimizer-00000-of-00001.safetensors");
  CHECK(fp32.size() == 1 + 2 * 5 * 9);
  const OptimizerState state = store.State(1, 3);
  expect(fp32[name + "gate_proj.weight.master"], fp32_data, {f, h}, "F32", state.master.data());
  expect(fp32[name + "up_proj.weight.exp_avg"], fp32_data, {f, h}, "F32", state.m.data() + f * h);
  expect(fp32[name + "down_proj.weight.exp_avg_sq"], fp32_data, {h, f}, "F32",
         state.v.data() + store.w2_offset());
}

}  // namespace
}  // namespace lrmoe::engine
