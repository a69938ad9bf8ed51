#include "worker/engine/checkpoint.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/check.h"
#include "common/directory.h"
#include "common/status_macros.h"

namespace lrmoe::engine {
namespace {

namespace fs = std::filesystem;

constexpr char kManifestName[] = "manifest.json";

std::string FinalPath(const std::string& directory, int64_t step) {
  return absl::StrCat(directory, "/step-", step);
}
std::string AsidePath(const std::string& directory, int64_t step) {
  return FinalPath(directory, step) + ".tmp";
}
std::string ShardManifestName(int32_t rank) {
  return absl::StrFormat("shard-%05d.json", rank);
}
std::string TensorFileName(absl::string_view kind, int32_t rank, int32_t world_size) {
  return absl::StrFormat("%s-%05d-of-%05d.safetensors", kind, rank, world_size);
}

// The N of "step-N" + suffix, in its only spelling.
std::optional<int64_t> ParseStep(const std::string& name, const std::string& suffix) {
  const std::string prefix = "step-";
  if (name.size() <= prefix.size() + suffix.size() || name.rfind(prefix, 0) != 0) return std::nullopt;
  int64_t step = -1;
  const char* const begin = name.data() + prefix.size();
  const char* const end = name.data() + name.size() - suffix.size();
  const auto [rest, error] = std::from_chars(begin, end, step);
  if (error != std::errc() || rest != end || step < 0) return std::nullopt;
  return name == absl::StrCat(prefix, step, suffix) ? std::optional(step) : std::nullopt;
}

// Part of an expert that has a name of its own.
struct Piece {
  const char* name;
  int64_t offset;  // elements, from the start of the expert
  std::vector<int64_t> shape;
  int64_t count() const { return shape[0] * shape[1]; }
};

std::vector<Piece> Pieces(const LayerShape& shape) {
  const int64_t h = shape.hidden_size, f = shape.intermediate_size;
  std::vector<Piece> pieces;
  if (shape.gated) pieces.push_back({"gate_proj", 0, {f, h}});
  pieces.push_back({"up_proj", shape.gated ? f * h : 0, {f, h}});
  pieces.push_back({"down_proj", shape.fc1_width() * h, {h, f}});
  return pieces;
}

std::string TensorName(int32_t layer, int32_t expert_idx, const Piece& piece) {
  return absl::StrCat("model.layers.", layer, ".mlp.experts.", expert_idx, ".", piece.name, ".weight");
}

absl::string_view Dtype(DataType type) {
  return type == DataType::kBf16 ? "BF16" : "F32";
}

// The three fp32 parts of an expert's optimizer state and the endings of their names.
constexpr std::pair<const char*, StatePart> kStateParts[] = {{".master", StatePart::kMaster},
                                                             {".exp_avg", StatePart::kFirstMoment},
                                                             {".exp_avg_sq", StatePart::kSecondMoment}};

absl::Status FileSystemError(absl::string_view what, const std::string& path, const std::error_code& error) {
  return SystemError(what, path, error.value());
}

// Weights or one part of the state of the expert asked for last, where the host can read them: of what lies
// elsewhere there is never more than one copy.
class HostView {
 public:
  explicit HostView(ExpertStore* store) : store_(store) {}

  absl::StatusOr<std::span<const std::byte>> Weights(int32_t layer, int32_t expert_idx) {
    const std::array<int32_t, 3> at{layer, expert_idx, -1};
    if (at != at_) {
      LRMOE_ASSIGN_OR_RETURN(held_, store_->HostWeights(layer, expert_idx, bytes_));
      at_ = at;
    }
    return held_;
  }
  absl::StatusOr<std::span<const std::byte>> State(int32_t layer, int32_t expert_idx, StatePart part) {
    const std::array<int32_t, 3> at{layer, expert_idx, static_cast<int32_t>(part)};
    if (at != at_) {
      LRMOE_ASSIGN_OR_RETURN(const std::span<const float> values,
                             store_->HostState(layer, expert_idx, part, floats_));
      held_ = std::as_bytes(values);
      at_ = at;
    }
    return held_;
  }

 private:
  ExpertStore* const store_;
  std::array<int32_t, 3> at_{-1, -1, -1};  // layer, expert, part or -1
  std::span<const std::byte> held_;
  std::vector<std::byte> bytes_;
  std::vector<float> floats_;
};

// `view` outlives the lists.
void ListTensors(const ExpertStore& store, HostView* view, std::vector<TensorToWrite>* weights,
                 std::vector<TensorToWrite>* optimizer) {
  const LayerShape& shape = store.model().shape;
  const int64_t element = SizeInBytes(shape.dtype);
  using Bytes = absl::StatusOr<std::span<const std::byte>>;
  for (int32_t layer = 0; layer < store.model().num_layers; ++layer) {
    for (const int32_t expert_idx : store.owned()) {
      for (const Piece& piece : Pieces(shape)) {
        const auto read = [=, at = piece.offset * element, size = piece.count() * element]() -> Bytes {
          LRMOE_ASSIGN_OR_RETURN(const auto all, view->Weights(layer, expert_idx));
          return all.subspan(at, size);
        };
        weights->push_back({TensorName(layer, expert_idx, piece), Dtype(shape.dtype), piece.shape, read});
      }
      for (const auto& [ending, part] : kStateParts) {
        for (const Piece& piece : Pieces(shape)) {
          const auto read = [=, part = part, at = piece.offset * 4, size = piece.count() * 4]() -> Bytes {
            LRMOE_ASSIGN_OR_RETURN(const auto all, view->State(layer, expert_idx, part));
            return all.subspan(at, size);
          };
          optimizer->push_back({TensorName(layer, expert_idx, piece) + ending, "F32", piece.shape, read});
        }
      }
    }
  }
}

// Everything in the directory that is neither listed nor the manifest: shard manifests, files of a crashed
// save.
absl::Status RemoveUnlisted(const std::string& path, const Manifest& manifest) {
  std::set<std::string> keep{kManifestName};
  for (const ShardEntry& shard : manifest.shards) keep.insert({shard.weights.name, shard.optimizer.name});
  std::error_code error;
  std::vector<fs::path> remove;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    if (!keep.contains(it->path().filename().string())) remove.push_back(it->path());
  }
  for (size_t i = 0; i < remove.size() && !error; ++i) fs::remove_all(remove[i], error);
  return error ? FileSystemError("remove what is not part of the checkpoint", path, error) : absl::OkStatus();
}

// What crashed saves left behind, and a replaced checkpoint. That it could not be removed does not make the
// new checkpoint worse, so errors only leave it there.
void RemoveAsides(const std::string& directory) {
  std::error_code error;
  std::vector<fs::path> remove;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (ParseStep(it->path().filename().string(), ".tmp")) remove.push_back(it->path());
  }
  for (const fs::path& path : remove) fs::remove_all(path, error);
}

absl::Status CheckListed(const std::string& directory, const ListedFile& file) {
  const std::string path = absl::StrCat(directory, "/", file.name);
  absl::StatusOr<FileReader> reader = FileReader::Open(path);
  if (absl::IsNotFound(reader.status())) return absl::DataLossError(absl::StrCat(path, ": is missing"));
  if (!reader.ok()) return reader.status();
  if (reader->bytes() == file.sum.bytes) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(path, ": has ", reader->bytes(), " bytes, must have ", file.sum.bytes));
}

absl::StatusOr<Manifest> GatherShards(const std::string& aside, int64_t step, int32_t world_size) {
  Manifest whole;
  for (int32_t rank = 0; rank < world_size; ++rank) {
    const std::string path = absl::StrCat(aside, "/", ShardManifestName(rank));
    LRMOE_ASSIGN_OR_RETURN(Manifest shard, ReadManifest(path));
    if (shard.shards.size() != 1 || shard.identity.step != step || shard.identity.world_size != world_size) {
      return absl::FailedPreconditionError(absl::StrCat(path, ": is of step ", shard.identity.step, " of ",
                                                        shard.identity.world_size, " ranks; this is step ",
                                                        step, " of ", world_size, " ranks"));
    }
    if (rank == 0) whole.identity = shard.identity;
    if (shard.identity != whole.identity) {
      return absl::FailedPreconditionError(absl::StrCat(
          path, ": model, versions or optimizer step differ from those of rank 0: ",
          Describe(shard.identity.model), ", optimizer step ", shard.identity.optimizer_step,
          "; rank 0: ", Describe(whole.identity.model), ", optimizer step ", whole.identity.optimizer_step));
    }
    LRMOE_RETURN_IF_ERROR(CheckListed(aside, shard.shards[0].weights));
    LRMOE_RETURN_IF_ERROR(CheckListed(aside, shard.shards[0].optimizer));
    whole.shards.push_back(std::move(shard.shards[0]));
  }
  return whole;
}

// The newest step-N of the directory.
absl::StatusOr<int64_t> NewestStep(const std::string& directory) {
  std::error_code error;
  int64_t newest = -1;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    newest = std::max(newest, ParseStep(it->path().filename().string(), "").value_or(-1));
  }
  if (error) return FileSystemError("list", directory, error);
  if (newest < 0) return absl::NotFoundError(absl::StrCat(directory, ": holds no checkpoint"));
  return newest;
}

absl::StatusOr<SafetensorsFile> OpenVerified(const std::string& directory, const ListedFile& listed) {
  const std::string path = absl::StrCat(directory, "/", listed.name);
  LRMOE_ASSIGN_OR_RETURN(SafetensorsFile tensors, SafetensorsFile::Open(path));
  LRMOE_ASSIGN_OR_RETURN(const FileSum sum, tensors.file().Sum());
  if (sum == listed.sum) return tensors;
  return absl::DataLossError(absl::StrFormat("%s: altered: %d bytes with CRC-32 %08x, must be %d with %08x",
                                             path, sum.bytes, sum.crc32, listed.sum.bytes, listed.sum.crc32));
}

// Every tensor of the owned experts that `shard` holds is there as it must be.
absl::Status CheckTensors(const ExpertStore& store, const std::vector<int32_t>& experts,
                          const SafetensorsFile& weights, const SafetensorsFile& optimizer) {
  const LayerShape& shape = store.model().shape;
  for (int32_t layer = 0; layer < store.model().num_layers; ++layer) {
    for (const int32_t expert_idx : experts) {
      for (const Piece& piece : Pieces(shape)) {
        const std::string name = TensorName(layer, expert_idx, piece);
        LRMOE_RETURN_IF_ERROR(weights.Check(name, Dtype(shape.dtype), piece.shape));
        for (const auto& [ending, part] : kStateParts) {
          LRMOE_RETURN_IF_ERROR(optimizer.Check(name + ending, "F32", piece.shape));
        }
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteShard(ExpertStore& store, const std::string& directory, int64_t step, int32_t rank,
                        int32_t world_size) {
  if (step < 0) return absl::InvalidArgumentError(absl::StrCat("step is ", step, "; allowed: >= 0"));
  Manifest manifest;
  manifest.identity = {step, world_size, store.model(), store.optimizer_step(), {}};
  for (int32_t layer = 0; layer < store.model().num_layers; ++layer) {
    manifest.identity.versions.push_back(static_cast<uint64_t>(store.version(layer)));
    if (manifest.identity.versions.back() == 0) {
      return absl::FailedPreconditionError(absl::StrCat("layer ", layer, " has no weights to be saved yet"));
    }
  }
  const std::string aside = AsidePath(directory, step);
  std::error_code error;
  fs::create_directories(aside, error);
  if (error) return FileSystemError("create directory", aside, error);

  ShardEntry& shard = manifest.shards.emplace_back();
  shard.rank = rank;
  shard.experts = store.owned();
  shard.weights.name = TensorFileName("model", rank, world_size);
  shard.optimizer.name = TensorFileName("optimizer", rank, world_size);
  std::vector<TensorToWrite> weights, optimizer;
  HostView view(&store);
  ListTensors(store, &view, &weights, &optimizer);
  const std::map<std::string, std::string> metadata{{"format", "pt"}};
  LRMOE_ASSIGN_OR_RETURN(shard.weights.sum,
                         WriteSafetensors(aside + "/" + shard.weights.name, weights, metadata));
  LRMOE_ASSIGN_OR_RETURN(shard.optimizer.sum,
                         WriteSafetensors(aside + "/" + shard.optimizer.name, optimizer, metadata));
  LRMOE_RETURN_IF_ERROR(WriteManifest(absl::StrCat(aside, "/", ShardManifestName(rank)), manifest));
  return SyncDirectory(aside);
}

absl::Status CommitCheckpoint(const std::string& directory, int64_t step, int32_t world_size) {
  const std::string aside = AsidePath(directory, step);
  LRMOE_ASSIGN_OR_RETURN(const Manifest manifest, GatherShards(aside, step, world_size));
  const std::string path = absl::StrCat(aside, "/", kManifestName);
  LRMOE_RETURN_IF_ERROR(CheckComplete(path, manifest));
  LRMOE_RETURN_IF_ERROR(WriteManifest(path, manifest));
  LRMOE_RETURN_IF_ERROR(RemoveUnlisted(aside, manifest));
  LRMOE_RETURN_IF_ERROR(SyncDirectory(aside));
  LRMOE_RETURN_IF_ERROR(ReplaceDirectory(aside, FinalPath(directory, step)));
  LRMOE_RETURN_IF_ERROR(SyncDirectory(directory));
  RemoveAsides(directory);
  return absl::OkStatus();
}

absl::StatusOr<CheckpointReader> CheckpointReader::Open(const ExpertStore& store,
                                                        const std::string& directory, int64_t step) {
  if (step < 0) {
    LRMOE_ASSIGN_OR_RETURN(step, NewestStep(directory));
  }
  CheckpointReader reader;
  const std::string final_path = FinalPath(directory, step);
  const std::string manifest_path = absl::StrCat(final_path, "/", kManifestName);
  std::error_code error;
  if (!fs::exists(final_path, error))
    return absl::NotFoundError(absl::StrCat(final_path, ": no such checkpoint"));
  absl::StatusOr<Manifest> manifest = ReadManifest(manifest_path);
  if (absl::IsNotFound(manifest.status())) return absl::DataLossError(manifest_path + ": is missing");
  if (!manifest.ok()) return manifest.status();
  reader.manifest_ = *std::move(manifest);
  const CheckpointIdentity& identity = reader.manifest_.identity;
  if (identity.step != step) {
    return absl::DataLossError(
        absl::StrCat(manifest_path, ": is of step ", identity.step, ", must be ", step));
  }
  if (identity.model != store.model()) {
    return absl::FailedPreconditionError(
        absl::StrCat(manifest_path, ": the checkpoint is of another model: ", Describe(identity.model),
                     "; this model: ", Describe(store.model())));
  }
  LRMOE_RETURN_IF_ERROR(CheckComplete(manifest_path, reader.manifest_));
  for (const ShardEntry& shard : reader.manifest_.shards) {
    LRMOE_RETURN_IF_ERROR(CheckListed(final_path, shard.weights));
    LRMOE_RETURN_IF_ERROR(CheckListed(final_path, shard.optimizer));
    std::vector<int32_t> wanted;
    std::set_intersection(shard.experts.begin(), shard.experts.end(), store.owned().begin(),
                          store.owned().end(), std::back_inserter(wanted));
    if (wanted.empty()) continue;
    LRMOE_ASSIGN_OR_RETURN(SafetensorsFile weights, OpenVerified(final_path, shard.weights));
    LRMOE_ASSIGN_OR_RETURN(SafetensorsFile optimizer, OpenVerified(final_path, shard.optimizer));
    LRMOE_RETURN_IF_ERROR(CheckTensors(store, wanted, weights, optimizer));
    for (const int32_t expert_idx : wanted) reader.shard_of_expert_[expert_idx] = reader.shards_.size();
    reader.shards_.push_back({std::move(weights), std::move(optimizer)});
  }
  return reader;
}

absl::Status CheckpointReader::Load(ExpertStore& store) const {
  LRMOE_CHECK(store.model() == manifest_.identity.model);
  const LayerShape& shape = store.model().shape;
  const int64_t element = SizeInBytes(shape.dtype);
  std::vector<std::byte> weights(store.parameters() * element);
  std::vector<float> state(store.parameters());
  for (int32_t layer = 0; layer < store.model().num_layers; ++layer) {
    for (const int32_t replica : store.Replicas(layer)) store.DropReplica(layer, replica);
    for (const int32_t expert_idx : store.owned()) {
      const auto found = shard_of_expert_.find(expert_idx);
      LRMOE_CHECK(found != shard_of_expert_.end());
      const Shard& shard = shards_[found->second];
      for (const Piece& piece : Pieces(shape)) {
        const std::string name = TensorName(layer, expert_idx, piece);
        LRMOE_RETURN_IF_ERROR(shard.weights.Read(
            name, std::span(weights).subspan(piece.offset * element, piece.count() * element)));
      }
      for (const auto& [ending, part] : kStateParts) {
        for (const Piece& piece : Pieces(shape))
          LRMOE_RETURN_IF_ERROR(shard.optimizer.Read(
              TensorName(layer, expert_idx, piece) + ending,
              std::as_writable_bytes(std::span(state).subspan(piece.offset, piece.count()))));
        LRMOE_RETURN_IF_ERROR(store.SetState(layer, expert_idx, part, state));
      }
      LRMOE_RETURN_IF_ERROR(store.SetWeights(layer, expert_idx, weights));
    }
    store.ZeroGradients(layer);
    store.SetVersion(layer, ParameterVersion{manifest_.identity.versions[layer]});
  }
  store.SetOptimizerStep(manifest_.identity.optimizer_step);
  return absl::OkStatus();
}

}  // namespace lrmoe::engine
