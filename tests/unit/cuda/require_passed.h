// Checks without a test framework, as a test.
#pragma once

#include <catch2/catch.hpp>
#include <vector>

#include "tests/support/device/device_checks.h"

namespace lrmoe::testing {

inline void RequirePassed(const std::vector<CheckResult>& results) {
  for (const CheckResult& result : results) {
    CAPTURE(result.name, result.cases, result.worst, result.failure);
    CHECK(result.cases > 0);
    CHECK(result.failure.empty());
  }
}

}  // namespace lrmoe::testing
