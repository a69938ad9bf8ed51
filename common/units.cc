#include "common/units.h"

#include <cmath>
#include <cstdio>
#include <iterator>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace lrmoe {
namespace {

struct Unit {
  const char* name;
  int64_t size;
};

constexpr Unit kBinaryUnits[] = {
    {"PiB", int64_t{1} << 50}, {"TiB", int64_t{1} << 40}, {"GiB", int64_t{1} << 30},
    {"MiB", int64_t{1} << 20}, {"KiB", int64_t{1} << 10}, {"B", 1},
};
constexpr Unit kDecimalUnits[] = {
    {"PB", 1'000'000'000'000'000},
    {"TB", 1'000'000'000'000},
    {"GB", 1'000'000'000},
    {"MB", 1'000'000},
    {"KB", 1'000},
    {"kB", 1'000},
};
constexpr Unit kTimeUnits[] = {
    // in microseconds
    {"h", 3'600'000'000}, {"min", 60'000'000}, {"s", 1'000'000}, {"ms", 1'000}, {"us", 1},
};

// "1.5 GiB" -> number text "1.5", unit text "GiB".
void SplitUnit(absl::string_view text, absl::string_view& number, absl::string_view& unit) {
  text = absl::StripAsciiWhitespace(text);
  size_t end = 0;
  while (end < text.size() && (absl::ascii_isdigit(text[end]) || text[end] == '.')) ++end;
  number = text.substr(0, end);
  unit = absl::StripAsciiWhitespace(text.substr(end));
}

// Whole numbers are multiplied exactly; fractions are rounded to the nearest whole.
bool Multiply(absl::string_view number, int64_t size, int64_t& out) {
  int64_t whole;
  if (absl::SimpleAtoi(number, &whole)) return !__builtin_mul_overflow(whole, size, &out);
  double value;
  if (number.empty() || !absl::SimpleAtod(number, &value)) return false;
  value = std::round(value * static_cast<double>(size));
  if (!(value >= 0 && value < 9.2e18)) return false;
  out = static_cast<int64_t>(value);
  return true;
}

template <size_t N>
bool ParseWith(const Unit (&units)[N], absl::string_view number, absl::string_view unit, int64_t& out) {
  for (const Unit& known : units)
    if (unit == known.name) return Multiply(number, known.size, out);
  return false;
}

template <size_t N>
std::string Exact(const Unit (&units)[N], int64_t value) {
  if (value == 0) return "0";
  for (const Unit& unit : units)
    if (value % unit.size == 0) return absl::StrCat(value / unit.size, unit.name);
  return absl::StrCat(value);
}

std::string ThreeDigits(double value, absl::string_view unit) {
  const double magnitude = std::abs(value);
  const int decimals = magnitude >= 100 ? 0 : magnitude >= 10 ? 1 : 2;
  return absl::StrCat(Fixed(value, decimals), " ", unit);
}

}  // namespace

absl::StatusOr<int64_t> ParseBytes(absl::string_view text) {
  absl::string_view number, unit;
  SplitUnit(text, number, unit);
  int64_t bytes = 0;
  if (unit.empty()
          ? absl::SimpleAtoi(number, &bytes)
          : ParseWith(kBinaryUnits, number, unit, bytes) || ParseWith(kDecimalUnits, number, unit, bytes))
    return bytes;
  return absl::InvalidArgumentError(
      absl::StrCat("\"", text, "\" is not a size; write e.g. 512MiB, 2GiB, 10MB or a number of bytes"));
}

std::string ExactBytes(int64_t bytes) {
  return Exact(kBinaryUnits, bytes);
}

absl::StatusOr<std::chrono::microseconds> ParseDuration(absl::string_view text) {
  absl::string_view number, unit;
  SplitUnit(text, number, unit);
  int64_t value = 0;
  if (ParseWith(kTimeUnits, number, unit, value) || (number == "0" && unit.empty()))
    return std::chrono::microseconds(value);
  return absl::InvalidArgumentError(
      absl::StrCat("\"", text, "\" is not a duration; write e.g. 250us, 500ms, 5s, 2min or 1h"));
}

std::string ExactDuration(std::chrono::microseconds duration) {
  return Exact(kTimeUnits, duration.count());
}

std::string HumanBytes(double bytes) {
  for (const Unit& unit : kBinaryUnits)
    if (unit.size > 1 && std::abs(bytes) >= static_cast<double>(unit.size))
      return ThreeDigits(bytes / static_cast<double>(unit.size), unit.name);
  return absl::StrCat(Fixed(bytes, 0), " B");
}

std::string HumanMicros(double microseconds) {
  if (std::isinf(microseconds)) return microseconds > 0 ? "no limit" : "-inf";
  const double magnitude = std::abs(microseconds);
  if (magnitude >= 1e6) return ThreeDigits(microseconds / 1e6, "s");
  if (magnitude >= 1e3) return ThreeDigits(microseconds / 1e3, "ms");
  return ThreeDigits(microseconds, "us");
}

std::string HumanCount(int64_t count) {
  std::string digits = absl::StrCat(count);
  const size_t start = count < 0 ? 1 : 0;
  for (size_t at = digits.size(); at > start + 3;) digits.insert(at -= 3, 1, ',');
  return digits;
}

std::string HumanPercent(double fraction) {
  return absl::StrCat(Fixed(fraction * 100.0, 1), " %");
}

std::string Fixed(double value, int decimals) {
  char buffer[400];
  const int length = std::snprintf(buffer, sizeof buffer, "%.*f", decimals, value);
  return std::string(buffer, static_cast<size_t>(length));
}

}  // namespace lrmoe
