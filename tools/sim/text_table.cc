#include "tools/sim/text_table.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace lrmoe::sim {

std::string TextTable::ToString() const {
  std::vector<size_t> width(rows_[0].size(), 0);
  for (const auto& row : rows_)
    for (size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  std::string out;
  for (size_t r = 0; r < rows_.size(); ++r) {
    std::string line;
    for (size_t i = 0; i < rows_[r].size(); ++i) {
      const std::string pad(width[i] - rows_[r][i].size(), ' ');
      line += (i > 0 ? "  " : "") + (i == 0 ? rows_[r][i] + pad : pad + rows_[r][i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out += line + "\n";
    if (r > 0) continue;
    size_t total = 2 * (width.size() - 1);
    for (size_t w : width) total += w;
    out += std::string(total, '-') + "\n";
  }
  return out;
}

std::string BytesText(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 5) bytes /= 1024, ++unit;
  return unit == 0 ? absl::StrFormat("%.0f B", bytes) : absl::StrFormat("%.2f %s", bytes, units[unit]);
}

}  // namespace lrmoe::sim
