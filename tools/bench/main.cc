// lrmoe-bench: what the parts take on this machine.
#include <iostream>

#include "common/freed_memory.h"
#include "common/version.h"
#include "tools/bench/commands.h"

int main(int argc, char** argv) {
  lrmoe::KeepFreedMemory();
  CLI::App app("Measures the parts of lrmoe on this machine.", "lrmoe-bench");
  app.set_version_flag("--version",
                       "lrmoe-bench " + std::string(lrmoe::Version().data(), lrmoe::Version().size()));
  app.require_subcommand(1);
  int exit_code = 0;
  lrmoe::bench::AddLayerCommand(app, exit_code);
  lrmoe::bench::AddGemmCommand(app, exit_code);
  lrmoe::bench::AddSelectCommand(app, exit_code);
  lrmoe::bench::AddPlannerCommand(app, exit_code);
  lrmoe::bench::AddControlPlaneCommand(app, exit_code);
  lrmoe::bench::AddComparePytorchCommand(app, exit_code);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return exit_code;
}
