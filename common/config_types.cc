// The text forms of the setting types of common/config.h.
#include <cmath>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/config.h"
#include "common/status_macros.h"
#include "common/units.h"

namespace lrmoe {
namespace {

absl::Status Bad(absl::string_view name, absl::string_view text, absl::string_view allowed) {
  return absl::InvalidArgumentError(absl::StrCat(name, " is \"", text, "\"; allowed: ", allowed));
}

// "1..64", or with an open end "at least 1".
std::string RangeText(absl::string_view kind, bool open_min, const std::string& min, bool open_max,
                      const std::string& max) {
  if (open_min && open_max) return std::string(kind);
  if (open_max) return absl::StrCat(kind, ", at least ", min);
  if (open_min) return absl::StrCat(kind, ", at most ", max);
  return absl::StrCat(kind, ", ", min, "..", max);
}

template <typename Number>
std::string RangeText(absl::string_view kind, Number min, Number max, std::string (*text)(Number)) {
  using Limits = std::numeric_limits<Number>;
  const Number lowest = Limits::has_infinity ? -Limits::infinity() : Limits::min();
  const Number highest = Limits::has_infinity ? Limits::infinity() : Limits::max();
  return RangeText(kind, min == lowest, text(min), max == highest, text(max));
}

std::string IntText(int64_t value) {
  return absl::StrCat(value);
}

// Shortest text that parses back to the same value.
std::string DoubleText(double value) {
  char buffer[32];
  for (int digits = 6; digits <= 17; ++digits) {
    std::snprintf(buffer, sizeof buffer, "%.*g", digits, value);
    double back;
    if (absl::SimpleAtod(buffer, &back) && back == value) break;
  }
  return buffer;
}

template <typename Int>
CustomSetting IntSetting(std::string name, Int* target, IntRange range, absl::string_view doc) {
  range.min = std::max<int64_t>(range.min, std::numeric_limits<Int>::min());
  range.max = std::min<int64_t>(range.max, std::numeric_limits<Int>::max());
  return {[name, target, range](absl::string_view text) {
            int64_t value;
            if (!absl::SimpleAtoi(text, &value) || value < range.min || value > range.max)
              return Bad(name, text, RangeText<int64_t>("an integer", range.min, range.max, IntText));
            *target = static_cast<Int>(value);
            return absl::OkStatus();
          },
          [target] { return absl::StrCat(*target); }, "N", std::string(doc)};
}

template <typename Duration>
CustomSetting DurationSetting(std::string name, Duration* target, DurationRange range,
                              absl::string_view doc) {
  return {[name, target, range](absl::string_view text) {
            const absl::StatusOr<std::chrono::microseconds> value = ParseDuration(text);
            if (!value.ok() || *value < range.min || *value > range.max ||
                std::chrono::duration_cast<Duration>(*value) != *value)
              return Bad(name, text,
                         absl::StrCat("a duration like 500ms or 5s, in whole ",
                                      std::is_same_v<Duration, std::chrono::microseconds> ? "us" : "ms", ", ",
                                      ExactDuration(range.min), "..", ExactDuration(range.max)));
            *target = std::chrono::duration_cast<Duration>(*value);
            return absl::OkStatus();
          },
          [target] { return ExactDuration(*target); }, "DURATION", std::string(doc)};
}

}  // namespace

void Settings::AddString(absl::string_view name, std::string* target, absl::string_view doc) {
  Add(name,
      {[target](absl::string_view text) {
         *target = std::string(text);
         return absl::OkStatus();
       },
       [target] { return *target; }, "TEXT", std::string(doc)},
      true);
}

void Settings::AddInt(absl::string_view name, int64_t* target, IntRange range, absl::string_view doc) {
  Add(name, IntSetting(std::string(name), target, range, doc), false);
}

void Settings::AddInt(absl::string_view name, int32_t* target, IntRange range, absl::string_view doc) {
  Add(name, IntSetting(std::string(name), target, range, doc), false);
}

void Settings::AddDouble(absl::string_view name, double* target, DoubleRange range, absl::string_view doc) {
  Add(name,
      {[name = std::string(name), target, range](absl::string_view text) {
         double value;
         if (!absl::SimpleAtod(text, &value) || !(value >= range.min && value <= range.max))
           return Bad(name, text, RangeText<double>("a number", range.min, range.max, DoubleText));
         *target = value;
         return absl::OkStatus();
       },
       [target] { return DoubleText(*target); }, "X", std::string(doc)},
      false);
}

void Settings::AddBytes(absl::string_view name, int64_t* target, IntRange range, absl::string_view doc) {
  range.min = std::max<int64_t>(range.min, 0);
  Add(name,
      {[name = std::string(name), target, range](absl::string_view text) {
         const absl::StatusOr<int64_t> value = ParseBytes(text);
         if (!value.ok() || *value < range.min || *value > range.max)
           return Bad(name, text,
                      RangeText<int64_t>("a size like 512MiB, 2GiB or a number of bytes", range.min,
                                         range.max, ExactBytes));
         *target = *value;
         return absl::OkStatus();
       },
       [target] { return ExactBytes(*target); }, "SIZE", std::string(doc)},
      true);
}

void Settings::AddDuration(absl::string_view name, std::chrono::microseconds* target, DurationRange range,
                           absl::string_view doc) {
  Add(name, DurationSetting(std::string(name), target, range, doc), true);
}

void Settings::AddDuration(absl::string_view name, std::chrono::milliseconds* target, DurationRange range,
                           absl::string_view doc) {
  Add(name, DurationSetting(std::string(name), target, range, doc), true);
}

void Settings::AddFlag(absl::string_view name, bool* target, absl::string_view doc) {
  Add(name,
      {[name = std::string(name), target](absl::string_view text) {
         if (text != "true" && text != "false") return Bad(name, text, "true, false");
         *target = text == "true";
         return absl::OkStatus();
       },
       [target] { return std::string(*target ? "true" : "false"); }, "", std::string(doc)},
      false, true);
}

void Settings::AddChoice(absl::string_view name, std::string* target, std::vector<std::string> choices,
                         absl::string_view doc) {
  const std::string placeholder = absl::StrJoin(choices, "|");
  Add(name,
      {[name = std::string(name), target, choices = std::move(choices)](absl::string_view text) {
         for (const std::string& choice : choices) {
           if (text != choice) continue;
           *target = choice;
           return absl::OkStatus();
         }
         return Bad(name, text, absl::StrJoin(choices, ", "));
       },
       [target] { return *target; }, placeholder, std::string(doc)},
      true);
}

}  // namespace lrmoe
