// Aligned columns for people: the first column to the left, the others to the right.
#pragma once

#include <string>
#include <vector>

namespace lrmoe::sim {

class TextTable {
 public:
  explicit TextTable(std::vector<std::string> header) : rows_{std::move(header)} {}
  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  // Lines with a trailing newline each; a rule under the header.
  std::string ToString() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

// "12.3 GiB", "456 B".
std::string BytesText(double bytes);

}  // namespace lrmoe::sim
