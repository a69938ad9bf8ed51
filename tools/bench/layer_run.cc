#include "tools/bench/layer_run.h"

#include <algorithm>
#include <cmath>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/cluster.h"
#include "common/status_macros.h"
#include "kernels/kernels.h"
#include "tools/bench/counting_transport.h"
#include "tools/bench/local_plans.h"
#include "tools/bench/slow_transport.h"
#include "worker/engine/engine.h"
#include "worker/transport/inproc.h"

namespace lrmoe::bench {
namespace {

// Measured steps of an arm before the other has its turn. The step before them is not measured: replicas of
// the arm's plan come in and caches fill.
constexpr int kStepsPerTurn = 5;

planner::PlanningProblem ProblemOf(const LayerRun& run, const Arm& arm) {
  planner::PlanningProblem problem;
  problem.owner = ContiguousOwners(run.shape.num_experts, run.num_ranks);
  for (int32_t r = 0; r < run.num_ranks; ++r) {
    RankResources rank;
    rank.replica_slots = run.replica_slots;
    rank.memory_bytes = run.memory_budget_bytes;
    problem.cluster.ranks.push_back(rank);
  }
  problem.model = MemoryModelOf(run.shape);
  problem.model.exact_router_gradient = run.router_gradient == RouterGradient::kExact;
  problem.model.recompute_activation = run.recompute_activation;
  problem.model.packs_weights =
      run.pack_weights && !run.make_device && kernels::CpuPacksWeights(engine::TypeOf(run.shape.dtype));
  problem.policy.planner = arm.policy;
  problem.policy.rates = {arm.retention};
  problem.policy.router_gradient = run.router_gradient;
  return problem;
}

std::vector<planner::PlanningProblem> Problems(const LayerRun& run) {
  std::vector<planner::PlanningProblem> problems;
  for (const Arm& arm : run.arms) problems.push_back(ProblemOf(run, arm));
  return problems;
}

// One rank's thread.
class Rank {
 public:
  Rank(const LayerRun& run, const RankInput& input, std::unique_ptr<transport::Transport> transport,
       std::unique_ptr<engine::PlanProvider> plans)
      : run_(run), input_(input), transport_(std::move(transport)), plans_(std::move(plans)) {
    dalpha_.resize(input.alpha.size());
    arms_.resize(run.arms.size());
    for (Outcome& arm : arms_) arm.kept.resize(input.alpha.size());
  }

  struct Outcome {
    std::vector<InvocationReport> reports;
    std::vector<std::vector<engine::ExchangeTime>> exchanges;
    std::map<std::string, int64_t> sent_bytes;
    std::vector<uint8_t> kept;
    ExecutionPlan execution;
  };
  std::vector<Outcome>& arms() { return arms_; }

  absl::Status Run() {
    LRMOE_RETURN_IF_ERROR(Start());
    int64_t step = 0;
    for (int done = 0; done < run_.steps; done += kStepsPerTurn) {
      for (size_t arm = 0; arm < arms_.size(); ++arm) {
        const int measured = std::min(kStepsPerTurn, run_.steps - done);
        for (int i = 0; i <= measured; ++i) {
          LRMOE_RETURN_IF_ERROR(Step({++step, 0, static_cast<int32_t>(arm)}, i > 0));
          if (!run_.accumulate) LRMOE_RETURN_IF_ERROR(ZeroGradients());
        }
      }
      LRMOE_RETURN_IF_ERROR(ZeroGradients());
    }
    return absl::OkStatus();
  }

 private:
  absl::Status ZeroGradients() {
    for (const auto& engine : engines_)
      if (engine != nullptr) LRMOE_RETURN_IF_ERROR(engine->ZeroGradients());
    return absl::OkStatus();
  }

  absl::Status Start() {
    for (const bool overlap : {false, true}) {
      const bool used = std::any_of(run_.arms.begin(), run_.arms.end(),
                                    [&](const Arm& arm) { return arm.overlap == overlap; });
      if (used) LRMOE_RETURN_IF_ERROR(StartEngine(overlap, engines_[overlap]));
    }
    return absl::OkStatus();
  }

  absl::Status StartEngine(bool overlap, std::unique_ptr<engine::Engine>& engine) {
    engine::EngineOptions options;
    options.model = {1, run_.shape};
    options.num_threads = run_.num_threads;
    options.memory_budget_bytes = run_.memory_budget_bytes;
    options.recompute_activation = run_.recompute_activation;
    options.pack_weights = run_.pack_weights;
    options.overlap = overlap;
    options.wait_between_phases = run_.wait_between_phases;
    options.collective_timeout = std::chrono::minutes(10);
    std::unique_ptr<kernels::Device> device;  // null: the CPU
    if (run_.make_device) {
      LRMOE_ASSIGN_OR_RETURN(device, run_.make_device());
    }
    LRMOE_RETURN_IF_ERROR(PlaceRows(device.get(), rows_[overlap]));
    LRMOE_ASSIGN_OR_RETURN(engine,
                           engine::Engine::Create(options, &transport_, plans_.get(), std::move(device)));
    const LayerShape& shape = run_.shape;
    const auto scale = [](int64_t depth) {
      return static_cast<float>(1.7 / std::sqrt(static_cast<double>(depth)));
    };
    // Experts have equal weights: what a GEMM takes does not depend on them.
    const std::vector<std::byte> w1 = RandomElements(shape.dtype, shape.fc1_width() * shape.hidden_size,
                                                     scale(shape.hidden_size), run_.seed + 1);
    const std::vector<std::byte> w2 =
        RandomElements(shape.dtype, int64_t{shape.hidden_size} * shape.intermediate_size,
                       scale(shape.intermediate_size), run_.seed + 2);
    for (int32_t e : engine->store().owned())
      LRMOE_RETURN_IF_ERROR(engine->LoadExpert(0, e, shape.dtype, w1, w2));
    return engine->FinishLoad(0);
  }

  // The layer's tensors, where one engine reads and writes them.
  struct Rows {
    std::unique_ptr<kernels::Memory> memory;  // null: the host's
    std::vector<std::byte> host;
    std::span<std::byte> y, dx;
    std::span<const std::byte> x, dy;
  };
  absl::Status PlaceRows(kernels::Device* device, Rows& rows) {
    const size_t bytes = input_.x.size();
    if (!run_.rows_on_device) {
      rows.host.resize(2 * bytes);
      rows.y = std::span(rows.host).first(bytes);
      rows.dx = std::span(rows.host).subspan(bytes);
      rows.x = input_.x;
      rows.dy = input_.dy;
      return absl::OkStatus();
    }
    LRMOE_ASSIGN_OR_RETURN(rows.memory, device->Reserve(static_cast<int64_t>(4 * bytes)));
    LRMOE_RETURN_IF_ERROR(rows.memory->Commit(static_cast<int64_t>(4 * bytes)));
    const auto part = [&](size_t i) { return std::span(rows.memory->base() + i * bytes, bytes); };
    device->Upload(part(0).data(), input_.x.data(), static_cast<int64_t>(bytes));
    device->Upload(part(1).data(), input_.dy.data(), static_cast<int64_t>(bytes));
    rows.x = part(0);
    rows.dy = part(1);
    rows.y = part(2);
    rows.dx = part(3);
    return device->Wait();
  }

  absl::Status Step(const Invocation& invocation, bool measured) {
    const auto arm_name = [&](const absl::Status& status) {
      const Arm& arm = run_.arms[invocation.micro_batch];
      return absl::Status(status.code(), absl::StrCat("policy ", arm.policy, ", retention ", arm.retention,
                                                      ": ", std::string(status.message())));
    };
    Outcome& outcome = arms_[invocation.micro_batch];
    transport_.TakeSentBytes();
    const bool overlap = run_.arms[invocation.micro_batch].overlap;
    engine::Engine& engine = *engines_[overlap];
    const Rows& rows = rows_[overlap];
    auto forward = engine.Forward(
        {invocation, input_.num_tokens, rows.x, input_.expert_idx, input_.alpha, rows.y, true});
    if (!forward.ok()) return arm_name(forward.status());
    auto backward = engine.Backward({invocation, rows.dy, rows.dx, dalpha_, outcome.kept});
    if (!backward.ok()) return arm_name(backward.status());
    outcome.sent_bytes = transport_.TakeSentBytes();
    outcome.execution = std::move(forward->plan);
    if (!measured) return absl::OkStatus();
    outcome.reports.push_back(backward->report);
    forward->exchanges.insert(forward->exchanges.end(), backward->exchanges.begin(),
                              backward->exchanges.end());
    outcome.exchanges.push_back(std::move(forward->exchanges));
    return absl::OkStatus();
  }

  const LayerRun& run_;
  const RankInput& input_;
  CountingTransport transport_;
  std::unique_ptr<engine::PlanProvider> plans_;
  std::unique_ptr<engine::Engine> engines_[2];  // by overlap
  Rows rows_[2];  // by overlap; go before their engines, whose devices they may lie on
  std::vector<float> dalpha_;
  std::vector<Outcome> arms_;
};

void Collect(const LayerRun& run, const std::vector<std::unique_ptr<Rank>>& ranks, LayerResult& result) {
  for (size_t a = 0; a < run.arms.size(); ++a) {
    ArmResult& arm = result.arms.emplace_back();
    arm.execution = ranks[0]->arms()[a].execution;
    arm.reports.resize(run.steps);
    arm.exchanges.resize(run.steps);
    for (const auto& rank : ranks) {
      const Rank::Outcome& outcome = rank->arms()[a];
      for (int step = 0; step < run.steps; ++step) {
        arm.reports[step].push_back(outcome.reports[step]);
        arm.exchanges[step].push_back(outcome.exchanges[step]);
      }
      arm.sent_bytes.push_back(outcome.sent_bytes);
      arm.kept.push_back(outcome.kept);
    }
  }
}

}  // namespace

absl::StatusOr<LayerResult> RunLayer(const LayerRun& run) {
  LRMOE_ASSIGN_OR_RETURN(const auto device,
                         run.make_device ? run.make_device() : kernels::CreateCpuDevice(1));
  LayerResult result;
  result.gemm_path = std::string(device->gemm_path());
  for (int32_t r = 0; r < run.num_ranks; ++r)
    result.inputs.push_back(MakeRankInput(run.shape, run.num_tokens, run.skew, run.seed, r));

  result.packed_weights = NumWeightForms(ProblemOf(run, run.arms.front()).model) == 2;
  LocalPlans plans(Problems(run));
  auto transports =
      run.make_transports ? run.make_transports(run.num_ranks) : transport::CreateInprocGroup(run.num_ranks);
  if (run.link_mbit_per_s > 0)
    for (auto& transport : transports)
      transport = std::make_unique<SlowTransport>(std::move(transport), run.link_mbit_per_s * 125e3);
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int32_t r = 0; r < run.num_ranks; ++r)
    ranks.push_back(
        std::make_unique<Rank>(run, result.inputs[r], std::move(transports[r]), plans.Provider(r)));
  std::vector<absl::Status> statuses(run.num_ranks);
  std::vector<std::thread> threads;
  for (int32_t r = 0; r < run.num_ranks; ++r) threads.emplace_back([&, r] { statuses[r] = ranks[r]->Run(); });
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) LRMOE_RETURN_IF_ERROR(status);

  Collect(run, ranks, result);
  return result;
}

absl::StatusOr<LayerResult> RunRank(const LayerRun& run, std::unique_ptr<transport::Transport> transport) {
  LRMOE_ASSIGN_OR_RETURN(const auto device, kernels::CreateCpuDevice(1));
  LayerResult result;
  result.gemm_path = std::string(device->gemm_path());
  result.inputs.push_back(MakeRankInput(run.shape, run.num_tokens, run.skew, run.seed, transport->rank()));
  LocalPlans plans(Problems(run));
  auto provider = plans.GatheringProvider(transport.get());
  std::vector<std::unique_ptr<Rank>> ranks;
  ranks.push_back(std::make_unique<Rank>(run, result.inputs[0], std::move(transport), std::move(provider)));
  LRMOE_RETURN_IF_ERROR(ranks[0]->Run());
  Collect(run, ranks, result);
  return result;
}

}  // namespace lrmoe::bench
