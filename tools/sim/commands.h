// The subcommands of lrmoe-sim. Each registers itself and its options on `app` and runs from its callback;
// results go to stdout, messages to stderr. `exit_code` becomes 1 when the command failed.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace lrmoe::sim {

void AddPlanCommand(CLI::App& app, int& exit_code);
void AddReplayCommand(CLI::App& app, int& exit_code);
void AddGenerateCommand(CLI::App& app, int& exit_code);
void AddFigureCommands(CLI::App& app, int& exit_code);  // fig6, fig7, fig8
void AddPoliciesCommand(CLI::App& app);

// "all" stands for every policy.
std::vector<std::string> ExpandPolicies(const std::vector<std::string>& names);
// The exit status of a command that ended with `status`; tells standard error what failed.
int Report(const std::string& command, const absl::Status& status);

}  // namespace lrmoe::sim
