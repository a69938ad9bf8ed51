#include "common/token_trace.h"

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/json_fields.h"
#include "common/status_macros.h"

namespace lrmoe {
namespace {

using Json = nlohmann::json;

constexpr size_t kHeaderLimit = size_t{1} << 16;
constexpr size_t kLineLimit = size_t{1} << 30;
constexpr int64_t kMaxTokens = int64_t{1} << 20;

absl::StatusOr<TokenTraceHeader> ReadHeader(const Json& json) {
  LRMOE_RETURN_IF_ERROR(
      RequireKeys("the header", json, {"format", "version", "model", "num_experts", "top_k"}));
  if (json["format"] != "routing-tokens") return BadField("format", json["format"], "\"routing-tokens\"");
  if (json["version"] != 1) return BadField("version", json["version"], "1");
  TokenTraceHeader header;
  LRMOE_RETURN_IF_ERROR(ReadText("model", json["model"], header.model));
  int64_t value;
  LRMOE_RETURN_IF_ERROR(ReadInteger("num_experts", json["num_experts"], 1, 4096, value));
  header.num_experts = static_cast<int32_t>(value);
  LRMOE_RETURN_IF_ERROR(ReadInteger("top_k", json["top_k"], 1, std::min<int64_t>(value, 64), value));
  header.top_k = static_cast<int32_t>(value);
  return header;
}

absl::Status ReadToken(const Json& indices, int64_t token, const TokenTraceHeader& header,
                       std::vector<int32_t>& out) {
  const auto field = [&](int32_t j) { return absl::StrCat("top_indices[", token, "][", j, "]"); };
  const size_t begin = out.size();
  for (int32_t j = 0; j < header.top_k; ++j) {
    int64_t expert;
    if (!ReadInteger("", indices[j], 0, header.num_experts - 1, expert).ok())
      return ReadInteger(field(j), indices[j], 0, header.num_experts - 1, expert);
    for (size_t i = begin; i < out.size(); ++i)
      if (out[i] == expert) return BadField(field(j), expert, "distinct experts within a token");
    out.push_back(static_cast<int32_t>(expert));
  }
  return absl::OkStatus();
}

absl::Status ReadWeights(const Json& weights, int64_t token, int32_t top_k, std::vector<float>& out) {
  for (int32_t j = 0; j < top_k; ++j) {
    const double weight = weights[j].is_number() ? weights[j].get<double>() : -1;
    const bool is_float = weight >= 0 && weight <= std::numeric_limits<float>::max();
    if (!is_float)
      return BadField(absl::StrCat("top_weights[", token, "][", j, "]"), weights[j],
                      "a number from 0 to the largest float");
    out.push_back(static_cast<float>(weight));
  }
  return absl::OkStatus();
}

absl::Status ReadTokens(const Json& json, const TokenTraceHeader& header, TokenTraceRecord& record) {
  record.top_indices.clear();
  record.top_weights.clear();
  for (const char* field : {"top_indices", "top_weights"})
    LRMOE_RETURN_IF_ERROR(CheckListOf(field, json[field], record.num_tokens, "token"));
  for (int64_t t = 0; t < record.num_tokens; ++t) {
    for (const char* field : {"top_indices", "top_weights"}) {
      const Json& token = json[field][t];
      if (!token.is_array() || token.size() != static_cast<size_t>(header.top_k))
        return CheckListOf(absl::StrCat(field, "[", t, "]"), token, header.top_k, "expert of the token");
    }
    LRMOE_RETURN_IF_ERROR(ReadToken(json["top_indices"][t], t, header, record.top_indices));
    LRMOE_RETURN_IF_ERROR(ReadWeights(json["top_weights"][t], t, header.top_k, record.top_weights));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<TokenTraceReader> TokenTraceReader::Open(std::istream& in) {
  TokenTraceReader reader(in);
  LRMOE_ASSIGN_OR_RETURN(const bool any, reader.lines_.Next(kHeaderLimit));
  if (!any)
    return absl::InvalidArgumentError("line 1 is missing; allowed: a header of format \"routing-tokens\"");
  LRMOE_ASSIGN_OR_RETURN(const Json json, reader.lines_.Parse(0));
  auto header = ReadHeader(json);
  if (!header.ok()) return reader.lines_.AtLine(header.status());
  reader.header_ = *std::move(header);
  return reader;
}

absl::Status TokenTraceReader::ReadRecord(TokenTraceRecord& record) const {
  LRMOE_ASSIGN_OR_RETURN(const Json json, lines_.Parse(num_read_));
  const auto read = [&]() -> absl::Status {
    LRMOE_RETURN_IF_ERROR(CheckKeys(
        "the invocation", json,
        {"step", "layer", "micro_batch", "source_rank", "num_tokens", "top_indices", "top_weights"}));
    LRMOE_RETURN_IF_ERROR(
        RequireKeys("the invocation", json,
                    {"step", "layer", "source_rank", "num_tokens", "top_indices", "top_weights"}));
    Invocation& at = record.invocation;
    int64_t value;
    LRMOE_RETURN_IF_ERROR(ReadInteger("step", json["step"], 0, std::numeric_limits<int64_t>::max(), at.step));
    LRMOE_RETURN_IF_ERROR(ReadInteger("layer", json["layer"], 0, 1023, value));
    at.layer = static_cast<int32_t>(value);
    at.micro_batch = 0;
    if (json.contains("micro_batch"))
      LRMOE_RETURN_IF_ERROR(ReadInteger32("micro_batch", json["micro_batch"], 0, at.micro_batch));
    LRMOE_RETURN_IF_ERROR(ReadInteger("source_rank", json["source_rank"], 0, 1023, value));
    record.source_rank = static_cast<int32_t>(value);
    LRMOE_RETURN_IF_ERROR(ReadInteger("num_tokens", json["num_tokens"], 0, kMaxTokens, value));
    record.num_tokens = static_cast<int32_t>(value);
    return ReadTokens(json, header_, record);
  };
  return lines_.AtLine(read());
}

absl::StatusOr<bool> TokenTraceReader::Next(TokenTraceRecord& record) {
  LRMOE_ASSIGN_OR_RETURN(const bool any, lines_.Next(kLineLimit));
  if (!any) return false;
  LRMOE_RETURN_IF_ERROR(ReadRecord(record));
  ++num_read_;
  return true;
}

}  // namespace lrmoe
