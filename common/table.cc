#include "common/table.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "common/check.h"

namespace lrmoe {
namespace {

// Code points of UTF-8 text: every byte that is not a continuation byte.
size_t Width(absl::string_view text) {
  return static_cast<size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

std::string Padded(absl::string_view text, size_t width, Align align) {
  const std::string padding(width - std::min(width, Width(text)), ' ');
  return align == Align::kLeft ? absl::StrCat(text, padding) : absl::StrCat(padding, text);
}

}  // namespace

bool ShowsColour(FILE* stream) {
  const char* terminal = std::getenv("TERM");
  const char* refused = std::getenv("NO_COLOR");
  return isatty(fileno(stream)) == 1 && (refused == nullptr || *refused == '\0') && terminal != nullptr &&
         absl::string_view(terminal) != "dumb";
}

std::string Styled(absl::string_view text, Style style, bool colour) {
  if (!colour) return std::string(text);
  return absl::StrCat("\x1b[", static_cast<int>(style), "m", text, "\x1b[0m");
}

std::string Printable(absl::string_view text) {
  std::string out(text);
  for (char& c : out)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  return out;
}

Table::Table(std::vector<TableColumn> columns) : columns_(std::move(columns)) {
  LRMOE_CHECK(!columns_.empty());
}

void Table::AddRow(std::vector<std::string> cells) {
  LRMOE_CHECK_EQ(cells.size(), columns_.size());
  for (std::string& cell : cells) cell = Printable(cell);
  rows_.push_back({std::move(cells), false, Style::kBold});
}

void Table::AddRow(std::vector<std::string> cells, Style style) {
  AddRow(std::move(cells));
  rows_.back().styled = true;
  rows_.back().style = style;
}

std::string Table::ToString(bool colour, int indent) const {
  std::vector<size_t> widths;
  for (size_t column = 0; column < columns_.size(); ++column) {
    widths.push_back(Width(columns_[column].title));
    for (const Row& row : rows_) widths.back() = std::max(widths.back(), Width(row.cells[column]));
  }
  const auto line = [&](const auto& cell) {
    std::string text;
    for (size_t column = 0; column < columns_.size(); ++column)
      absl::StrAppend(&text, column ? "  " : "",
                      Padded(cell(column), widths[column], columns_[column].align));
    text.erase(text.find_last_not_of(' ') + 1);
    return text;
  };
  const std::string margin(static_cast<size_t>(indent), ' ');
  const std::string titles =
      line([&](size_t column) -> const std::string& { return columns_[column].title; });
  std::string out = absl::StrCat(margin, Styled(titles, Style::kBold, colour), "\n");
  for (const Row& row : rows_) {
    const std::string text = line([&](size_t column) -> const std::string& { return row.cells[column]; });
    absl::StrAppend(&out, margin, Styled(text, row.style, colour && row.styled), "\n");
  }
  return out;
}

std::string NameValueLines(const std::vector<std::pair<std::string, std::string>>& lines, int indent) {
  size_t width = 0;
  for (const auto& [name, value] : lines) width = std::max(width, Width(name));
  std::string out;
  for (const auto& [name, value] : lines)
    absl::StrAppend(&out, std::string(static_cast<size_t>(indent), ' '), Padded(name, width, Align::kLeft),
                    "  ", Printable(value), "\n");
  return out;
}

}  // namespace lrmoe
