// Checkpoints of the expert shard: safetensors with Hugging Face key names, a manifest with sizes and checksums,
// written aside, synced and renamed. A crash at any point leaves the last good one.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/engine/expert_store.h"

namespace lrmoe::engine {

// Two phases, so that a checkpoint exists whole or not at all over all ranks:
//   every rank: WriteShard; barrier; rank 0: Commit (writes the manifest over all shards, renames, syncs); barrier.
// `directory` is shared by all ranks; a checkpoint is `directory`/step-N. Names, in the shard of each rank:
//   model.layers.{layer}.mlp.experts.{expert}.{gate_proj|up_proj|down_proj}.weight  (compute type), and in a second
//   file the fp32 .master, .exp_avg, .exp_avg_sq of each.
absl::Status WriteShard(const ExpertStore& store, const std::string& directory, int64_t step, int32_t rank,
                        int32_t world_size);
absl::Status CommitCheckpoint(const std::string& directory, int64_t step, int32_t world_size);

// Verifies the whole checkpoint's manifest and this rank's files (sizes, checksums, names, shapes, dtypes) before anything
// in the store changes. Errors: NotFound; DataLoss naming file and reason; FailedPrecondition when model or world size
// differ, naming both. step < 0: the newest committed one. Returns the step loaded.
absl::StatusOr<int64_t> LoadCheckpoint(ExpertStore& store, const std::string& directory, int64_t step, int32_t rank,
                                       int32_t world_size);

}  // namespace lrmoe::engine
