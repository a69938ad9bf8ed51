// Lines of a stream, one at a time, in bounded memory; for JSON lines.
#pragma once

#include <cstdint>
#include <istream>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lrmoe {

class LineReader {
 public:
  // `in` must outlive this.
  explicit LineReader(std::istream& in) : in_(in) {}

  // The next line, without its line break, or false at the end. InvalidArgument when it has more than `limit`
  // bytes; DataLoss when the stream fails.
  absl::StatusOr<bool> Next(size_t limit);
  const std::string& line() const { return line_; }
  // The line as JSON (json_fields.h). A last line without a line break that is no JSON is called truncated,
  // and the message says that `num_read` invocations came before it.
  absl::StatusOr<nlohmann::json> Parse(int64_t num_read) const;

  int64_t number() const { return number_; }  // of the current line; the first has 1
  // `status` with the line it is about.
  absl::Status AtLine(const absl::Status& status) const;

 private:
  absl::StatusOr<bool> Read(size_t limit);

  std::istream& in_;
  std::string line_;
  int64_t number_ = 0;
  bool unfinished_ = false;  // the stream ended before a line break
};

}  // namespace lrmoe
