// Checkpoints of the expert shard: safetensors with Hugging Face key names, a manifest with sizes and
// checksums, written aside, synced and renamed. A crash at any point leaves the last good one.
//
//   directory/step-N/manifest.json                                 sealed; lists everything below
//   directory/step-N/model-{rank}-of-{ranks}.safetensors           weights in the compute type (BF16 or F32):
//       model.layers.{layer}.mlp.experts.{expert}.{gate_proj|up_proj|down_proj}.weight; no gate_proj when not
//       gated
//   directory/step-N/optimizer-{rank}-of-{ranks}.safetensors       F32: those names + .master, .exp_avg,
//   .exp_avg_sq directory/step-N.tmp/                                          one being written; ignored by
//   loading
//
// A directory is shared by all ranks of one job and belongs to it: committing removes what crashed saves left
// behind.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/engine/checkpoint_manifest.h"
#include "worker/engine/expert_store.h"
#include "worker/engine/safetensors.h"

namespace lrmoe::engine {

// Two phases, so that a checkpoint exists whole or not at all over all ranks:
//   every rank: WriteShard; all ranks agree that it worked; rank 0: CommitCheckpoint; all ranks agree again.
// step >= 0. The store is only read. FailedPrecondition when a layer has no weights yet. Errors of the file
// system as in durable_file.h; what was committed before stays as it is.
absl::Status WriteShard(ExpertStore& store, const std::string& directory, int64_t step, int32_t rank,
                        int32_t world_size);
// Checks that the shards of all ranks are there, belong together and hold every expert once, and puts the
// checkpoint in place. An earlier one of the same step is replaced in one step.
absl::Status CommitCheckpoint(const std::string& directory, int64_t step, int32_t world_size);

// A checkpoint that has been verified for one rank and may be loaded. Any number of ranks may have written
// it: each expert is found in whatever shard holds it. Over many ranks: all Open, agree that all could, then
// all Load.
class CheckpointReader {
 public:
  // Checks the manifest, the presence and size of every file it lists, and the checksum, names, shapes and
  // dtypes of those files that hold experts `store` owns. step < 0: the newest committed one. NotFound when
  // there is none; DataLoss naming file and reason; FailedPrecondition naming both models when they differ.
  static absl::StatusOr<CheckpointReader> Open(const ExpertStore& store, const std::string& directory,
                                               int64_t step);

  int64_t step() const { return manifest_.identity.step; }

  // Into the store given to Open, or one like it: weights, masters, moments, versions and the optimizer step.
  // Replicas are dropped (their version numbers belong to another history) and gradients zeroed. An error
  // here is one of reading what could be read before; the store is then partly loaded.
  absl::Status Load(ExpertStore& store) const;

 private:
  struct Shard {
    SafetensorsFile weights, optimizer;
  };
  CheckpointReader() = default;
  Manifest manifest_;
  std::vector<Shard> shards_;                  // those needed here
  std::map<int32_t, size_t> shard_of_expert_;  // owned expert -> position in shards_
};

}  // namespace lrmoe::engine
