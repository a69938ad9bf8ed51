#include "common/regroup.h"

#include <numeric>

namespace lrmoe {

RoutedCounts RegroupSources(const RoutedCounts& counts, int32_t num_ranks) {
  const int32_t num_sources = counts.num_sources(), num_experts = counts.num_experts();
  if (num_sources == num_ranks) return counts;
  const int32_t common = std::gcd(num_sources, num_ranks);
  const int32_t parts = num_ranks / common;     // of each source
  const int32_t merged = num_sources / common;  // parts in each rank
  RoutedCounts out(num_ranks, num_experts);
  for (int32_t s = 0; s < num_sources; ++s) {
    for (int32_t part = 0; part < parts; ++part) {
      const auto rank = static_cast<int32_t>((int64_t{s} * parts + part) / merged);
      for (int32_t e = 0; e < num_experts; ++e) {
        const int64_t count = counts.at(s, e), turn = (int64_t{e} + s) % parts;
        out.at(rank, e) += (count * (part + 1) + turn) / parts - (count * part + turn) / parts;
      }
    }
  }
  return out;
}

}  // namespace lrmoe
