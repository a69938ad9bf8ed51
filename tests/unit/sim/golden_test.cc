// Plans as a person sees them, with their reasons. To write the golden texts anew after a wanted change of a
// policy, run the test with LRMOE_UPDATE_GOLDEN=1 and review the difference.
#include <catch2/catch.hpp>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "controller/planner/planner.h"
#include "tools/sim/plan_text.h"
#include "tools/sim/problem_json.h"

namespace lrmoe::sim {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path);
  CAPTURE(path);
  REQUIRE(file.good());
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

TEST_CASE("plans explain themselves", "[golden]") {
  for (const char* name : {"hot_expert", "two_nodes", "short_of_memory", "impossible"}) {
    auto problem = ReadProblem(ReadFile(absl::StrCat(LRMOE_SIM_GOLDEN, "/", name, ".json")));
    CAPTURE(name, problem.status().ToString());
    REQUIRE(problem.ok());
    for (const char* policy : {"lrmoe", "fixed"}) {
      problem->policy.planner = policy;
      const auto plan = planner::Plan(*problem);
      CAPTURE(plan.status().ToString());
      const std::string text = plan.ok() ? PlanText(*plan) : absl::StrCat(plan.status().message(), "\n");
      const std::string path = absl::StrCat(LRMOE_SIM_GOLDEN, "/", name, "_", policy, ".txt");
      if (std::getenv("LRMOE_UPDATE_GOLDEN") != nullptr) std::ofstream(path) << text;
      CHECK(text == ReadFile(path));
    }
  }
}

}  // namespace
}  // namespace lrmoe::sim
