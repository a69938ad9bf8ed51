// The subcommands of lrmoe-sim. Each registers itself and its options on `app` and runs from its callback;
// results go to stdout, messages to stderr. `exit_code` becomes 1 when the command failed.
#pragma once

#include <CLI/CLI.hpp>

namespace lrmoe::sim {

void AddPlanCommand(CLI::App& app, int& exit_code);
void AddPoliciesCommand(CLI::App& app);

}  // namespace lrmoe::sim
