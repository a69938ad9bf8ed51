// Text forms of byte sizes, durations and counts: exact forms that parse back, and short forms for people.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lrmoe {

// "512MiB", "2GiB", "1.5 KiB", "10MB" (powers of 1000), "4096" or "4096B". Not negative, at most 2^63-1.
absl::StatusOr<int64_t> ParseBytes(absl::string_view text);
// The largest binary unit that divides it: ParseBytes gives the same number back.
std::string ExactBytes(int64_t bytes);

// "250us", "500ms", "5s", "1.5min", "2h". A number without a unit is refused, except 0. Not negative.
absl::StatusOr<std::chrono::microseconds> ParseDuration(absl::string_view text);
// The largest unit that divides it: ParseDuration gives the same duration back.
std::string ExactDuration(std::chrono::microseconds duration);

// For people: at most four digits of precision, a space, the unit.
std::string HumanBytes(double bytes);           // "1.50 GiB"
std::string HumanMicros(double microseconds);   // "340 us", "1.25 ms", "3.10 s"
std::string HumanCount(int64_t count);          // "12,345"
std::string HumanPercent(double fraction);      // "87.5 %"
std::string Fixed(double value, int decimals);  // "1.25"

}  // namespace lrmoe
