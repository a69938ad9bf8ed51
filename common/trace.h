// Recorded routing, format "routing-counts" version 1, JSON lines: a header
//   {format, version, model, num_experts, top_k, num_source_ranks, num_layers, ...}
// then one line per layer invocation
//   {step, layer, counts[source][expert]}            with micro_batch, 0 when absent, where a step has
//   several.
// Both ends stream: a trace of any length takes the memory of one line.
#pragma once

#include <cstdint>
#include <istream>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/counts.h"
#include "common/ids.h"
#include "common/line_reader.h"

namespace lrmoe {

struct TraceHeader {
  std::string model;
  int32_t num_experts = 0;       // 1..4096
  int32_t top_k = 0;             // 1..min(num_experts, 64)
  int32_t num_source_ranks = 0;  // 1..1024
  int32_t num_layers = 0;        // 1..1024
  // Further keys with text values, in the order of their names: origin, licence, note, ...
  std::vector<std::pair<std::string, std::string>> remarks;
  bool operator==(const TraceHeader&) const = default;
};

struct TraceRecord {
  Invocation invocation;
  RoutedCounts counts;
  bool operator==(const TraceRecord&) const = default;
};

// Reads strictly. Every error is InvalidArgument naming line, field, value and allowed range, or DataLoss
// when the stream fails; a truncated last line tells how many invocations were read. Counts are 0..2^40; the
// invocations of a layer ascend. Further keys are allowed in the header, nowhere else.
class TraceReader {
 public:
  // Reads the header. `in` must outlive the reader.
  static absl::StatusOr<TraceReader> Open(std::istream& in);

  const TraceHeader& header() const { return header_; }
  // Fills `record` and returns true, or returns false at the end of the trace.
  absl::StatusOr<bool> Next(TraceRecord& record);
  int64_t num_read() const { return num_read_; }

 private:
  explicit TraceReader(std::istream& in) : lines_(in) {}
  absl::Status ReadRecord(TraceRecord& record);

  LineReader lines_;
  TraceHeader header_;
  std::vector<Invocation> last_;  // of each layer; step -1 before the first
  size_t line_limit_ = 0;
  int64_t num_read_ = 0;
};

// Writes what TraceReader reads back equal.
class TraceWriter {
 public:
  // Writes the header. `out` must outlive the writer. InvalidArgument for a header out of range.
  static absl::StatusOr<TraceWriter> Create(std::ostream& out, const TraceHeader& header);

  // InvalidArgument for a record that the header does not allow; DataLoss when the stream fails.
  absl::Status Write(const TraceRecord& record);

 private:
  TraceWriter(std::ostream& out, const TraceHeader& header) : out_(out), header_(header) {}

  std::ostream& out_;
  TraceHeader header_;
  std::string line_;
};

}  // namespace lrmoe
