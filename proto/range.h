// Checks of single wire fields; only for the converters. Texts are built when a check fails, not before.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace lrmoe::wire {

inline absl::Status Bad(absl::string_view field, absl::string_view value, absl::string_view allowed) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; allowed: ", allowed));
}

inline absl::Status InRange(absl::string_view field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) [[likely]]
    return absl::OkStatus();
  return Bad(field, absl::StrCat(value), absl::StrCat(low, "..", high));
}

// One entry of a repeated field.
inline absl::Status InRange(absl::string_view field, int64_t position, int64_t value, int64_t low,
                            int64_t high) {
  if (value >= low && value <= high) [[likely]]
    return absl::OkStatus();
  return Bad(absl::StrCat(field, "[", position, "]"), absl::StrCat(value), absl::StrCat(low, "..", high));
}

// Finite and >= 0.
inline absl::Status Measured(absl::string_view field, double value) {
  if (std::isfinite(value) && value >= 0.0) [[likely]]
    return absl::OkStatus();
  return Bad(field, absl::StrCat(value), "a finite number >= 0");
}

// At most `limit` bytes; at least `least`.
inline absl::Status Text(absl::string_view field, const std::string& value, size_t least, size_t limit) {
  if (value.size() >= least && value.size() <= limit) [[likely]]
    return absl::OkStatus();
  const std::string shown = absl::CEscape(absl::string_view(value).substr(0, 40));
  return Bad(field,
             absl::StrCat("\"", shown, value.size() > 40 ? "...\"" : "\"", " (", value.size(), " bytes)"),
             absl::StrCat(least, "..", limit, " bytes"));
}

// Puts the name of the enclosing message before the field that an error names.
inline absl::Status Within(absl::string_view outer, const absl::Status& status) {
  if (status.ok()) [[likely]]
    return status;
  return absl::Status(status.code(), absl::StrCat(outer, ".", status.message()));
}

}  // namespace lrmoe::wire
