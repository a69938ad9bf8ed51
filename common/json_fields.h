// Strict reading of JSON: every failure is InvalidArgument naming the field, its value and what is allowed.
// For files of programs and tools; not for pure code.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lrmoe {

// One JSON value and nothing behind it. A key that appears twice in an object is refused: a parser would keep
// one of the two and not tell.
absl::StatusOr<nlohmann::json> ParseJson(absl::string_view text);

// "FIELD is VALUE; allowed: ALLOWED", the value cut after 40 characters.
absl::Status BadField(absl::string_view field, const nlohmann::json& value, absl::string_view allowed);

absl::Status ReadInteger(absl::string_view field, const nlohmann::json& value, int64_t low, int64_t high,
                         int64_t& out);
// From `low`, at least 0, to 2^31 - 1.
absl::Status ReadInteger32(absl::string_view field, const nlohmann::json& value, int32_t low, int32_t& out);
absl::Status ReadNumber(absl::string_view field, const nlohmann::json& value, double& out);
absl::Status ReadText(absl::string_view field, const nlohmann::json& value, std::string& out);

// A list of at most `most` values.
absl::Status CheckList(absl::string_view field, const nlohmann::json& value, size_t most);
// A list of exactly `size` values, one per `what`.
absl::Status CheckListOf(absl::string_view field, const nlohmann::json& value, size_t size,
                         absl::string_view what);
// An object without keys beyond `known`.
absl::Status CheckKeys(absl::string_view field, const nlohmann::json& value,
                       std::initializer_list<const char*> known);
// Names the first of `required` that `value`, an object, lacks.
absl::Status RequireKeys(absl::string_view field, const nlohmann::json& value,
                         std::initializer_list<const char*> required);

}  // namespace lrmoe
