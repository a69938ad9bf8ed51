// lrmoe-sim: planning without workers.
#include <iostream>

#include "common/freed_memory.h"
#include "common/version.h"
#include "tools/sim/commands.h"

int main(int argc, char** argv) {
  lrmoe::KeepFreedMemory();
  CLI::App app("Plans recorded or generated routing; needs no workers.", "lrmoe-sim");
  app.set_version_flag("--version",
                       "lrmoe-sim " + std::string(lrmoe::Version().data(), lrmoe::Version().size()));
  app.require_subcommand(1);
  int exit_code = 0;
  lrmoe::sim::AddPlanCommand(app, exit_code);
  lrmoe::sim::AddReplayCommand(app, exit_code);
  lrmoe::sim::AddGenerateCommand(app, exit_code);
  lrmoe::sim::AddFigureCommands(app, exit_code);
  lrmoe::sim::AddPoliciesCommand(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  return exit_code;
}
