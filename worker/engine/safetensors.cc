#include "worker/engine/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/status_macros.h"
#include "nlohmann/json.hpp"

namespace lrmoe::engine {
namespace {

using nlohmann::json;
static_assert(std::endian::native == std::endian::little,
              "the format is little-endian, and so are the copies here");

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxHeaderBytes = 100'000'000;  // as the format's own reader has it
constexpr char kMetadata[] = "__metadata__";

// 0 for a dtype the format does not have.
int64_t DtypeBytes(absl::string_view dtype) {
  if (dtype == "BOOL" || dtype == "U8" || dtype == "I8") return 1;
  if (dtype == "I16" || dtype == "U16" || dtype == "F16" || dtype == "BF16") return 2;
  if (dtype == "I32" || dtype == "U32" || dtype == "F32") return 4;
  if (dtype == "I64" || dtype == "U64" || dtype == "F64") return 8;
  return 0;
}

int64_t DataBytes(const TensorToWrite& tensor) {
  int64_t bytes = DtypeBytes(tensor.dtype);
  for (int64_t extent : tensor.shape) bytes *= extent;
  return bytes;
}

bool IsSize(const json& value) {
  return value.is_number_unsigned() && value.get<uint64_t>() <= INT64_MAX;
}

// The parsed header, or discarded when it is no JSON object or names something twice.
json ParseHeader(const std::string& text) {
  std::vector<std::set<std::string>> names;
  bool repeated = false;
  const auto watch = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) names.emplace_back();
    if (event == json::parse_event_t::object_end) names.pop_back();
    if (event == json::parse_event_t::key) repeated |= !names.back().insert(parsed.get<std::string>()).second;
    return true;
  };
  json header = json::parse(text, watch, /*allow_exceptions=*/false);
  if (!header.is_object() || repeated) return json(json::value_t::discarded);
  return header;
}

// Empty when valid, else what is wrong. Sets everything but the place in the file: `offset` counts from the
// data.
std::string ParseTensor(const json& entry, StoredTensor* tensor) {
  if (!entry.is_object() || entry.size() != 3 || !entry.contains("dtype") || !entry.contains("shape") ||
      !entry.contains("data_offsets")) {
    return "must have exactly dtype, shape and data_offsets";
  }
  const json &dtype = entry["dtype"], &shape = entry["shape"], &offsets = entry["data_offsets"];
  // Nothing unchecked is printed as JSON: printing recurses, and nesting may be as deep as the header is
  // long.
  if (!dtype.is_string() || DtypeBytes(dtype.get_ref<const std::string&>()) == 0) return "unknown dtype";
  if (!shape.is_array()) return "shape is not a list";
  tensor->dtype = dtype.get<std::string>();
  int64_t bytes = DtypeBytes(tensor->dtype);
  for (const json& extent : shape) {
    if (!IsSize(extent)) return "shape has an entry that is no size";
    tensor->shape.push_back(extent.get<int64_t>());
    if (__builtin_mul_overflow(bytes, tensor->shape.back(), &bytes))
      return "shape " + shape.dump() + " overflows";
  }
  if (!offsets.is_array() || offsets.size() != 2 || !IsSize(offsets[0]) || !IsSize(offsets[1])) {
    return "data_offsets is not a pair of sizes";
  }
  tensor->offset = offsets[0].get<int64_t>();
  tensor->bytes = bytes;
  if (offsets[1].get<int64_t>() < tensor->offset || offsets[1].get<int64_t>() - tensor->offset != bytes) {
    return absl::StrCat("data_offsets ", offsets.dump(), " do not hold the ", bytes, " bytes of its shape");
  }
  return "";
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

}  // namespace

absl::StatusOr<FileSum> WriteSafetensors(const std::string& path, std::span<const TensorToWrite> tensors,
                                         const std::map<std::string, std::string>& metadata) {
  json header = json::object();
  header[kMetadata] = metadata;
  int64_t offset = 0;
  for (const TensorToWrite& tensor : tensors) {
    const int64_t bytes = DataBytes(tensor);
    LRMOE_CHECK(!header.contains(tensor.name));
    header[tensor.name] = {{"dtype", std::string(tensor.dtype)},
                           {"shape", tensor.shape},
                           {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  if (static_cast<int64_t>(text.size()) > kMaxHeaderBytes) {
    return absl::ResourceExhaustedError(absl::StrCat(path, ": the header of ", tensors.size(),
                                                     " tensors has ", text.size(), " bytes; allowed: 0..",
                                                     kMaxHeaderBytes));
  }
  LRMOE_ASSIGN_OR_RETURN(FileWriter writer, FileWriter::Create(path));
  const uint64_t length = text.size();
  LRMOE_RETURN_IF_ERROR(writer.Write(std::as_bytes(std::span(&length, 1))));
  LRMOE_RETURN_IF_ERROR(writer.Write(std::as_bytes(std::span(text.data(), text.size()))));
  for (const TensorToWrite& tensor : tensors) {
    LRMOE_ASSIGN_OR_RETURN(const std::span<const std::byte> values, tensor.bytes());
    LRMOE_CHECK_EQ(DataBytes(tensor), static_cast<int64_t>(values.size()));
    LRMOE_RETURN_IF_ERROR(writer.Write(values));
  }
  return writer.Finish();
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  LRMOE_ASSIGN_OR_RETURN(FileReader reader, FileReader::Open(path));
  SafetensorsFile result(std::move(reader));
  const FileReader& file = result.file_;
  auto invalid = [&](absl::string_view reason) {
    return absl::DataLossError(absl::StrCat(path, ": ", reason));
  };

  uint64_t length = 0;
  if (file.bytes() < kLengthBytes) return invalid("too short for a safetensors file");
  LRMOE_RETURN_IF_ERROR(file.Read(0, std::as_writable_bytes(std::span(&length, 1))));
  if (length > static_cast<uint64_t>(std::min(kMaxHeaderBytes, file.bytes() - kLengthBytes))) {
    return invalid(absl::StrCat("header length is ", length, "; allowed: 0..",
                                std::min(kMaxHeaderBytes, file.bytes() - kLengthBytes)));
  }
  std::string text(length, '\0');
  LRMOE_RETURN_IF_ERROR(file.Read(kLengthBytes, std::as_writable_bytes(std::span(text.data(), text.size()))));
  const json header = ParseHeader(text);
  if (header.is_discarded()) return invalid("the header is not a JSON object with distinct names");

  const int64_t data = kLengthBytes + static_cast<int64_t>(length);
  std::vector<std::pair<int64_t, int64_t>> places;  // [begin, end) of each tensor
  for (const auto& [name, entry] : header.items()) {
    if (name == kMetadata) continue;
    StoredTensor tensor;
    const std::string wrong = ParseTensor(entry, &tensor);
    if (!wrong.empty()) return invalid(absl::StrCat("tensor ", name, ": ", wrong));
    places.emplace_back(tensor.offset, tensor.offset + tensor.bytes);
    if (tensor.offset > file.bytes() - data - tensor.bytes) {
      return invalid(absl::StrCat("tensor ", name, ": ends behind the end of the file"));
    }
    tensor.offset += data;
    result.tensors_.emplace(name, std::move(tensor));
  }
  std::sort(places.begin(), places.end());
  int64_t covered = 0;
  for (const auto& [begin, end] : places) {
    if (begin != covered)
      return invalid(absl::StrCat("tensors overlap or leave a gap at byte ", covered, " of the data"));
    covered = end;
  }
  if (data + covered != file.bytes()) {
    return invalid(absl::StrCat("has ", file.bytes() - data, " bytes of data, its tensors ", covered));
  }
  return result;
}

absl::Status SafetensorsFile::Check(const std::string& name, absl::string_view dtype,
                                    const std::vector<int64_t>& shape) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end())
    return absl::DataLossError(absl::StrCat(file_.path(), ": tensor ", name, " is missing"));
  const StoredTensor& tensor = found->second;
  if (tensor.dtype == dtype && tensor.shape == shape) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(file_.path(), ": tensor ", name, " is ", tensor.dtype,
                                          ShapeText(tensor.shape), ", must be ", dtype, ShapeText(shape)));
}

absl::Status SafetensorsFile::Read(const std::string& name, std::span<std::byte> to) const {
  const auto found = tensors_.find(name);
  LRMOE_CHECK(found != tensors_.end());
  LRMOE_CHECK_EQ(found->second.bytes, static_cast<int64_t>(to.size()));
  return file_.Read(found->second.offset, to);
}

}  // namespace lrmoe::engine
