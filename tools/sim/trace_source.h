// Invocations from a file of either trace format, on as many ranks as wanted.
#pragma once

#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "common/token_trace.h"
#include "common/trace.h"

namespace lrmoe::sim {

// Counts of consecutive lines of one invocation, sources ascending from 0.
class TokenCounts {
 public:
  static absl::StatusOr<TokenCounts> Open(std::istream& in);
  // num_source_ranks is that of the first invocation, which every other one must have; num_layers is 1024:
  // the format does not say.
  const TraceHeader& header() const { return header_; }
  absl::StatusOr<bool> Next(TraceRecord& record);

 private:
  explicit TokenCounts(TokenTraceReader reader) : reader_(std::move(reader)) {}
  absl::Status Advance();
  absl::StatusOr<bool> ReadInvocation(TraceRecord& record);

  TokenTraceReader reader_;
  TraceHeader header_;
  TokenTraceRecord line_;
  bool has_line_ = false;
  std::optional<TraceRecord> first_;
};

class TraceSource {
 public:
  // Errors begin with the path.
  static absl::StatusOr<TraceSource> Open(const std::string& path);

  const TraceHeader& header() const;
  absl::StatusOr<bool> Next(TraceRecord& record);
  // How much of the file was read, 0..1.
  double Progress();

 private:
  std::string path_;
  std::unique_ptr<std::ifstream> file_;
  double size_ = 0;
  std::optional<TraceReader> counts_;
  std::optional<TokenCounts> tokens_;
};

}  // namespace lrmoe::sim
