// Saving and loading through the engine: training goes on bit for bit, and a bad checkpoint changes nothing
// on any rank.
#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "tests/support/engine/engine_runs.h"

using namespace lrmoe;
using namespace lrmoe::testing;

TEST_CASE("an engine goes on from a checkpoint bit for bit, and refuses a damaged one on all ranks") {
  std::string directory = (std::filesystem::temp_directory_path() / "lrmoe-engine-XXXXXX").string();
  REQUIRE(mkdtemp(directory.data()) != nullptr);
  LayerShape shape;
  shape.num_experts = 4;
  shape.top_k = 2;
  shape.hidden_size = 16;
  shape.intermediate_size = 8;
  const MoeProblem problem = RandomProblem(shape, {7, 9, 5}, Routing::kUniform, 12);
  const RunSetup setup{{}, ScriptedPlans{.seed = 2, .replica_probability = 0.5, .retention = 0.6}, {}};
  const auto train = [](RankRun& run, int64_t step) -> absl::Status {
    LRMOE_RETURN_IF_ERROR(run.engine().ZeroGradients());
    LRMOE_RETURN_IF_ERROR(run.Forward({step, 0, 0}).status());
    LRMOE_RETURN_IF_ERROR(run.Backward({step, 0, 0}).status());
    run.ReadGradients(0);
    return run.engine().OptimizerStep({.step = step});
  };
  const auto run_all = [&](const RankScenario& scenario) {
    LayerOutput output;
    for (const absl::Status& status : RunRanks(problem, setup, output, scenario)) {
      INFO(status.ToString());
      REQUIRE(status.ok());
    }
    return output;
  };

  const LayerOutput kept_on = run_all([&](RankRun& run) -> absl::Status {
    LRMOE_RETURN_IF_ERROR(train(run, 1));
    LRMOE_RETURN_IF_ERROR(run.engine().SaveCheckpoint(directory, 1));
    LRMOE_RETURN_IF_ERROR(train(run, 2));
    return train(run, 3);
  });
  const RankScenario resume = [&](RankRun& run) -> absl::Status {
    LRMOE_RETURN_IF_ERROR(run.engine().LoadCheckpoint(directory, -1).status());
    LRMOE_RETURN_IF_ERROR(train(run, 2));
    return train(run, 3);
  };
  CHECK(run_all(resume) == kept_on);

  // The file of one rank: every rank must refuse, and keep the weights it has.
  std::ofstream(directory + "/step-1/model-00001-of-00003.safetensors", std::ios::app) << "x";
  const LayerOutput untouched = run_all([&](RankRun& run) { return train(run, 1); });
  CHECK(untouched == run_all([&](RankRun& run) -> absl::Status {
          const absl::Status status = run.engine().LoadCheckpoint(directory, 1).status();
          if (!absl::IsDataLoss(status) ||
              !absl::StrContains(std::string(status.message()), "model-00001-of-00003"))
            return absl::InternalError(absl::StrCat("unexpected: ", status.ToString()));
          return train(run, 1);
        }));
  std::filesystem::remove_all(directory);
}
