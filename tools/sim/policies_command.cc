#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "controller/planner/policies/policies.h"
#include "tools/sim/commands.h"

namespace lrmoe::sim {

void AddPoliciesCommand(CLI::App& app) {
  auto output = std::make_shared<std::string>("table");
  CLI::App* command =
      app.add_subcommand("policies", "List the policies with their source and what they assume");
  command->add_option("--output", *output, "Form of the result")
      ->check(CLI::IsMember({"table", "json"}))
      ->capture_default_str();
  command->callback([output] {
    nlohmann::ordered_json json = nlohmann::ordered_json::array();
    for (const planner::PolicyInfo& info : planner::AllPolicies()) {
      const std::string differs = info.differs.empty() ? "nowhere" : std::string(info.differs);
      json.push_back({{"policy", std::string(info.name)},
                      {"source", std::string(info.source)},
                      {"decides", std::string(info.decides)},
                      {"assumes", std::string(info.assumes)},
                      {"differs", differs},
                      {"live", info.live},
                      {"uses_history", info.uses_history},
                      {"moves_owners", info.moves_owners},
                      {"ideal", info.ideal}});
      if (*output == "table")
        std::cout << info.name << (info.live ? "" : " (simulation only)") << "\n  source   " << info.source
                  << "\n  decides  " << info.decides << "\n  assumes  " << info.assumes << "\n  differs  "
                  << differs << "\n";
    }
    if (*output == "json") std::cout << json.dump(2) << "\n";
  });
}

}  // namespace lrmoe::sim
