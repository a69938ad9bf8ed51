// Damaged checkpoints are refused whole: the file is named and nothing in the store has changed.
#include "tests/unit/checkpoint/fixture.h"

namespace lrmoe::engine {
namespace {

struct Damaged {
  TemporaryDirectory directory;
  std::string path;  // of the checkpoint
  std::vector<std::string> files;

  Damaged() {
    Stores saved = FilledStores(SmallModel(), 2, 42);
    REQUIRE(Save(saved, directory.path(), 8).ok());
    path = directory.path() + "/step-8";
    for (const auto& entry : std::filesystem::directory_iterator(path))
      files.push_back(entry.path().string());
    std::sort(files.begin(), files.end());
    REQUIRE(files.size() == 5);
  }
};

void RequireRefused(const Damaged& damaged, const std::string& file, int32_t world_size = 3) {
  Stores stores = FilledStores(SmallModel(), world_size, 7);
  const std::string before = Contents(stores);
  const absl::Status status = Load(stores, damaged.directory.path(), -1).status();
  INFO(status.ToString());
  REQUIRE(status.code() == absl::StatusCode::kDataLoss);
  REQUIRE(std::string(status.message()).find(file) != std::string::npos);
  REQUIRE(Contents(stores) == before);
}

TEST_CASE("a flipped bit anywhere is noticed", "[checkpoint]") {
  const Damaged damaged;
  Random random(1);
  for (const std::string& file : damaged.files) {
    const std::string good = ReadFileText(file);
    for (int trial = 0; trial < 150; ++trial) {
      std::string bad = good;
      const size_t at = trial < 20 ? trial : random.Below(good.size());
      bad[at] = static_cast<char>(bad[at] ^ (1 << random.Below(8)));
      INFO(file << ", byte " << at);
      WriteFileText(file, bad);
      RequireRefused(damaged, file, static_cast<int32_t>(random.Between(1, 3)));
    }
    WriteFileText(file, good);
  }
  Stores stores = EmptyStores(SmallModel(), 1);
  REQUIRE(Load(stores, damaged.directory.path(), -1).ok());
}

TEST_CASE("a file that is cut, grown, missing or not a file is noticed", "[checkpoint]") {
  const Damaged damaged;
  Random random(2);
  for (const std::string& file : damaged.files) {
    const std::string good = ReadFileText(file);
    for (int trial = 0; trial < 60; ++trial) {
      const size_t keep = trial < 10 ? trial : random.Below(good.size());
      INFO(file << " cut to " << keep);
      WriteFileText(file, good.substr(0, keep));
      RequireRefused(damaged, file);
    }
    WriteFileText(file, good + '\0');
    RequireRefused(damaged, file);
    std::filesystem::remove(file);
    RequireRefused(damaged, file);
    // Files of two shards exchanged: each is whole, but not the right one.
    for (const std::string& other : damaged.files) {
      if (other == file) continue;
      WriteFileText(file, ReadFileText(other));
      RequireRefused(damaged, file);
    }
    WriteFileText(file, good);
  }
  std::filesystem::remove(damaged.files[1]);
  std::filesystem::create_directory(damaged.files[1]);
  Stores stores = EmptyStores(SmallModel(), 1);
  CHECK(Load(stores, damaged.directory.path(), -1).status().code() == absl::StatusCode::kFailedPrecondition);
}

TEST_CASE("a manifest with a right checksum and wrong values is refused", "[checkpoint]") {
  const Damaged damaged;
  const std::string path = damaged.path + "/manifest.json";
  const auto good = ReadManifest(path);
  REQUIRE(good.ok());
  auto refused = [&](const char* part, const std::function<void(Manifest&)>& change) {
    Manifest manifest = *good;
    change(manifest);
    REQUIRE(WriteManifest(path, manifest).ok());
    RequireRefused(damaged, part);
  };
  refused("is of step 9", [](Manifest& m) { m.identity.step = 9; });
  refused("step must be", [](Manifest& m) { m.identity.step = -9; });
  refused("versions", [](Manifest& m) { m.identity.versions.pop_back(); });
  refused("below 1", [](Manifest& m) { m.identity.versions[0] = 0; });
  refused("top_k", [](Manifest& m) { m.identity.model.shape.top_k = 0; });
  refused("num_layers", [](Manifest& m) { m.identity.model.num_layers = 2000; });
  refused("without directories", [](Manifest& m) { m.shards[0].weights.name = "../secret"; });
  refused("without directories", [](Manifest& m) { m.shards[0].weights.name = ""; });
  refused("must be 2", [](Manifest& m) { m.shards.pop_back(); });
  refused("in 0 shards", [](Manifest& m) { m.shards[0].experts.pop_back(); });
  refused("in 2 shards", [](Manifest& m) { m.shards[0].experts = {0, 1, 2, 3, 4}; });
  refused("not in 0..4", [](Manifest& m) { m.shards[0].experts.push_back(5); });
  refused("ascending", [](Manifest& m) { m.shards[0].experts = {1, 0}; });
  refused("says it is of rank", [](Manifest& m) { std::swap(m.shards[0], m.shards[1]); });
  refused("is missing", [](Manifest& m) { std::swap(m.shards[0].experts, m.shards[1].experts); });
  refused("bytes must be", [](Manifest& m) { m.shards[1].optimizer.sum.bytes = -1; });
}

}  // namespace
}  // namespace lrmoe::engine
