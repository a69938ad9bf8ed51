#include "common/config_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/status_macros.h"

namespace lrmoe {
namespace {

constexpr size_t kMaxFileBytes = size_t{1}
                                 << 20;  // a settings file is a page of text; more is the wrong file

void SkipSpace(absl::string_view& rest) {
  rest = absl::StripLeadingAsciiWhitespace(rest);
}

bool IsBareCharacter(char c) {
  return absl::ascii_isalnum(c) || c == '_' || c == '-' || c == '.' || c == '+' || c == ':' || c == '/';
}

absl::Status ParseQuoted(absl::string_view& rest, std::string& out) {
  const char quote = rest.front();
  rest.remove_prefix(1);
  while (!rest.empty()) {
    char c = rest.front();
    rest.remove_prefix(1);
    if (c == quote) return absl::OkStatus();
    if (c == '\\' && quote == '"') {
      if (rest.empty()) break;
      const absl::string_view escapes = "\"\\nt", meanings = "\"\\\n\t";
      const size_t which = escapes.find(rest.front());
      if (which == absl::string_view::npos)
        return absl::InvalidArgumentError(absl::StrCat("unknown escape \\", rest.substr(0, 1)));
      c = meanings[which];
      rest.remove_prefix(1);
    }
    out.push_back(c);
  }
  return absl::InvalidArgumentError("a string is not closed");
}

absl::Status ParseScalar(absl::string_view& rest, std::string& out) {
  if (!rest.empty() && (rest.front() == '"' || rest.front() == '\'')) return ParseQuoted(rest, out);
  size_t end = 0;
  while (end < rest.size() && IsBareCharacter(rest[end])) ++end;
  if (end == 0) return absl::InvalidArgumentError("a value is missing");
  out = std::string(rest.substr(0, end));
  rest.remove_prefix(end);
  return absl::OkStatus();
}

absl::Status ParseList(absl::string_view& rest, std::string& out) {
  std::vector<std::string> items;
  rest.remove_prefix(1);
  for (SkipSpace(rest); !rest.empty() && rest.front() != ']'; SkipSpace(rest)) {
    LRMOE_RETURN_IF_ERROR(ParseScalar(rest, items.emplace_back()));
    SkipSpace(rest);
    if (rest.empty() || (rest.front() != ',' && rest.front() != ']'))
      return absl::InvalidArgumentError("expected , or ] in a list");
    if (rest.front() == ',') rest.remove_prefix(1);
  }
  if (rest.empty()) return absl::InvalidArgumentError("a list is not closed on its line");
  rest.remove_prefix(1);
  out = absl::StrJoin(items, ",");
  return absl::OkStatus();
}

// One line with something on it.
absl::Status ParseLine(absl::string_view line, ConfigFileEntry& entry) {
  if (line.front() == '[')
    return absl::InvalidArgumentError(
        absl::StrCat("tables like ", line, " are not used here; write key = value"));
  size_t end = 0;
  while (end < line.size() && (absl::ascii_isalnum(line[end]) || line[end] == '_' || line[end] == '-')) ++end;
  entry.key = std::string(line.substr(0, end));
  line.remove_prefix(end);
  SkipSpace(line);
  if (entry.key.empty() || line.empty() || line.front() != '=')
    return absl::InvalidArgumentError("expected key = value");
  line.remove_prefix(1);
  SkipSpace(line);
  if (!line.empty() && line.front() == '[') {
    LRMOE_RETURN_IF_ERROR(ParseList(line, entry.value));
  } else {
    LRMOE_RETURN_IF_ERROR(ParseScalar(line, entry.value));
  }
  SkipSpace(line);
  if (!line.empty() && line.front() != '#')
    return absl::InvalidArgumentError(
        absl::StrCat("\"", line, "\" after the value of ", entry.key, "; put text in quotes"));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<ConfigFileEntry>> ParseConfigText(absl::string_view path, absl::string_view text) {
  std::vector<ConfigFileEntry> entries;
  std::set<std::string> seen;
  int line_number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++line_number;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line.front() == '#') continue;
    ConfigFileEntry entry;
    entry.line = line_number;
    absl::Status status = ParseLine(line, entry);
    if (status.ok() && !seen.insert(entry.key).second)
      status = absl::InvalidArgumentError(absl::StrCat(entry.key, " is given twice"));
    if (!status.ok())
      return absl::InvalidArgumentError(absl::StrCat(path, ":", line_number, ": ", status.message()));
    entries.push_back(std::move(entry));
  }
  return entries;
}

absl::StatusOr<std::vector<ConfigFileEntry>> ReadConfigFile(const std::string& path) {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (!file) {
    const int error = errno;
    return absl::ErrnoToStatus(error, absl::StrCat("cannot read the configuration file ", path));
  }
  std::string text(kMaxFileBytes + 1, '\0');
  errno = 0;
  text.resize(std::fread(text.data(), 1, text.size(), file.get()));
  if (std::ferror(file.get()))
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot read the configuration file ", path));
  if (text.size() > kMaxFileBytes)
    return absl::InvalidArgumentError(absl::StrCat(path, " is over 1 MiB: not a configuration file"));
  return ParseConfigText(path, text);
}

std::string QuoteConfigString(absl::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out.push_back('\\');
    if (c == '\n')
      out.append("\\n");
    else if (c == '\t')
      out.append("\\t");
    else
      out.push_back(c);
  }
  return out + "\"";
}

}  // namespace lrmoe
