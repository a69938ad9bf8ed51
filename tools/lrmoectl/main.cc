#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "common/config.h"
#include "common/table.h"
#include "tools/lrmoectl/cli.h"

int main(int argc, char** argv) {
  setenv("GRPC_VERBOSITY", "NONE",
         0);  // its findings come back as statuses; the user may still ask for the log
  const std::vector<std::string> arguments(argv + (argc > 0 ? 1 : 0), argv + argc);
  const lrmoe::ctl::Console console{std::cout, std::cerr, lrmoe::ShowsColour(stdout)};
  const auto environment = [](const char* name) -> const char* { return std::getenv(name); };
  const int status = lrmoe::ctl::Run(arguments, environment, console);
  std::cout.flush();
  if (!std::cout) {
    std::cerr << "lrmoectl: cannot write to the standard output\n";
    return lrmoe::kExitFailed;
  }
  return status;
}
