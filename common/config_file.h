// Reads a configuration file: the flat part of TOML. One `key = value` per line, # comments; a value is a
// "string", a 'literal string', a number, true, false, or a [list, of, those] on one line. Tables are
// refused.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lrmoe {

struct ConfigFileEntry {
  std::string key;
  std::string value;  // strings without quotes, lists joined by commas
  int line = 0;       // from 1
};

// Entries in file order. InvalidArgument naming `path`, line and problem: syntax, or a key given twice.
absl::StatusOr<std::vector<ConfigFileEntry>> ParseConfigText(absl::string_view path, absl::string_view text);
// NotFound or PermissionDenied naming the path when it cannot be read; InvalidArgument when it is over 1 MiB.
absl::StatusOr<std::vector<ConfigFileEntry>> ReadConfigFile(const std::string& path);
// `text` as a quoted TOML string.
std::string QuoteConfigString(absl::string_view text);

}  // namespace lrmoe
