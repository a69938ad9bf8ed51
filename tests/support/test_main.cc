#include "tests/support/run_tests.h"

int main(int argc, char** argv) {
  return lrmoe::test::RunTests(argc, argv);
}
