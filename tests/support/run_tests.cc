// The one place where Catch2 itself is compiled.
#include "tests/support/run_tests.h"

#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>

namespace lrmoe::test {

int RunTests(int argc, char** argv) {
  return Catch::Session().run(argc, argv);
}

}  // namespace lrmoe::test
