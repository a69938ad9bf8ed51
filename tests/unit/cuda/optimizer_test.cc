// The optimizer where the device's memory is not the host's: state on the host, which gradients and weights
// cross to, and state on the device, over the emulated one.
#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/cluster.h"
#include "common/random.h"
#include "common/status_macros.h"
#include "tests/support/engine/engine_runs.h"
#include "tests/unit/cuda/emulated_engine.h"
#include "worker/engine/optimizer.h"

namespace lrmoe::testing {
namespace {

using engine::ExpertStore;
using engine::OptimizerQueue;
using engine::StatePart;
using namespace std::chrono_literals;

constexpr StatePart kParts[] = {StatePart::kMaster, StatePart::kFirstMoment, StatePart::kSecondMoment};

// A store with seeded weights, and gradients that are their masters.
std::unique_ptr<ExpertStore> MakeStore(const LayerShape& shape, kernels::Device* device, bool on_device) {
  auto made = ExpertStore::Create({.num_layers = 2, .shape = shape}, std::vector<int32_t>(shape.num_experts),
                                  0, device, {.optimizer_on_device = on_device});
  REQUIRE(made.ok());
  ExpertStore& store = **made;
  std::vector<float> values(store.parameters());
  for (int32_t layer = 0; layer < 2; ++layer) {
    for (const int32_t e : store.owned()) {
      Random random(layer * 100 + e);
      for (float& value : values) value = static_cast<float>(random.Uniform() - 0.5);
      const auto bytes = std::as_bytes(std::span(values));
      REQUIRE(store
                  .Load(layer, e, DataType::kFp32, bytes.first(4 * store.w2_offset()),
                        bytes.subspan(4 * store.w2_offset()))
                  .ok());
      float* const gradient = store.Find(layer, e)->gradient;
      if (device == nullptr) {
        std::copy(values.begin(), values.end(), gradient);
      } else {
        device->Upload(gradient, values.data(), static_cast<int64_t>(bytes.size()));
        REQUIRE(device->Wait().ok());
      }
    }
    store.SetVersion(layer, ParameterVersion{1});
  }
  return *std::move(made);
}

// Weights and state of everything, as the host sees them.
std::vector<std::byte> Contents(ExpertStore& store) {
  std::vector<std::byte> all, bytes;
  std::vector<float> floats;
  const auto append = [&](const auto& values) {
    REQUIRE(values.ok());
    const auto as_bytes = std::as_bytes(*values);
    all.insert(all.end(), as_bytes.begin(), as_bytes.end());
  };
  for (int32_t layer = 0; layer < 2; ++layer) {
    for (const int32_t e : store.owned()) {
      append(store.HostWeights(layer, e, bytes));
      for (const StatePart part : kParts) append(store.HostState(layer, e, part, floats));
    }
  }
  return all;
}

LayerShape Shape(DataType type, int32_t hidden = 24, int32_t intermediate = 20) {
  return {
      .num_experts = 3, .top_k = 1, .hidden_size = hidden, .intermediate_size = intermediate, .dtype = type};
}

std::vector<std::byte> Updated(const LayerShape& shape, kernels::Device* device, bool on_device) {
  const auto store = MakeStore(shape, device, on_device);
  auto queue = OptimizerQueue::Create(store.get(),
                                      on_device ? nullptr : std::move(kernels::CreateCpuDevice(1)).value());
  REQUIRE(queue.ok());
  for (int64_t step = 1; step <= 3; ++step) {
    for (const int32_t layer : {1, 0}) (*queue)->Enqueue(layer, {.step = step, .lr = 0.01});
    REQUIRE((*queue)->Wait(After(60s)).ok());
    CHECK(store->version(1) == ParameterVersion{static_cast<uint64_t>(1 + step)});
  }
  return Contents(*store);
}

// What one rank of a training run ends with: losses of bits show in every one of them.
struct Trained {
  LayerOutput output;
  std::vector<std::vector<InvocationReport>> reports;
  bool operator==(const Trained& other) const { return output == other.output; }
};

struct Run {
  std::vector<int64_t> tokens{7, 9};
  bool on_device = false;
  int64_t budget = std::numeric_limits<int64_t>::max();
  int64_t device_memory = emulator::kEmulatedMemoryBytes;
};

// The same tokens, split over ranks as the run says.
std::vector<absl::Status> RunAll(const Run& run, const RankScenario& scenario, Trained& trained,
                                 DataType type = DataType::kBf16) {
  LayerShape shape = Shape(type, 48, 32);
  shape.num_experts = 6;
  shape.top_k = 2;
  const MoeProblem problem = RandomProblem(shape, run.tokens, Routing::kUniform, 12);
  const EngineDevice on = Emulated(run.device_memory);
  RunSetup setup{{}, ScriptedPlans{.seed = 2, .replica_probability = 0.5, .retention = 0.6}, {}};
  setup.options.optimizer_on_device = run.on_device;
  setup.options.memory_budget_bytes = run.budget;
  setup.make_device = on.make_device;
  setup.make_transports = on.make_transports;
  return RunRanks(problem, setup, trained.output, scenario, &trained.reports);
}

Trained RequireAll(const Run& run, const RankScenario& scenario, DataType type = DataType::kBf16) {
  Trained trained;
  for (const absl::Status& status : RunAll(run, scenario, trained, type)) {
    INFO(status.ToString());
    REQUIRE(status.ok());
  }
  return trained;
}

absl::Status Train(RankRun& run, int64_t step) {
  LRMOE_RETURN_IF_ERROR(run.engine().ZeroGradients());
  LRMOE_RETURN_IF_ERROR(run.Forward({step, 0, 0}).status());
  LRMOE_RETURN_IF_ERROR(run.Backward({step, 0, 0}).status());
  run.ReadGradients(0);
  return run.engine().OptimizerStep({.step = step, .lr = 0.01});
}

const RankScenario kThreeSteps = [](RankRun& run) -> absl::Status {
  for (int64_t step = 1; step <= 3; ++step) LRMOE_RETURN_IF_ERROR(Train(run, step));
  return absl::OkStatus();
};

}  // namespace

TEST_CASE("updates across and on the device have the bits of updates in place", "[cuda][optimizer]") {
  for (const DataType type : {DataType::kBf16, DataType::kFp32}) {
    const std::vector<std::byte> want = Updated(Shape(type), nullptr, false);
    const auto device = emulator::MakeEmulatedDevice();
    CHECK((Updated(Shape(type), device.get(), false) == want));
    CHECK((Updated(Shape(type), device.get(), true) == want));
  }
}

TEST_CASE("an expert of several chunks crosses whole", "[cuda][optimizer]") {
  LayerShape shape = Shape(DataType::kBf16, 512, 1000);  // 1.5 chunks
  shape.num_experts = 2;
  const auto device = emulator::MakeEmulatedDevice();
  CHECK((Updated(shape, device.get(), false) == Updated(shape, nullptr, false)));
}

TEST_CASE("training with replicas has the same bits with state on the host and on the device",
          "[cuda][optimizer]") {
  for (const DataType type : {DataType::kBf16, DataType::kFp32})
    CHECK(RequireAll({.on_device = true}, kThreeSteps, type) == RequireAll({}, kThreeSteps, type));
}

TEST_CASE("a checkpoint goes on in the other place and with other ranks, bit for bit", "[cuda][optimizer]") {
  for (const bool saved_on_device : {false, true}) {
    std::string directory = (std::filesystem::temp_directory_path() / "lrmoe-optimizer-XXXXXX").string();
    REQUIRE(mkdtemp(directory.data()) != nullptr);
    RequireAll({.on_device = saved_on_device}, [&](RankRun& run) -> absl::Status {
      LRMOE_RETURN_IF_ERROR(Train(run, 1));
      return run.engine().SaveCheckpoint(directory, 1);
    });
    for (const std::vector<int64_t>& tokens : {std::vector<int64_t>{7, 9}, {5, 6, 5}}) {
      const RankScenario resume = [&](RankRun& run) -> absl::Status {
        LRMOE_RETURN_IF_ERROR(run.engine().LoadCheckpoint(directory, -1).status());
        LRMOE_RETURN_IF_ERROR(Train(run, 2));
        return Train(run, 3);
      };
      const Trained on_host = RequireAll({.tokens = tokens}, resume);
      CHECK(RequireAll({.tokens = tokens, .on_device = true}, resume) == on_host);
      if (tokens.size() == 2) CHECK(RequireAll({.on_device = saved_on_device}, kThreeSteps) == on_host);
    }
    std::filesystem::remove_all(directory);
  }
}

TEST_CASE("state on the device is measured as predicted, and a budget without room for it is refused",
          "[cuda][optimizer]") {
  const RankScenario layer = [](RankRun& run) -> absl::Status {
    LRMOE_RETURN_IF_ERROR(run.Forward({1, 0, 0}).status());
    return run.Backward({1, 0, 0}).status();
  };
  const Trained on_host = RequireAll({}, layer), on_device = RequireAll({.on_device = true}, layer);
  constexpr int64_t kState = 3 * (3 * 48 * 32) * 12;  // experts of a rank, parameters, bytes
  for (int rank = 0; rank < 2; ++rank) {
    const InvocationReport &host = on_host.reports[rank].at(0), &device = on_device.reports[rank].at(0);
    CHECK(device.predicted_bytes - host.predicted_bytes == kState);
    CHECK(device.peak_bytes - host.peak_bytes == kState);
  }
  const int64_t budget =
      std::max(on_host.reports[0][0].predicted_bytes, on_host.reports[1][0].predicted_bytes);
  RequireAll({.budget = budget}, layer);
  Trained refused;
  for (const absl::Status& status : RunAll({.on_device = true, .budget = budget}, layer, refused)) {
    CAPTURE(status.ToString());
    CHECK(status.code() == absl::StatusCode::kResourceExhausted);
  }
}

TEST_CASE("the planner predicts what an engine with state on the device does", "[cuda][optimizer]") {
  planner::PlanningProblem problem;
  problem.owner = ContiguousOwners(6, 2);
  problem.resident.resize(2);
  problem.cluster.ranks.assign(2, {0, 2, std::numeric_limits<int64_t>::max(), 1000.0});
  problem.model.hidden_size = 48;
  problem.model.intermediate_size = 32;
  problem.model.optimizer_on_device = true;
  LayerShape shape = Shape(DataType::kBf16, 48, 32);
  shape.num_experts = 6;
  const EngineDevice on = Emulated();
  RunSetup setup{{}, PlannerPlans(problem), {}, on.make_device, on.make_transports};
  setup.options.optimizer_on_device = true;
  LayerOutput output;
  std::vector<LayerPlan> plans(2);
  std::vector<std::vector<InvocationReport>> reports;
  const auto statuses = RunRanks(
      RandomProblem(shape, {20, 30}, Routing::kSkewed, 5), setup, output,
      [&](RankRun& run) -> absl::Status {
        LRMOE_ASSIGN_OR_RETURN(engine::ForwardResult result, run.Forward({1, 0, 0}));
        plans[run.rank()] = result.plan.plan;
        return run.Backward({1, 0, 0}).status();
      },
      &reports);
  for (int32_t rank = 0; rank < 2; ++rank) {
    INFO(statuses[rank].ToString());
    REQUIRE(statuses[rank].ok());
    CHECK(reports[rank][0].predicted_bytes == plans[rank].ranks[rank].memory_bytes.total());
  }
}

TEST_CASE("a device too small for the optimizer's state is an error of every rank, by name",
          "[cuda][optimizer]") {
  // Of 3 experts per rank: weights and gradients need 84 KiB and pages, state 162 KiB more.
  Trained trained;
  for (const absl::Status& status :
       RunAll({.on_device = true, .device_memory = 200 << 10}, kThreeSteps, trained)) {
    CHECK(status.code() == absl::StatusCode::kResourceExhausted);
    CHECK_THAT(std::string(status.message()),
               Catch::Contains("no memory for layer 0 expert") && Catch::Contains("of device memory"));
  }
}

TEST_CASE("state on the device is refused where that is the host", "[cuda][optimizer]") {
  RunSetup setup{{}, ScriptedPlans{}, {}};
  setup.options.optimizer_on_device = true;
  LayerOutput output;
  const MoeProblem problem = RandomProblem(Shape(DataType::kBf16), {3, 4}, Routing::kUniform, 1);
  for (const absl::Status& status : RunLayer(problem, setup, output)) {
    CHECK(status.code() == absl::StatusCode::kInvalidArgument);
    CHECK_THAT(std::string(status.message()), Catch::Contains("optimizer_on_device is true"));
  }
}

}  // namespace lrmoe::testing
