#include <catch2/catch.hpp>

#include "tests/contract/transport/conformance.h"

namespace lrmoe::transport {

void RunConformance(Ranks& ranks) {
  for (const ConformanceCase& test : ConformanceCases()) {
    for (const int32_t size : ranks.sizes()) {
      if (size < test.smallest_size) continue;
      for (int32_t seed = 0; seed < test.repetitions; ++seed) {
        INFO(test.name << ", " << size << " ranks, seed " << seed);
        const std::vector<std::string> failures = ranks.Run(size, test.body(static_cast<uint64_t>(seed)));
        for (const std::string& failure : failures) UNSCOPED_INFO(failure);
        CHECK(failures.empty());
      }
    }
  }
}

}  // namespace lrmoe::transport
