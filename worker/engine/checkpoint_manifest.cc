#include "worker/engine/checkpoint_manifest.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status_macros.h"
#include "nlohmann/json.hpp"

namespace lrmoe::engine {
namespace {

using nlohmann::json;

constexpr char kFormat[] = "lrmoe-checkpoint-1";
constexpr int64_t kMaxBytes = 64 << 20;
constexpr int64_t kMaxRanks = 65536;

std::string Seal(const json& body) {
  const std::string text = body.dump();
  return absl::StrFormat("%08x", Crc32(0, std::as_bytes(std::span(text.data(), text.size()))));
}

// The file's text; one value has one text.
std::string Sealed(const json& body) {
  return json{{"checksum", Seal(body)}, {"manifest", body}}.dump(1) + "\n";
}

json ToJson(const ModelSpec& model) {
  const LayerShape& shape = model.shape;
  return {{"num_layers", model.num_layers},
          {"num_experts", shape.num_experts},
          {"top_k", shape.top_k},
          {"hidden_size", shape.hidden_size},
          {"intermediate_size", shape.intermediate_size},
          {"gated", shape.gated},
          {"activation", std::string(Name(shape.activation))},
          {"dtype", std::string(Name(shape.dtype))}};
}

json ToJson(const ListedFile& file) {
  return {{"name", file.name}, {"bytes", file.sum.bytes}, {"crc32", file.sum.crc32}};
}

json ToJson(const ShardEntry& shard) {
  return {{"rank", shard.rank},
          {"experts", shard.experts},
          {"weights", ToJson(shard.weights)},
          {"optimizer", ToJson(shard.optimizer)}};
}

// Takes values out of JSON by name and type; remembers the first that is wrong.
class Reader {
 public:
  explicit Reader(const json& object) : object_(object) {}

  int64_t Integer(const char* field, int64_t low, int64_t high) {
    const json* value = Find(field);
    if (value == nullptr) return low;
    const bool in_range =
        value->is_number_unsigned()
            ? value->get<uint64_t>() <= static_cast<uint64_t>(high) &&
                  static_cast<int64_t>(value->get<uint64_t>()) >= low
            : value->is_number_integer() && value->get<int64_t>() >= low && value->get<int64_t>() <= high;
    if (!in_range) {
      Fail(absl::StrCat(field, " must be an integer in ", low, "..", high));
      return low;
    }
    return value->get<int64_t>();
  }
  bool Bool(const char* field) {
    const json* value = Find(field);
    if (value != nullptr && !value->is_boolean()) Fail(absl::StrCat(field, " must be true or false"));
    return value != nullptr && value->is_boolean() && value->get<bool>();
  }
  std::string Text(const char* field) {
    const json* value = Find(field);
    if (value != nullptr && !value->is_string()) Fail(absl::StrCat(field, " must be a string"));
    return value != nullptr && value->is_string() ? value->get<std::string>() : "";
  }
  json List(const char* field) {
    const json* value = Find(field);
    if (value != nullptr && !value->is_array()) Fail(absl::StrCat(field, " must be a list"));
    return value != nullptr && value->is_array() ? *value : json::array();
  }
  json Object(const char* field) {
    const json* value = Find(field);
    if (value != nullptr && !value->is_object()) Fail(absl::StrCat(field, " must be an object"));
    return value != nullptr && value->is_object() ? *value : json::object();
  }
  void Fail(const std::string& what) {
    if (wrong_.empty()) wrong_ = what;
  }
  const std::string& wrong() const { return wrong_; }

 private:
  const json* Find(const char* field) {
    const auto found = object_.find(field);
    if (found != object_.end()) return &*found;
    Fail(absl::StrCat(field, " is missing"));
    return nullptr;
  }
  const json& object_;
  std::string wrong_;
};

std::string ReadModel(const json& object, ModelSpec* model) {
  Reader in(object);
  model->num_layers = static_cast<int32_t>(in.Integer("num_layers", 1, INT32_MAX));
  model->shape.num_experts = static_cast<int32_t>(in.Integer("num_experts", 1, INT32_MAX));
  model->shape.top_k = static_cast<int32_t>(in.Integer("top_k", 1, INT32_MAX));
  model->shape.hidden_size = static_cast<int32_t>(in.Integer("hidden_size", 1, INT32_MAX));
  model->shape.intermediate_size = static_cast<int32_t>(in.Integer("intermediate_size", 1, INT32_MAX));
  model->shape.gated = in.Bool("gated");
  const std::string activation = in.Text("activation");
  if (activation != "silu" && activation != "gelu") in.Fail("activation must be silu or gelu");
  model->shape.activation = activation == "gelu" ? Activation::kGelu : Activation::kSilu;
  const absl::StatusOr<DataType> dtype = ParseDataType(in.Text("dtype"));
  if (!dtype.ok()) in.Fail(std::string(dtype.status().message()));
  if (!in.wrong().empty()) return in.wrong();
  model->shape.dtype = *dtype;
  return std::string(Validate(*model).message());
}

std::string ReadFile(const json& object, ListedFile* file) {
  Reader in(object);
  file->name = in.Text("name");
  if (file->name.empty() || file->name.size() > 255 || file->name[0] == '.' ||
      file->name.find('/') != std::string::npos || file->name.find('\0') != std::string::npos) {
    in.Fail("name must be a file name without directories");
  }
  file->sum.bytes = in.Integer("bytes", 0, INT64_MAX);
  file->sum.crc32 = static_cast<uint32_t>(in.Integer("crc32", 0, UINT32_MAX));
  return in.wrong();
}

std::string ReadShard(const json& object, const CheckpointIdentity& identity, ShardEntry* shard) {
  if (!object.is_object()) return "a shard is not an object";
  Reader in(object);
  shard->rank = static_cast<int32_t>(in.Integer("rank", 0, identity.world_size - 1));
  for (const json& expert : in.List("experts")) {
    if (!expert.is_number_unsigned() ||
        expert.get<uint64_t>() >= static_cast<uint64_t>(identity.model.shape.num_experts)) {
      return absl::StrCat("experts has an entry that is not in 0..", identity.model.shape.num_experts - 1);
    }
    shard->experts.push_back(expert.get<int32_t>());
  }
  if (std::adjacent_find(shard->experts.begin(), shard->experts.end(), std::greater_equal<>()) !=
      shard->experts.end()) {
    in.Fail("experts must be ascending");
  }
  for (auto [field, file] : {std::pair{"weights", &shard->weights}, {"optimizer", &shard->optimizer}}) {
    const std::string wrong = ReadFile(in.Object(field), file);
    if (!wrong.empty()) in.Fail(absl::StrCat(field, ": ", wrong));
  }
  return in.wrong();
}

std::string ReadBody(const json& body, Manifest* manifest) {
  Reader in(body);
  if (in.Text("format") != kFormat) return absl::StrCat("format must be ", kFormat);
  CheckpointIdentity& identity = manifest->identity;
  identity.step = in.Integer("step", 0, INT64_MAX);
  identity.world_size = static_cast<int32_t>(in.Integer("world_size", 1, kMaxRanks));
  identity.optimizer_step = in.Integer("optimizer_step", 0, INT64_MAX);
  const std::string wrong = ReadModel(in.Object("model"), &identity.model);
  if (!wrong.empty()) return "model: " + wrong;
  for (const json& version : in.List("versions")) {
    if (!version.is_number_unsigned() || version.get<uint64_t>() == 0) return "versions has an entry below 1";
    identity.versions.push_back(version.get<uint64_t>());
  }
  if (identity.versions.size() != static_cast<size_t>(identity.model.num_layers)) {
    in.Fail(absl::StrCat("versions must have one entry per layer: ", identity.model.num_layers));
  }
  for (const json& entry : in.List("shards")) {
    ShardEntry& shard = manifest->shards.emplace_back();
    const std::string bad = ReadShard(entry, identity, &shard);
    if (!bad.empty()) return absl::StrCat("shard ", manifest->shards.size() - 1, ": ", bad);
  }
  return in.wrong();
}

}  // namespace

absl::Status WriteManifest(const std::string& path, const Manifest& manifest) {
  const CheckpointIdentity& identity = manifest.identity;
  json body = {{"format", kFormat},
               {"step", identity.step},
               {"world_size", identity.world_size},
               {"model", ToJson(identity.model)},
               {"optimizer_step", identity.optimizer_step},
               {"versions", identity.versions},
               {"shards", json::array()}};
  for (const ShardEntry& shard : manifest.shards) body["shards"].push_back(ToJson(shard));
  return WriteWhole(path, Sealed(body));
}

absl::StatusOr<Manifest> ReadManifest(const std::string& path) {
  LRMOE_ASSIGN_OR_RETURN(const std::string text, ReadWhole(path, kMaxBytes));
  auto invalid = [&](absl::string_view reason) {
    return absl::DataLossError(absl::StrCat(path, ": ", reason));
  };
  // Refuses nesting the format does not have, so that comparing and printing cannot recurse deeply.
  bool deep = false;
  const auto shallow = [&](int depth, json::parse_event_t, json&) {
    deep |= depth > 8;
    return depth <= 8;
  };
  const json file = json::parse(text, shallow, /*allow_exceptions=*/false);
  if (deep || !file.is_object() || !file.contains("manifest") || !file["manifest"].is_object()) {
    return invalid("not a manifest");
  }
  if (Sealed(file["manifest"]) != text) return invalid("altered: its text does not fit its checksum");
  Manifest manifest;
  const std::string wrong = ReadBody(file["manifest"], &manifest);
  if (!wrong.empty()) return invalid(wrong);
  return manifest;
}

absl::Status CheckComplete(const std::string& path, const Manifest& manifest) {
  const CheckpointIdentity& identity = manifest.identity;
  auto invalid = [&](absl::string_view reason) {
    return absl::DataLossError(absl::StrCat(path, ": ", reason));
  };
  if (manifest.shards.size() != static_cast<size_t>(identity.world_size)) {
    return invalid(absl::StrCat("lists ", manifest.shards.size(), " shards, must be ", identity.world_size));
  }
  std::vector<int32_t> seen(identity.model.shape.num_experts, 0);
  for (int32_t rank = 0; rank < identity.world_size; ++rank) {
    const ShardEntry& shard = manifest.shards[rank];
    if (shard.rank != rank) return invalid(absl::StrCat("shard ", rank, " says it is of rank ", shard.rank));
    for (int32_t expert_idx : shard.experts) ++seen[expert_idx];
  }
  for (int32_t expert_idx = 0; expert_idx < identity.model.shape.num_experts; ++expert_idx) {
    if (seen[expert_idx] == 1) continue;
    return invalid(absl::StrCat("expert ", expert_idx, " is in ", seen[expert_idx], " shards, must be in 1"));
  }
  return absl::OkStatus();
}

std::string Describe(const ModelSpec& model) {
  const LayerShape& shape = model.shape;
  return absl::StrCat(model.num_layers, " layers, ", shape.num_experts, " experts, top ", shape.top_k,
                      ", hidden ", shape.hidden_size, ", intermediate ", shape.intermediate_size, ", ",
                      shape.gated ? "gated " : "", Name(shape.activation), ", ", Name(shape.dtype));
}

}  // namespace lrmoe::engine
