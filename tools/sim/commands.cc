#include "tools/sim/commands.h"

#include <iostream>

#include "controller/planner/policies/policies.h"

namespace lrmoe::sim {

std::vector<std::string> ExpandPolicies(const std::vector<std::string>& names) {
  std::vector<std::string> out;
  for (const std::string& name : names) {
    if (name != "all") {
      out.push_back(name);
      continue;
    }
    for (const planner::PolicyInfo& info : planner::AllPolicies()) out.emplace_back(info.name);
  }
  return out;
}

int Report(const std::string& command, const absl::Status& status) {
  if (status.ok()) return 0;
  std::cerr << "lrmoe-sim " << command << ": " << status.message() << "\n";
  return 1;
}

}  // namespace lrmoe::sim
