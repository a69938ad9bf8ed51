// Recorded routing per token, format "routing-tokens" version 1, JSON lines: a header
//   {format, version, model, num_experts, top_k, ...}
// then one line per layer invocation and source rank
//   {step, layer, source_rank, num_tokens, top_indices[T][k], top_weights[T][k]}.
#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "common/line_reader.h"

namespace lrmoe {

struct TokenTraceHeader {
  std::string model;
  int32_t num_experts = 0;  // 1..4096
  int32_t top_k = 0;        // 1..min(num_experts, 64)
};

struct TokenTraceRecord {
  Invocation invocation;
  int32_t source_rank = 0;  // 0..1023
  int32_t num_tokens = 0;
  std::vector<int32_t> top_indices;  // [T][k] experts, distinct within a token
  std::vector<float> top_weights;    // [T][k], finite and >= 0
};

// Reads strictly, one line in memory: errors as in trace.h. At most 2^20 tokens a line.
class TokenTraceReader {
 public:
  // Reads the header. `in` must outlive the reader.
  static absl::StatusOr<TokenTraceReader> Open(std::istream& in);

  const TokenTraceHeader& header() const { return header_; }
  // Fills `record` and returns true, or returns false at the end of the trace.
  absl::StatusOr<bool> Next(TokenTraceRecord& record);
  int64_t num_read() const { return num_read_; }  // lines, each an invocation of one source rank

 private:
  explicit TokenTraceReader(std::istream& in) : lines_(in) {}
  absl::Status ReadRecord(TokenTraceRecord& record) const;

  LineReader lines_;
  TokenTraceHeader header_;
  int64_t num_read_ = 0;
};

}  // namespace lrmoe
