#include "common/trace.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/json_fields.h"
#include "common/status_macros.h"

namespace lrmoe {
namespace {

using Json = nlohmann::json;

constexpr char kFormat[] = "routing-counts";
constexpr size_t kHeaderLimit = size_t{1} << 16;
constexpr int64_t kMaxCount = int64_t{1} << 40;
constexpr int64_t kMaxStep = std::numeric_limits<int64_t>::max();

struct HeaderField {
  const char* name;
  int32_t TraceHeader::*value;
  int32_t most;
};
constexpr HeaderField kHeaderFields[] = {
    {"num_experts", &TraceHeader::num_experts, 4096},
    {"top_k", &TraceHeader::top_k, 64},
    {"num_source_ranks", &TraceHeader::num_source_ranks, 1024},
    {"num_layers", &TraceHeader::num_layers, 1024},
};

absl::Status CheckTopK(const TraceHeader& header) {
  if (header.top_k <= header.num_experts) return absl::OkStatus();
  return BadField("top_k", header.top_k, absl::StrCat("1..", header.num_experts, ", the number of experts"));
}

bool IsNamed(absl::string_view key) {
  if (key == "format" || key == "version" || key == "model") return true;
  return std::ranges::any_of(kHeaderFields, [&](const HeaderField& field) { return key == field.name; });
}

absl::StatusOr<TraceHeader> ReadHeader(const Json& json) {
  LRMOE_RETURN_IF_ERROR(
      RequireKeys("the header", json,
                  {"format", "version", "model", "num_experts", "top_k", "num_source_ranks", "num_layers"}));
  if (json["format"] != kFormat) return BadField("format", json["format"], "\"routing-counts\"");
  if (json["version"] != 1) return BadField("version", json["version"], "1");
  TraceHeader header;
  LRMOE_RETURN_IF_ERROR(ReadText("model", json["model"], header.model));
  for (const HeaderField& field : kHeaderFields) {
    int64_t value;
    LRMOE_RETURN_IF_ERROR(ReadInteger(field.name, json[field.name], 1, field.most, value));
    header.*field.value = static_cast<int32_t>(value);
  }
  LRMOE_RETURN_IF_ERROR(CheckTopK(header));
  for (const auto& [key, value] : json.items())
    if (!IsNamed(key) && value.is_string()) header.remarks.emplace_back(key, value.get<std::string>());
  return header;
}

absl::Status ReadCounts(const Json& json, RoutedCounts& counts) {
  LRMOE_RETURN_IF_ERROR(CheckListOf("counts", json, counts.num_sources(), "source rank"));
  for (int32_t s = 0; s < counts.num_sources(); ++s) {
    const Json& row = json[s];
    if (!row.is_array() || row.size() != static_cast<size_t>(counts.num_experts()))
      return CheckListOf(absl::StrCat("counts[", s, "]"), row, counts.num_experts(), "expert");
    for (int32_t e = 0; e < counts.num_experts(); ++e) {
      const Json& value = row[e];
      // Names are made only for a value that is refused.
      if (!ReadInteger("", value, 0, kMaxCount, counts.at(s, e)).ok())
        return ReadInteger(absl::StrCat("counts[", s, "][", e, "]"), value, 0, kMaxCount, counts.at(s, e));
    }
  }
  return absl::OkStatus();
}

std::string Quoted(const std::string& text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

absl::StatusOr<TraceReader> TraceReader::Open(std::istream& in) {
  TraceReader reader(in);
  LRMOE_ASSIGN_OR_RETURN(const bool any, reader.lines_.Next(kHeaderLimit));
  if (!any)
    return absl::InvalidArgumentError("line 1 is missing; allowed: a header of format \"routing-counts\"");
  LRMOE_ASSIGN_OR_RETURN(const Json json, reader.lines_.Parse(0));
  auto header = ReadHeader(json);
  if (!header.ok()) return reader.lines_.AtLine(header.status());
  reader.header_ = *std::move(header);
  reader.last_.assign(reader.header_.num_layers, Invocation{-1, 0, 0});
  // 2^40 has 13 digits: twice that, and room for the keys.
  reader.line_limit_ =
      1024 + static_cast<size_t>(reader.header_.num_source_ranks) * (26 * reader.header_.num_experts + 8);
  return reader;
}

absl::Status TraceReader::ReadRecord(TraceRecord& record) {
  LRMOE_ASSIGN_OR_RETURN(const Json json, lines_.Parse(num_read_));
  const auto read = [&]() -> absl::Status {
    LRMOE_RETURN_IF_ERROR(CheckKeys("the invocation", json, {"step", "layer", "micro_batch", "counts"}));
    LRMOE_RETURN_IF_ERROR(RequireKeys("the invocation", json, {"step", "layer", "counts"}));
    Invocation& at = record.invocation;
    LRMOE_RETURN_IF_ERROR(ReadInteger("step", json["step"], 0, kMaxStep, at.step));
    int64_t layer;
    LRMOE_RETURN_IF_ERROR(ReadInteger("layer", json["layer"], 0, header_.num_layers - 1, layer));
    at.layer = static_cast<int32_t>(layer);
    at.micro_batch = 0;
    if (json.contains("micro_batch"))
      LRMOE_RETURN_IF_ERROR(ReadInteger32("micro_batch", json["micro_batch"], 0, at.micro_batch));
    Invocation& last = last_[at.layer];
    if (at.step < last.step)
      return BadField("step", at.step, absl::StrCat("at least ", last.step, ", the last of layer ", layer));
    if (at.step == last.step && at.micro_batch <= last.micro_batch)
      return BadField(
          "micro_batch", at.micro_batch,
          absl::StrCat("above ", last.micro_batch, ", the last of layer ", layer, " in step ", at.step));
    if (record.counts.num_sources() != header_.num_source_ranks ||
        record.counts.num_experts() != header_.num_experts)
      record.counts = RoutedCounts(header_.num_source_ranks, header_.num_experts);
    LRMOE_RETURN_IF_ERROR(ReadCounts(json["counts"], record.counts));
    last = at;
    return absl::OkStatus();
  };
  return lines_.AtLine(read());
}

absl::StatusOr<bool> TraceReader::Next(TraceRecord& record) {
  LRMOE_ASSIGN_OR_RETURN(const bool any, lines_.Next(line_limit_));
  if (!any) return false;
  LRMOE_RETURN_IF_ERROR(ReadRecord(record));
  ++num_read_;
  return true;
}

absl::StatusOr<TraceWriter> TraceWriter::Create(std::ostream& out, const TraceHeader& header) {
  for (const HeaderField& field : kHeaderFields) {
    const int32_t value = header.*field.value;
    if (value < 1 || value > field.most)
      return BadField(field.name, value, absl::StrCat("an integer from 1 to ", field.most));
  }
  LRMOE_RETURN_IF_ERROR(CheckTopK(header));
  out << "{\"format\":\"" << kFormat << "\",\"version\":1,\"model\":" << Quoted(header.model);
  for (const HeaderField& field : kHeaderFields) out << ",\"" << field.name << "\":" << header.*field.value;
  for (const auto& [key, text] : header.remarks) {
    if (IsNamed(key)) return BadField("a remark's key", key, "any but the keys of the format");
    out << "," << Quoted(key) << ":" << Quoted(text);
  }
  out << "}\n";
  if (!out) return absl::DataLossError("cannot write the header");
  return TraceWriter(out, header);
}

absl::Status TraceWriter::Write(const TraceRecord& record) {
  const Invocation& at = record.invocation;
  if (at.step < 0) return BadField("step", at.step, absl::StrCat("an integer from 0 to ", kMaxStep));
  if (at.layer < 0 || at.layer >= header_.num_layers)
    return BadField("layer", at.layer, absl::StrCat("an integer from 0 to ", header_.num_layers - 1));
  if (at.micro_batch < 0) return BadField("micro_batch", at.micro_batch, "an integer from 0 to 2147483647");
  const RoutedCounts& counts = record.counts;
  if (counts.num_sources() != header_.num_source_ranks || counts.num_experts() != header_.num_experts)
    return absl::InvalidArgumentError(absl::StrCat(
        "counts is ", counts.num_sources(), " sources of ", counts.num_experts(),
        " experts; allowed: ", header_.num_source_ranks, " sources of ", header_.num_experts, " experts"));
  line_.clear();
  absl::StrAppend(&line_, "{\"step\":", at.step, ",\"layer\":", at.layer);
  if (at.micro_batch > 0) absl::StrAppend(&line_, ",\"micro_batch\":", at.micro_batch);
  line_ += ",\"counts\":[";
  for (int32_t s = 0; s < counts.num_sources(); ++s) {
    line_ += s > 0 ? ",[" : "[";
    for (int32_t e = 0; e < counts.num_experts(); ++e) {
      const int64_t count = counts.at(s, e);
      if (count < 0 || count > kMaxCount)
        return BadField(absl::StrCat("counts[", s, "][", e, "]"), count,
                        absl::StrCat("an integer from 0 to ", kMaxCount));
      absl::StrAppend(&line_, e > 0 ? "," : "", count);
    }
    line_ += "]";
  }
  line_ += "]}\n";
  out_.write(line_.data(), static_cast<std::streamsize>(line_.size()));
  if (!out_) return absl::DataLossError("cannot write an invocation");
  return absl::OkStatus();
}

}  // namespace lrmoe
