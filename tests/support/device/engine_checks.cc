#include "tests/support/device/engine_checks.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/random.h"
#include "common/status_macros.h"

namespace lrmoe::testing {
namespace {

LayerShape Shape(const EngineDevice& on, DataType type, bool gated = true,
                 Activation activation = Activation::kSilu) {
  LayerShape shape;
  shape.num_experts = 6;
  shape.top_k = 2;
  shape.hidden_size = static_cast<int32_t>(24 * on.scale);
  shape.intermediate_size = static_cast<int32_t>(20 * on.scale);
  shape.dtype = type;
  shape.gated = gated;
  shape.activation = activation;
  return shape;
}

RunSetup OnDevice(const EngineDevice& on, RunSetup setup) {
  setup.make_device = on.make_device;
  setup.make_transports = on.make_transports;
  return setup;
}

// Keeps the first failure and the worst difference.
class Comparison {
 public:
  explicit Comparison(std::string name) { result_.name = std::move(name); }

  void Ok(const std::vector<absl::Status>& statuses) {
    for (const absl::Status& status : statuses)
      if (!status.ok()) Fail(status.ToString());
  }
  // Both compute in fp32 with sums of another order; bf16 may round the other way.
  void Near(const char* tensor, const std::vector<float>& got, const std::vector<float>& want,
            DataType type) {
    if (got.size() != want.size()) return Fail(absl::StrCat(tensor, " has another size"));
    double difference = 0, magnitude = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      difference += std::pow(double{got[i]} - want[i], 2);
      magnitude += std::pow(double{want[i]}, 2);
    }
    const double relative = std::sqrt(difference) / (std::sqrt(magnitude) + 1e-12);
    if (!(relative <= (type == DataType::kFp32 ? 1e-5 : 1e-2)))
      return Fail(absl::StrCat(tensor, " differs by ", relative));
    result_.worst = std::max(result_.worst, relative);
  }
  void Same(const LayerOutput& got, const LayerOutput& want, DataType type) {
    ++result_.cases;
    if (got.kept != want.kept) Fail("another set of pairs is kept");
    Near("y", got.y, want.y, type);
    Near("dx", got.dx, want.dx, type);
    Near("dalpha", got.dalpha, want.dalpha, type);
    for (size_t e = 0; e < want.dw1.size(); ++e) {
      Near("dW1", got.dw1[e], want.dw1[e], type);
      Near("dW2", got.dw2[e], want.dw2[e], type);
    }
  }
  // The first counts.
  void Fail(const std::string& why) {
    if (result_.failure.empty()) result_.failure = why;
  }
  void Where(const std::string& where) {
    if (!result_.failure.empty()) absl::StrAppend(&result_.failure, where);
  }
  bool failed() const { return !result_.failure.empty(); }
  const CheckResult& result() const { return result_; }

 private:
  CheckResult result_;
};

std::vector<int64_t> Tokens(const EngineDevice& on, int32_t num_ranks, uint64_t seed) {
  Random random(seed);
  std::vector<int64_t> tokens;
  // One rank of several has none.
  for (int32_t r = 0; r < num_ranks; ++r)
    tokens.push_back(r == 1 && num_ranks > 2 ? 0 : random.Between(5, 16));
  for (int64_t& t : tokens) t *= on.scale;
  return tokens;
}

}  // namespace

std::vector<CheckResult> CheckLayers(const EngineDevice& on, const std::vector<int32_t>& rank_counts) {
  std::vector<CheckResult> results;
  uint64_t seed = 1;
  for (const int32_t num_ranks : rank_counts)
    for (const DataType type : {DataType::kFp32, DataType::kBf16}) {
      Comparison comparison(absl::StrCat("layer, ", num_ranks, " ranks ", std::string(Name(type))));
      for (const auto& [retention, replicas] : {std::pair{1.0, 0.0}, {0.6, 0.0}, {0.6, 0.5}}) {
        const MoeProblem problem =
            RandomProblem(Shape(on, type), Tokens(on, num_ranks, seed), Routing::kSkewed, seed);
        ScriptedPlans plans{.seed = seed, .replica_probability = replicas, .retention = retention};
        plans.router_gradient = seed % 2 == 0 ? RouterGradient::kExact : RouterGradient::kRetained;
        RunSetup setup{{}, plans, {}};
        setup.options.recompute_activation = seed % 3 == 0;
        ++seed;
        LayerOutput want, got, again;
        comparison.Ok(RunLayer(problem, setup, want));
        comparison.Ok(RunLayer(problem, OnDevice(on, setup), got));
        comparison.Ok(RunLayer(problem, OnDevice(on, setup), again));
        comparison.Same(got, want, type);
        if (!(got == again)) comparison.Fail("two runs give different bits");
      }
      results.push_back(comparison.result());
    }
  return results;
}

CheckResult CheckCriteria(const EngineDevice& on) {
  Comparison comparison("plain experts, other criteria");
  for (const Activation activation : {Activation::kSilu, Activation::kGelu})
    for (const Selection selection : {Selection::kGradNorm2, Selection::kGradAbs, Selection::kRandom}) {
      const MoeProblem problem =
          RandomProblem(Shape(on, DataType::kFp32, false, activation), Tokens(on, 2, 5), Routing::kSkewed, 5);
      ScriptedPlans plans{.seed = 5, .retention = 0.5};
      plans.selection = selection;
      LayerOutput want, got;
      comparison.Ok(RunLayer(problem, {{}, plans, {}}, want));
      comparison.Ok(RunLayer(problem, OnDevice(on, {{}, plans, {}}), got));
      comparison.Same(got, want, DataType::kFp32);
    }
  return comparison.result();
}

CheckResult CheckRandomLayers(const EngineDevice& on, int num_layers, uint64_t seed) {
  Comparison comparison("random layers");
  for (int i = 0; i < num_layers; ++i, ++seed) {
    Random random(seed);
    LayerShape shape =
        Shape(on, random.Below(2) == 0 ? DataType::kFp32 : DataType::kBf16, random.Below(4) > 0);
    shape.num_experts = static_cast<int32_t>(random.Between(1, 9));
    shape.top_k = static_cast<int32_t>(random.Between(1, std::min(4, shape.num_experts)));
    shape.hidden_size = static_cast<int32_t>(8 * random.Between(2, 6) * on.scale);
    std::vector<int64_t> tokens(random.Between(1, 4));
    for (int64_t& t : tokens) t = random.Below(4) == 0 ? 0 : random.Between(1, 24) * on.scale;
    const Routing routing = random.Below(2) == 0 ? Routing::kSkewed : Routing::kOneExpert;
    const MoeProblem problem = RandomProblem(shape, tokens, routing, seed);
    ScriptedPlans plans{.seed = seed, .replica_probability = random.Uniform(), .retention = random.Uniform()};
    plans.random_quotas = random.Below(2) == 0;
    constexpr Selection kSelections[] = {Selection::kLrm, Selection::kLrmSampled, Selection::kRandom};
    plans.selection = kSelections[random.Below(3)];
    if (plans.selection != Selection::kLrmSampled && random.Below(3) == 0) plans.rescale = Rescale::kRows;
    if (random.Below(2) == 0) plans.router_gradient = RouterGradient::kRetained;
    RunSetup setup{{}, plans, {}};
    setup.options.recompute_activation = random.Below(2) == 0;
    setup.options.overlap = random.Below(2) == 0;
    setup.options.least_piece_bytes = 1;
    LayerOutput want, got;
    comparison.Ok(RunLayer(problem, setup, want));
    comparison.Ok(RunLayer(problem, OnDevice(on, setup), got));
    comparison.Same(got, want, shape.dtype);
    comparison.Where(absl::StrCat(" (seed ", seed, ")"));
    if (comparison.failed()) break;
  }
  return comparison.result();
}

CheckResult CheckSteps(const EngineDevice& on) {
  Comparison comparison("steps with updates");
  const MoeProblem problem = RandomProblem(Shape(on, DataType::kBf16), Tokens(on, 2, 7), Routing::kSkewed, 7);
  ScriptedPlans plans{.seed = 7, .replica_probability = 0.5, .retention = 0.7};
  std::vector<float> norms[3];  // the CPU; the device, state on the host; state on the device
  LayerOutput outputs[3];
  for (const int which : {0, 1, 2}) {
    RunSetup setup{{}, plans, {}};
    if (which > 0) setup = OnDevice(on, std::move(setup));
    setup.options.optimizer_on_device = which == 2;
    comparison.Ok(RunRanks(problem, setup, outputs[which], [&](RankRun& run) -> absl::Status {
      for (int64_t step = 1; step <= 2; ++step) {
        for (int32_t micro_batch = 0; micro_batch < 2; ++micro_batch) {
          LRMOE_RETURN_IF_ERROR(run.Forward({step, 0, micro_batch}).status());
          LRMOE_RETURN_IF_ERROR(run.Backward({step, 0, micro_batch}).status());
        }
        LRMOE_ASSIGN_OR_RETURN(const double squared, run.engine().SquaredGradientNorm());
        if (run.rank() == 0) norms[which].push_back(static_cast<float>(squared));
        run.ReadGradients(0);
        engine::AdamWStep update;
        update.step = step;
        LRMOE_RETURN_IF_ERROR(run.engine().OptimizerStep(update));
        LRMOE_RETURN_IF_ERROR(run.engine().ZeroGradients());
      }
      return run.Forward({3, 0, 0}, false).status();
    }));
  }
  for (const int which : {1, 2}) {
    comparison.Near("gradient norm", norms[which], norms[0], DataType::kBf16);
    comparison.Same(outputs[which], outputs[0], DataType::kBf16);
  }
  return comparison.result();
}

}  // namespace lrmoe::testing
