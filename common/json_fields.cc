#include "common/json_fields.h"

#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status_macros.h"

namespace lrmoe {
namespace {

using Json = nlohmann::json;

constexpr size_t kShownCharacters = 40;
constexpr int kMaxDepth = 32;  // showing and freeing a value recurse

std::string Shown(const Json& value) {
  // A long list is not worth its text: only the first characters are shown.
  if (value.is_structured() && value.size() > kShownCharacters)
    return absl::StrCat(value.is_array() ? "a list" : "an object", " of ", value.size(), " values");
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > kShownCharacters) text = text.substr(0, kShownCharacters - 3) + "...";
  return text;
}

}  // namespace

absl::StatusOr<Json> ParseJson(absl::string_view text) {
  std::vector<std::set<std::string>> keys;
  std::string repeated;
  bool is_repeated = false;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    if (depth > kMaxDepth) throw std::length_error("values are nested more than 32 deep");
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second) {
      repeated = parsed.get<std::string>();
      is_repeated = true;
    }
    return true;
  };
  try {
    Json json = Json::parse(text.begin(), text.end(), watch);
    if (is_repeated)
      return absl::InvalidArgumentError(
          absl::StrCat("key \"", repeated.substr(0, kShownCharacters), "\" appears twice"));
    return json;
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("not JSON: ", error.what()));
  }
}

absl::Status BadField(absl::string_view field, const Json& value, absl::string_view allowed) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", Shown(value), "; allowed: ", allowed));
}

absl::Status ReadInteger(absl::string_view field, const Json& value, int64_t low, int64_t high,
                         int64_t& out) {
  const bool fits = value.is_number_integer() &&
                    !(value.is_number_unsigned() &&
                      value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) &&
                    value.get<int64_t>() >= low && value.get<int64_t>() <= high;
  if (!fits) return BadField(field, value, absl::StrCat("an integer from ", low, " to ", high));
  out = value.get<int64_t>();
  return absl::OkStatus();
}

absl::Status ReadInteger32(absl::string_view field, const Json& value, int32_t low, int32_t& out) {
  int64_t wide;
  LRMOE_RETURN_IF_ERROR(ReadInteger(field, value, low, std::numeric_limits<int32_t>::max(), wide));
  out = static_cast<int32_t>(wide);
  return absl::OkStatus();
}

absl::Status ReadNumber(absl::string_view field, const Json& value, double& out) {
  if (!value.is_number()) return BadField(field, value, "a number");
  out = value.get<double>();
  return absl::OkStatus();
}

absl::Status ReadText(absl::string_view field, const Json& value, std::string& out) {
  if (!value.is_string()) return BadField(field, value, "a text");
  out = value.get<std::string>();
  return absl::OkStatus();
}

absl::Status CheckList(absl::string_view field, const Json& value, size_t most) {
  if (!value.is_array()) return BadField(field, value, "a list");
  if (value.size() > most)
    return absl::InvalidArgumentError(
        absl::StrCat(field, " is a list of ", value.size(), " values; allowed: up to ", most));
  return absl::OkStatus();
}

absl::Status CheckListOf(absl::string_view field, const Json& value, size_t size, absl::string_view what) {
  if (!value.is_array()) return BadField(field, value, "a list");
  if (value.size() != size)
    return absl::InvalidArgumentError(
        absl::StrCat(field, " is a list of ", value.size(), " values; allowed: ", size, ", one per ", what));
  return absl::OkStatus();
}

absl::Status CheckKeys(absl::string_view field, const Json& value, std::initializer_list<const char*> known) {
  if (!value.is_object()) return BadField(field, value, "an object");
  for (const auto& [key, unused] : value.items()) {
    bool found = false;
    for (const char* name : known) found |= key == name;
    if (!found)
      return absl::InvalidArgumentError(absl::StrCat("unknown key \"", key.substr(0, kShownCharacters),
                                                     "\" in ", field,
                                                     "; known: ", absl::StrJoin(known, ", ")));
  }
  return absl::OkStatus();
}

absl::Status RequireKeys(absl::string_view field, const Json& value,
                         std::initializer_list<const char*> required) {
  if (!value.is_object()) return BadField(field, value, "an object");
  for (const char* key : required)
    if (!value.contains(key))
      return absl::InvalidArgumentError(absl::StrCat("key \"", key, "\" is missing from ", field));
  return absl::OkStatus();
}

}  // namespace lrmoe
