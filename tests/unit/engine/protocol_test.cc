// What the engine does when calls, arguments, plans or peers are bad: the same clear error on all ranks, and
// it goes on.
#include <algorithm>
#include <catch2/catch.hpp>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/random.h"
#include "common/status_macros.h"
#include "tests/support/engine/engine_runs.h"
#include "worker/transport/faulty.h"

using namespace lrmoe;
using namespace lrmoe::testing;

namespace {

MoeProblem SmallProblem(std::vector<int64_t> tokens = {7, 9, 5}) {
  return RandomProblem(SmallShape(), std::move(tokens), Routing::kUniform, 12);
}

ScriptedPlans SmallPlans(double retention = 0.6) {
  return {.seed = 2, .replica_probability = 0.5, .retention = retention};
}

// Not OK, and the message says `words`.
absl::Status Expect(const absl::Status& status, absl::StatusCode code,
                    const std::vector<std::string>& words) {
  if (status.code() != code)
    return absl::InternalError(absl::StrCat("unexpected status: ", status.ToString()));
  for (const std::string& word : words)
    if (!absl::StrContains(std::string(status.message()), word))
      return absl::InternalError(absl::StrCat("\"", word, "\" is missing in: ", status.ToString()));
  return absl::OkStatus();
}

absl::Status OneLayer(RankRun& run, const Invocation& invocation) {
  LRMOE_RETURN_IF_ERROR(run.Forward(invocation).status());
  return run.Backward(invocation).status();
}

// Runs the scenario on three ranks; afterwards a whole layer must still work and be right.
void RunAndRecover(const RankScenario& scenario, RunSetup setup = {{}, SmallPlans(), {}}, bool exact = true) {
  const MoeProblem problem = SmallProblem();
  LayerOutput output;
  const std::vector<absl::Status> statuses =
      RunRanks(problem, setup, output, [&](RankRun& run) -> absl::Status {
        LRMOE_RETURN_IF_ERROR(scenario(run));
        LRMOE_RETURN_IF_ERROR(run.engine().ZeroGradients());
        LRMOE_RETURN_IF_ERROR(OneLayer(run, {100, 0, 0}));
        run.ReadGradients(0);
        if (run.engine().open_contexts() != 0) return absl::InternalError("contexts left open");
        return run.engine().Finish();
      });
  for (const absl::Status& status : statuses) {
    INFO(status.ToString());
    REQUIRE(status.ok());
  }
  const MoeResult reference = ReferenceLayer(problem, output.kept, exact);
  CHECK(RelativeError(output.y, reference.y) < 1e-5);
  CHECK(RelativeError(output.dx, reference.dx) < 1e-5);
  for (int32_t e = 0; e < problem.shape.num_experts; ++e)
    CHECK(RelativeError(output.dw1[e], reference.dw1[e]) < 1e-5);
}

using absl::StatusCode;

}  // namespace

TEST_CASE("bad arguments on one rank are the same error on all ranks") {
  RunAndRecover([](RankRun& run) -> absl::Status {
    const auto spoil = [&](auto change, const std::vector<std::string>& words) -> absl::Status {
      engine::ForwardArgs args = run.ForwardArguments({1, 0, 0});
      if (run.rank() == 1) change(args);
      return Expect(run.engine().Forward(args).status(), StatusCode::kInvalidArgument, words);
    };
    std::vector<int32_t> ids(18, 0);
    for (size_t i = 1; i < ids.size(); i += 2) ids[i] = 1;
    std::vector<int32_t> out_of_range = ids, negative = ids, twice = ids;
    out_of_range[5] = 4;
    negative[4] = -1;
    twice[3] = 0;
    std::vector<float> alpha(18, 0.5F);
    alpha[6] = std::numeric_limits<float>::quiet_NaN();
    LRMOE_RETURN_IF_ERROR(spoil([&](auto& args) { args.expert_idx = out_of_range; },
                                {"rank 1", "token 2 slot 1", "is 4", "0..3"}));
    LRMOE_RETURN_IF_ERROR(
        spoil([&](auto& args) { args.expert_idx = negative; }, {"rank 1", "token 2 slot 0", "-1"}));
    LRMOE_RETURN_IF_ERROR(
        spoil([&](auto& args) { args.expert_idx = twice; }, {"rank 1", "token 1", "twice"}));
    LRMOE_RETURN_IF_ERROR(
        spoil([&](auto& args) { args.alpha = alpha; }, {"rank 1", "token 3 slot 0", "finite"}));
    LRMOE_RETURN_IF_ERROR(spoil([&](auto& args) { args.x = args.x.first(args.x.size() - 1); },
                                {"rank 1", "x (bytes)", "expected 576"}));
    LRMOE_RETURN_IF_ERROR(spoil([&](auto& args) { args.num_tokens = -1; }, {"rank 1", "num_tokens is -1"}));
    LRMOE_RETURN_IF_ERROR(run.Forward({1, 0, 0}).status());
    engine::BackwardArgs args = run.BackwardArguments({1, 0, 0});
    if (run.rank() == 2) args.dy = args.dy.first(8);
    LRMOE_RETURN_IF_ERROR(Expect(run.engine().Backward(args).status(), StatusCode::kInvalidArgument,
                                 {"rank 2", "dy (bytes) has 8"}));
    return run.Backward({1, 0, 0}).status();  // nothing had changed
  });
}

TEST_CASE("ranks that disagree on step, layer or operation all get both sides") {
  RunAndRecover([](RankRun& run) -> absl::Status {
    LRMOE_RETURN_IF_ERROR(
        Expect(run.Forward({run.rank() == 2 ? 8 : 7, 0, 0}).status(), StatusCode::kInvalidArgument,
               {"ranks disagree", "rank 0 calls forward of step 7", "rank 2 calls forward of step 8"}));
    LRMOE_RETURN_IF_ERROR(Expect(run.Forward({7, 0, run.rank() == 1 ? 3 : 0}).status(),
                                 StatusCode::kInvalidArgument, {"micro-batch 0", "rank 1", "micro-batch 3"}));
    LRMOE_RETURN_IF_ERROR(run.Forward({7, 0, 0}).status());
    const absl::Status mixed =
        run.rank() == 0 ? run.Backward({7, 0, 0}).status() : run.engine().Discard({7, 0, 0});
    LRMOE_RETURN_IF_ERROR(
        Expect(mixed, StatusCode::kInvalidArgument, {"rank 0 calls backward", "rank 1 calls discard"}));
    engine::AdamWStep step;
    step.lr = run.rank() == 1 ? 2e-3 : 1e-3;
    LRMOE_RETURN_IF_ERROR(Expect(run.engine().OptimizerStep(step), StatusCode::kInvalidArgument,
                                 {"rank 0 calls optimizer step", "lr 0.001", "rank 1", "lr 0.002"}));
    LRMOE_RETURN_IF_ERROR(Expect(run.Forward({7, 0, 1}, run.rank() != 0).status(),
                                 StatusCode::kInvalidArgument, {"evaluation", "with backward"}));
    return run.Backward({7, 0, 0}).status();
  });
}

TEST_CASE("a refused request takes part, and every rank hears the reason") {
  RunAndRecover([](RankRun& run) -> absl::Status {
    const Invocation invocation{3, 0, 0};
    const absl::Status status =
        run.rank() == 1 ? run.engine().Refuse(engine::Operation::kForward, invocation,
                                              absl::OutOfRangeError("descriptor x lies outside its arena"))
                        : run.Forward(invocation).status();
    return Expect(status, StatusCode::kOutOfRange, {"rank 1: descriptor x lies outside its arena"});
  });
}

TEST_CASE("a score that is not finite is an error naming the pair, and the context is freed") {
  RunAndRecover([](RankRun& run) -> absl::Status {
    LRMOE_RETURN_IF_ERROR(run.Forward({1, 0, 0}).status());
    engine::BackwardArgs args = run.BackwardArguments({1, 0, 0});
    std::vector<std::byte> dy(args.dy.begin(), args.dy.end());
    const float nan = std::numeric_limits<float>::quiet_NaN();
    if (run.rank() == 1)
      std::copy_n(reinterpret_cast<const std::byte*>(&nan), 4, dy.begin() + (4 * 16 + 3) * 4);
    args.dy = dy;
    LRMOE_RETURN_IF_ERROR(Expect(run.engine().Backward(args).status(), StatusCode::kOutOfRange,
                                 {"rank 1 token 4 slot 0", "expert", "nan", "step 1 layer 0"}));
    return Expect(run.Backward({1, 0, 0}).status(), StatusCode::kNotFound, {"no forward of step 1"});
  });
}

TEST_CASE("a planner's error comes back on all ranks and leaves the engine usable") {
  const ScriptedPlans scripted = SmallPlans();
  const PlanFunction plans = [scripted](const Invocation& invocation,
                                        const RoutedCounts& counts) -> absl::StatusOr<ExecutionPlan> {
    if (invocation.step == 1) return absl::ResourceExhaustedError("no candidate fits: memory of rank 2");
    ExecutionPlan execution = scripted(invocation, counts);
    if (invocation.step == 2) execution.plan.instances[0].backward_rows += 1;
    return execution;
  };
  RunAndRecover(
      [](RankRun& run) -> absl::Status {
        LRMOE_RETURN_IF_ERROR(Expect(run.Forward({1, 0, 0}).status(), StatusCode::kResourceExhausted,
                                     {"no candidate fits: memory of rank 2"}));
        return Expect(run.Forward({2, 0, 0}).status(), StatusCode::kInternal,
                      {"cannot be executed", "quota"});
      },
      {{}, plans, {}});
}

TEST_CASE("a plan beyond the memory budget is refused on all ranks") {
  RunSetup setup{{}, SmallPlans(), {}};
  setup.options.memory_budget_bytes = 1 << 20;
  const MoeProblem problem = RandomProblem(SmallShape(), {7, 20000}, Routing::kUniform, 12);
  LayerOutput output;
  const std::vector<absl::Status> statuses = RunRanks(problem, setup, output, [](RankRun& run) {
    return Expect(run.Forward({1, 0, 0}).status(), StatusCode::kResourceExhausted,
                  {"step 1 layer 0", "needs", "memory_budget_bytes 1048576"});
  });
  for (const absl::Status& status : statuses) {
    INFO(status.ToString());
    REQUIRE(status.ok());
  }
}

TEST_CASE("open forwards: discard, recomputation, evaluation, a cap that names the leak") {
  RunSetup setup{{}, SmallPlans(), {}};
  setup.options.max_open_contexts = 2;
  RunAndRecover(
      [](RankRun& run) -> absl::Status {
        LRMOE_RETURN_IF_ERROR(run.Forward({1, 0, 0}, false).status());
        if (run.engine().open_contexts() != 0) return absl::InternalError("an evaluation saved something");
        LRMOE_RETURN_IF_ERROR(Expect(run.engine().Discard({1, 0, 0}), StatusCode::kNotFound, {"step 1"}));
        LRMOE_RETURN_IF_ERROR(run.Forward({1, 0, 0}).status());
        LRMOE_RETURN_IF_ERROR(run.Forward({1, 0, 0}).status());  // recomputation
        LRMOE_RETURN_IF_ERROR(run.Forward({1, 0, 1}).status());
        LRMOE_RETURN_IF_ERROR(
            Expect(run.Forward({1, 0, 2}).status(), StatusCode::kResourceExhausted,
                   {"2 forwards are open", "max_open_contexts 2", "oldest is step 1 layer 0"}));
        LRMOE_RETURN_IF_ERROR(run.engine().Discard({1, 0, 1}));
        LRMOE_RETURN_IF_ERROR(run.Forward({1, 0, 2}).status());
        LRMOE_RETURN_IF_ERROR(run.Backward({1, 0, 2}).status());
        LRMOE_RETURN_IF_ERROR(run.Forward({2, 0, 0}).status());  // a later step drops what step 1 left
        if (run.engine().open_contexts() != 1) return absl::InternalError("an earlier step is still open");
        return run.Backward({2, 0, 0}).status();
      },
      setup);
}

TEST_CASE("a backward after the update is an error naming both versions") {
  LayerOutput output;
  const std::vector<absl::Status> statuses =
      RunRanks(SmallProblem(), {{}, SmallPlans(), {}}, output, [](RankRun& run) -> absl::Status {
        LRMOE_RETURN_IF_ERROR(run.Forward({1, 0, 0}).status());
        LRMOE_RETURN_IF_ERROR(run.engine().OptimizerStep({}));
        LRMOE_RETURN_IF_ERROR(Expect(run.Backward({1, 0, 0}).status(), StatusCode::kFailedPrecondition,
                                     {"used parameter version 1", "has version 2"}));
        LRMOE_RETURN_IF_ERROR(run.engine().Discard({1, 0, 0}));
        return OneLayer(run, {2, 0, 0});
      });
  for (const absl::Status& status : statuses) {
    INFO(status.ToString());
    REQUIRE(status.ok());
  }
}

TEST_CASE("replicas refreshed behind the update are current and change no result") {
  ScriptedPlans plans = SmallPlans();
  plans.replica_probability = 1.0;
  std::vector<LayerOutput> outputs(2);
  for (const bool refresh : {false, true}) {
    const std::vector<absl::Status> statuses =
        RunRanks(SmallProblem(), {{}, plans, {}}, outputs[refresh], [&](RankRun& run) -> absl::Status {
          LRMOE_RETURN_IF_ERROR(run.engine().RefreshReplicas());  // there are none
          LRMOE_RETURN_IF_ERROR(OneLayer(run, {1, 0, 0}));
          LRMOE_RETURN_IF_ERROR(run.engine().OptimizerStep({}));
          if (refresh) LRMOE_RETURN_IF_ERROR(run.engine().RefreshReplicas());
          engine::ExpertStore& store = run.engine().store();
          const std::vector<int32_t> replicas = store.Replicas(0);
          if (replicas.empty()) return absl::InternalError("the plan has no replica");
          for (const int32_t expert : replicas)
            if ((store.Find(0, expert)->version == store.version(0)) != refresh)
              return absl::InternalError(absl::StrCat("replica of expert ", expert, " has another version"));
          return OneLayer(run, {2, 0, 0});
        });
    for (const absl::Status& status : statuses) {
      INFO(status.ToString());
      REQUIRE(status.ok());
    }
  }
  REQUIRE(outputs[0].y == outputs[1].y);
  REQUIRE(outputs[0].dx == outputs[1].dx);
}

TEST_CASE("weights loaded again reach the replicas, and close what the old ones opened") {
  LayerOutput output;
  ScriptedPlans plans = SmallPlans();
  plans.replica_probability = 1.0;
  const std::vector<absl::Status> statuses =
      RunRanks(SmallProblem(), {{}, plans, {}}, output, [](RankRun& run) -> absl::Status {
        LRMOE_RETURN_IF_ERROR(OneLayer(run, {1, 0, 0}));
        LRMOE_RETURN_IF_ERROR(run.Forward({1, 0, 1}).status());
        engine::ExpertStore& store = run.engine().store();
        const std::vector<std::byte> zeros(store.parameters() * sizeof(float));
        const std::span<const std::byte> all(zeros);
        const int64_t split = store.w2_offset() * static_cast<int64_t>(sizeof(float));
        for (int32_t expert : store.owned())
          LRMOE_RETURN_IF_ERROR(
              run.engine().LoadExpert(0, expert, DataType::kFp32, all.first(split), all.subspan(split)));
        LRMOE_RETURN_IF_ERROR(run.engine().FinishLoad(0));
        LRMOE_RETURN_IF_ERROR(
            Expect(run.Backward({1, 0, 1}).status(), StatusCode::kFailedPrecondition, {"version"}));
        return run.Forward({1, 0, 2}).status();
      });
  for (const absl::Status& status : statuses) {
    INFO(status.ToString());
    REQUIRE(status.ok());
  }
  REQUIRE(std::all_of(output.y.begin(), output.y.end(), [](float value) { return value == 0.0f; }));
}

TEST_CASE("forward before weights is refused, and loading names what is missing") {
  const MoeProblem problem = SmallProblem();
  RunSetup setup{{}, SmallPlans(), {}};
  LayerOutput output;
  setup.options.model.num_layers = 2;
  const std::vector<absl::Status> statuses =
      RunRanks(problem, setup, output, [](RankRun& run) -> absl::Status {
        LRMOE_RETURN_IF_ERROR(
            Expect(run.Forward({1, 2, 0}).status(), StatusCode::kInvalidArgument, {"layer is 2", "0..1"}));
        return Expect(run.engine().FinishLoad(5), StatusCode::kInvalidArgument, {"layer is 5"});
      });
  for (const absl::Status& status : statuses) {
    INFO(status.ToString());
    REQUIRE(status.ok());
  }
}

TEST_CASE("the squared gradient norm is that of all ranks") {
  const MoeProblem problem = SmallProblem();
  LayerOutput output;
  std::vector<double> norms(3);
  const std::vector<absl::Status> statuses =
      RunRanks(problem, {{}, SmallPlans(), {}}, output, [&](RankRun& run) -> absl::Status {
        LRMOE_RETURN_IF_ERROR(OneLayer(run, {1, 0, 0}));
        run.ReadGradients(0);
        LRMOE_ASSIGN_OR_RETURN(norms[run.rank()], run.engine().SquaredGradientNorm());
        return absl::OkStatus();
      });
  for (const absl::Status& status : statuses) REQUIRE(status.ok());
  double expected = 0;
  for (int32_t e = 0; e < 4; ++e) {
    for (float v : output.dw1[e]) expected += double{v} * v;
    for (float v : output.dw2[e]) expected += double{v} * v;
  }
  REQUIRE(norms[0] == Approx(expected).epsilon(1e-12));
  REQUIRE(norms[1] == norms[0]);
  REQUIRE(norms[2] == norms[0]);
}

TEST_CASE("faults of the transport never hang and never corrupt") {
  const MoeProblem problem = SmallProblem();
  int finished = 0, failed = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    CAPTURE(seed);
    RunSetup setup{{}, SmallPlans(), {}};
    // Only a hang takes this long, so that a busy machine does not fail the others.
    const bool hangs = seed % 8 == 1;
    setup.options.collective_timeout = hangs ? std::chrono::milliseconds(300) : std::chrono::minutes(1);
    setup.options.plan_timeout = setup.options.collective_timeout;
    setup.wrap = [seed, hangs](int32_t rank, std::unique_ptr<transport::Transport> inner) {
      transport::FaultPlan faults;
      faults.seed = seed * 10 + static_cast<uint64_t>(rank);
      faults.abort_probability = seed % 2 == 0 ? 0.02 : 0.0;
      faults.hang_probability = hangs ? 0.02 : 0.0;
      faults.delay_probability = 0.2;
      return transport::CreateFaulty(std::move(inner), faults);
    };
    LayerOutput output;
    const std::vector<absl::Status> statuses = RunLayer(problem, setup, output);
    const bool all =
        std::all_of(statuses.begin(), statuses.end(), [](const absl::Status& s) { return s.ok(); });
    ++(all ? finished : failed);
    for (const absl::Status& status : statuses) {
      INFO(status.ToString());
      REQUIRE((status.ok() || status.code() == StatusCode::kUnavailable ||
               status.code() == StatusCode::kDeadlineExceeded));
    }
    if (!all) continue;
    const MoeResult reference = ReferenceLayer(problem, output.kept, true);
    REQUIRE(RelativeError(output.y, reference.y) < 1e-5);
    REQUIRE(RelativeError(output.dx, reference.dx) < 1e-5);
  }
  REQUIRE(finished > 0);
  REQUIRE(failed > 0);
}
