#pragma once

namespace lrmoe::test {

// Runs the tests of this program with Catch2's command line; 0 when all passed.
int RunTests(int argc, char** argv);

}  // namespace lrmoe::test
