// What a checkpoint says about itself. A manifest is a JSON file sealed by a checksum over its own text, so
// that any altered byte is noticed; it lists the checksums of all other files.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/layer_shape.h"
#include "worker/engine/durable_file.h"

namespace lrmoe::engine {

struct ListedFile {
  std::string name;  // without directories
  FileSum sum;
  bool operator==(const ListedFile&) const = default;
};

// What one rank wrote.
struct ShardEntry {
  int32_t rank = 0;
  std::vector<int32_t> experts;  // in every layer alike, ascending
  ListedFile weights;            // compute type
  ListedFile optimizer;          // fp32 masters and moments
  bool operator==(const ShardEntry&) const = default;
};

// What all shards of a checkpoint share.
struct CheckpointIdentity {
  int64_t step = 0;
  int32_t world_size = 0;
  ModelSpec model;
  int64_t optimizer_step = 0;
  std::vector<uint64_t> versions;  // parameter version of each layer
  bool operator==(const CheckpointIdentity&) const = default;
};

struct Manifest {
  CheckpointIdentity identity;
  std::vector<ShardEntry>
      shards;  // one per rank when it is the whole checkpoint's; one alone when it is a rank's own
};

absl::Status WriteManifest(const std::string& path, const Manifest& manifest);

// DataLoss naming file and reason unless the file is unaltered and every value is in its range. Says nothing
// yet about the shards being complete.
absl::StatusOr<Manifest> ReadManifest(const std::string& path);

// DataLoss unless there is one shard per rank, in order, and every expert is in exactly one.
absl::Status CheckComplete(const std::string& path, const Manifest& manifest);

// "12 layers, 8 experts, top 2, hidden 64, intermediate 32, gated silu, bf16".
std::string Describe(const ModelSpec& model);

}  // namespace lrmoe::engine
