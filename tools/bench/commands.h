// The subcommands of lrmoe-bench. Each adds itself to `app` and sets `exit_code` when it has run.
#pragma once

#include <CLI/CLI.hpp>

namespace lrmoe::bench {

void AddLayerCommand(CLI::App& app, int& exit_code);
void AddGemmCommand(CLI::App& app, int& exit_code);
void AddControlPlaneCommand(CLI::App& app, int& exit_code);
void AddComparePytorchCommand(CLI::App& app, int& exit_code);
void AddSelectCommand(CLI::App& app, int& exit_code);
void AddPlannerCommand(CLI::App& app, int& exit_code);

}  // namespace lrmoe::bench
