#include <chrono>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "common/plan_json.h"
#include "common/status_macros.h"
#include "controller/planner/planner.h"
#include "controller/planner/policies/policies.h"
#include "tools/sim/commands.h"
#include "tools/sim/plan_text.h"
#include "tools/sim/problem_json.h"

namespace lrmoe::sim {
namespace {

struct PlanOptions {
  std::string input;
  std::string policy = "lrmoe";
  std::string output = "table";
};

absl::StatusOr<std::string> ReadAll(const std::string& path) {
  std::ostringstream text;
  if (path == "-") {
    text << std::cin.rdbuf();
    return text.str();
  }
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError("cannot open " + path);
  text << file.rdbuf();
  if (file.bad()) return absl::DataLossError("cannot read " + path);
  return text.str();
}

absl::StatusOr<LayerPlan> MakePlan(const PlanOptions& options) {
  LRMOE_ASSIGN_OR_RETURN(const std::string text, ReadAll(options.input));
  LRMOE_ASSIGN_OR_RETURN(planner::PlanningProblem problem, ReadProblem(text, options.policy));
  const auto start = std::chrono::steady_clock::now();
  LRMOE_ASSIGN_OR_RETURN(LayerPlan plan, planner::Plan(problem));
  plan.plan_us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  return plan;
}

}  // namespace

void AddPlanCommand(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<PlanOptions>();
  CLI::App* command = app.add_subcommand("plan", "Plan one problem: counts in, plan out");
  std::vector<std::string> names;
  for (const planner::PolicyInfo& info : planner::AllPolicies()) names.emplace_back(info.name);
  command->add_option("--input", options->input, "Planning problem (JSON file, or - for standard input)")
      ->required();
  command->add_option("--policy", options->policy, "Planner")
      ->check(CLI::IsMember(names))
      ->capture_default_str();
  command->add_option("--output", options->output, "Form of the result")
      ->check(CLI::IsMember({"table", "json"}))
      ->capture_default_str();
  command->callback([options, &exit_code] {
    const auto plan = MakePlan(*options);
    if (!plan.ok()) {
      std::cerr << "lrmoe-sim plan: " << plan.status().message() << "\n";
      exit_code = 1;
      return;
    }
    std::cout << (options->output == "json" ? PlanToJson(*plan).dump(2) + "\n" : PlanText(*plan));
  });
}

}  // namespace lrmoe::sim
