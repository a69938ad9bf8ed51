#include "common/line_reader.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/json_fields.h"
#include "common/status_macros.h"

namespace lrmoe {

absl::StatusOr<bool> LineReader::Next(size_t limit) {
  try {
    return Read(limit);
  } catch (const std::ios_base::failure& error) {  // from the stream's buffer, which knows no other way
    return absl::DataLossError(absl::StrCat("cannot read after line ", number_, ": ", error.what()));
  }
}

absl::StatusOr<bool> LineReader::Read(size_t limit) {
  line_.clear();
  unfinished_ = false;
  std::streambuf* buffer = in_.rdbuf();
  int c = buffer->sgetc();
  if (c == std::char_traits<char>::eof()) return false;
  ++number_;
  for (; c != '\n'; c = buffer->snextc()) {
    if (c == std::char_traits<char>::eof()) {
      unfinished_ = true;
      break;
    }
    if (line_.size() == limit)
      return AtLine(absl::InvalidArgumentError(
          absl::StrCat("the line has more than ", limit, " bytes; allowed: up to ", limit)));
    line_.push_back(static_cast<char>(c));
  }
  if (c == '\n') buffer->sbumpc();
  return true;
}

absl::StatusOr<nlohmann::json> LineReader::Parse(int64_t num_read) const {
  auto json = ParseJson(line_);
  if (json.ok()) return json;
  if (unfinished_)
    return absl::InvalidArgumentError(absl::StrCat("line ", number_, " is truncated after ", line_.size(),
                                                   " bytes; ", num_read, " invocations were read"));
  return AtLine(json.status());
}

absl::Status LineReader::AtLine(const absl::Status& status) const {
  if (status.ok()) return status;
  return {status.code(), absl::StrCat("line ", number_, ": ", status.message())};
}

}  // namespace lrmoe
