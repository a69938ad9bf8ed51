// Text for people on a terminal: aligned tables, aligned "name  value" lists, and styles that vanish
// elsewhere.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace lrmoe {

// True when `stream` is a terminal that shows colours and NO_COLOR is not set.
bool ShowsColour(FILE* stream);

enum class Style : uint8_t { kBold = 1, kRed = 31, kGreen = 32, kYellow = 33 };

// `text` in a style, or as it is when `colour` is false.
std::string Styled(absl::string_view text, Style style, bool colour);

// `text` with control characters replaced by '?': names from other machines cannot steer the terminal.
std::string Printable(absl::string_view text);

enum class Align : uint8_t { kLeft, kRight };

struct TableColumn {
  std::string title;
  Align align = Align::kRight;
};

class Table {
 public:
  explicit Table(std::vector<TableColumn> columns);

  // One cell per column (checked). Cells are made Printable.
  void AddRow(std::vector<std::string> cells);
  // A row shown in a style.
  void AddRow(std::vector<std::string> cells, Style style);
  size_t num_rows() const { return rows_.size(); }

  // Title row, then rows; two spaces between columns, no spaces at line ends, every line begins with `indent`
  // spaces and ends with a line break. Widths count code points.
  std::string ToString(bool colour, int indent = 0) const;

 private:
  struct Row {
    std::vector<std::string> cells;
    bool styled = false;
    Style style = Style::kBold;
  };
  std::vector<TableColumn> columns_;
  std::vector<Row> rows_;
};

// "name  value" lines with the values in one column.
std::string NameValueLines(const std::vector<std::pair<std::string, std::string>>& lines, int indent = 0);

}  // namespace lrmoe
