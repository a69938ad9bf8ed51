// Stores with seeded contents, directories that go away, and what a store holds as one string of bytes.
#pragma once

#include <catch2/catch.hpp>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "common/cluster.h"
#include "common/random.h"
#include "worker/engine/checkpoint.h"

namespace lrmoe::engine {

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    // In memory where there is such a place: syncing to a disk would be most of these tests' time.
    const bool in_memory = std::filesystem::is_directory("/dev/shm");
    const std::filesystem::path parent = in_memory ? "/dev/shm" : std::filesystem::temp_directory_path();
    std::string pattern = (parent / "lrmoe-checkpoint-XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

inline ModelSpec SmallModel(DataType dtype = DataType::kBf16, bool gated = true) {
  ModelSpec model;
  model.num_layers = 2;
  model.shape.num_experts = 5;
  model.shape.top_k = 2;
  model.shape.hidden_size = 6;
  model.shape.intermediate_size = 4;
  model.shape.gated = gated;
  model.shape.dtype = dtype;
  return model;
}

using Stores = std::vector<std::unique_ptr<ExpertStore>>;

// One store per rank, zeroed.
inline Stores EmptyStores(const ModelSpec& model, int32_t world_size) {
  Stores stores;
  for (int32_t rank = 0; rank < world_size; ++rank) {
    auto store = ExpertStore::Create(model, ContiguousOwners(model.shape.num_experts, world_size), rank);
    REQUIRE(store.ok());
    stores.push_back(*std::move(store));
  }
  return stores;
}

// Every expert's contents depend on seed, layer and expert only, not on the rank that holds it. All bit
// patterns occur, NaN too.
inline Stores FilledStores(const ModelSpec& model, int32_t world_size, uint64_t seed) {
  Stores stores = EmptyStores(model, world_size);
  for (auto& store : stores) {
    for (int32_t layer = 0; layer < model.num_layers; ++layer) {
      for (const int32_t expert_idx : store->owned()) {
        Random random(seed * 1000003 + layer * 1009 + expert_idx);
        auto fill = [&](void* to, size_t bytes) {
          for (size_t i = 0; i < bytes; ++i)
            static_cast<uint8_t*>(to)[i] = static_cast<uint8_t>(random.Next());
        };
        fill(store->Find(layer, expert_idx)->weights, store->parameters() * SizeInBytes(model.shape.dtype));
        const OptimizerState state = store->State(layer, expert_idx);
        for (const std::span<float> part : {state.master, state.m, state.v})
          fill(part.data(), part.size_bytes());
      }
      store->SetVersion(layer, ParameterVersion{seed % 100 + 2 + layer});
    }
    store->SetOptimizerStep(static_cast<int64_t>(seed % 100) + 1);
  }
  return stores;
}

// Everything a checkpoint must bring back, of all ranks, in expert order: equal strings, equal bits.
inline std::string Contents(const Stores& stores) {
  std::string all;
  auto append = [&](const void* from, size_t bytes) { all.append(static_cast<const char*>(from), bytes); };
  const ModelSpec& model = stores[0]->model();
  for (int32_t layer = 0; layer < model.num_layers; ++layer) {
    for (int32_t expert_idx = 0; expert_idx < model.shape.num_experts; ++expert_idx) {
      ExpertStore& store = *stores[stores[0]->owner()[expert_idx]];
      append(store.Find(layer, expert_idx)->weights, store.parameters() * SizeInBytes(model.shape.dtype));
      const OptimizerState state = store.State(layer, expert_idx);
      for (const std::span<float> part : {state.master, state.m, state.v})
        append(part.data(), part.size_bytes());
    }
    for (const auto& store : stores) {
      REQUIRE(store->version(layer) == stores[0]->version(layer));
      REQUIRE(store->optimizer_step() == stores[0]->optimizer_step());
    }
    all += std::to_string(static_cast<uint64_t>(stores[0]->version(layer))) + ";";
  }
  return all + std::to_string(stores[0]->optimizer_step());
}

inline absl::Status Save(Stores& stores, const std::string& directory, int64_t step) {
  const int32_t world_size = static_cast<int32_t>(stores.size());
  for (int32_t rank = 0; rank < world_size; ++rank) {
    absl::Status status = WriteShard(*stores[rank], directory, step, rank, world_size);
    if (!status.ok()) return status;
  }
  return CommitCheckpoint(directory, step, world_size);
}

// As the ranks of a job do: all open, then all load. The first error, or the step.
inline absl::StatusOr<int64_t> Load(Stores& stores, const std::string& directory, int64_t step) {
  std::vector<CheckpointReader> readers;
  for (auto& store : stores) {
    auto reader = CheckpointReader::Open(*store, directory, step);
    if (!reader.ok()) return reader.status();
    readers.push_back(*std::move(reader));
  }
  for (size_t rank = 0; rank < stores.size(); ++rank) {
    absl::Status status = readers[rank].Load(*stores[rank]);
    if (!status.ok()) return status;
  }
  return readers[0].step();
}

inline std::string ReadFileText(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  REQUIRE(in);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

inline void WriteFileText(const std::string& path, const std::string& text) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(text.data(), static_cast<std::streamsize>(text.size()));
  out.close();
  REQUIRE(out);
}

}  // namespace lrmoe::engine
