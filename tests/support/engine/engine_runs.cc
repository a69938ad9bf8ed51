#include "tests/support/engine/engine_runs.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <thread>
#include <utility>

#include "common/check.h"
#include "common/status_macros.h"
#include "worker/engine/routing.h"
#include "worker/transport/inproc.h"

namespace lrmoe::testing {

std::vector<std::byte> Encode(DataType type, std::span<const float> values) {
  std::vector<std::byte> out(values.size() * SizeInBytes(type));
  for (size_t i = 0; i < values.size(); ++i) {
    if (type == DataType::kFp32) {
      std::memcpy(out.data() + i * 4, &values[i], 4);
    } else {
      const float rounded = RoundToBf16(values[i]);
      uint32_t bits;
      std::memcpy(&bits, &rounded, 4);
      const auto high = static_cast<uint16_t>(bits >> 16);
      std::memcpy(out.data() + i * 2, &high, 2);
    }
  }
  return out;
}

std::vector<float> Decode(DataType type, std::span<const std::byte> bytes) {
  std::vector<float> out(bytes.size() / SizeInBytes(type));
  for (size_t i = 0; i < out.size(); ++i) {
    if (type == DataType::kFp32) {
      std::memcpy(&out[i], bytes.data() + i * 4, 4);
    } else {
      uint16_t high;
      std::memcpy(&high, bytes.data() + i * 2, 2);
      const uint32_t bits = static_cast<uint32_t>(high) << 16;
      std::memcpy(&out[i], &bits, 4);
    }
  }
  return out;
}

PlacedPairs PlacePairs(const LayerPlan& plan, std::span<const int32_t> expert_idx, int32_t rank) {
  const size_t pairs = expert_idx.size();
  PlacedPairs out{std::vector<int32_t>(pairs, -1), std::vector<int32_t>(pairs)};
  for (size_t i = 0; i < plan.instances.size(); ++i) {
    int64_t left = plan.instances[i].forward_rows_by_source[rank];
    for (size_t p = 0; p < pairs && left > 0; ++p) {
      if (expert_idx[p] != plan.instances[i].expert_idx || out.instance[p] >= 0) continue;
      out.instance[p] = static_cast<int32_t>(i);
      --left;
    }
  }
  std::vector<int32_t> order(pairs);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const int32_t i = out.instance[a], j = out.instance[b];
    return std::pair(plan.instances[i].rank_idx, i) < std::pair(plan.instances[j].rank_idx, j);
  });
  for (size_t q = 0; q < pairs; ++q) out.position[order[q]] = static_cast<int32_t>(q);
  return out;
}

RankRun::RankRun(const MoeProblem& problem, int32_t rank, engine::Engine* engine, LayerOutput* output)
    : problem_(problem), rank_(rank), engine_(engine), output_(output) {
  first_token_ =
      std::accumulate(problem.tokens_of_rank.begin(), problem.tokens_of_rank.begin() + rank, int64_t{0});
  num_tokens_ = problem.tokens_of_rank[rank];
  const int64_t h = problem.shape.hidden_size;
  x_ = Encode(problem.shape.dtype, std::span(problem.x).subspan(first_token_ * h, num_tokens_ * h));
  dy_ = Encode(problem.shape.dtype, std::span(problem.dy).subspan(first_token_ * h, num_tokens_ * h));
  y_.resize(x_.size());
  dx_.resize(x_.size());
  dalpha_.resize(num_tokens_ * problem.shape.top_k);
  kept_.resize(dalpha_.size());
}

absl::Status RankRun::Load() {
  const DataType type = problem_.shape.dtype;
  for (int32_t layer = 0; layer < engine_->store().model().num_layers; ++layer) {
    for (int32_t e : engine_->store().owned())
      LRMOE_RETURN_IF_ERROR(
          engine_->LoadExpert(layer, e, type, Encode(type, problem_.w1[e]), Encode(type, problem_.w2[e])));
    LRMOE_RETURN_IF_ERROR(engine_->FinishLoad(layer));
  }
  return absl::OkStatus();
}

engine::ForwardArgs RankRun::ForwardArguments(const Invocation& invocation) {
  const int64_t k = problem_.shape.top_k;
  std::fill(y_.begin(), y_.end(), std::byte{0xFF});
  engine::ForwardArgs args;
  args.invocation = invocation;
  args.num_tokens = num_tokens_;
  args.x = x_;
  args.expert_idx = std::span(problem_.expert_idx).subspan(first_token_ * k, num_tokens_ * k);
  args.alpha = std::span(problem_.alpha).subspan(first_token_ * k, num_tokens_ * k);
  args.y = y_;
  return args;
}

engine::BackwardArgs RankRun::BackwardArguments(const Invocation& invocation) {
  std::fill(dx_.begin(), dx_.end(), std::byte{0xFF});
  std::fill(dalpha_.begin(), dalpha_.end(), std::numeric_limits<float>::quiet_NaN());
  std::fill(kept_.begin(), kept_.end(), uint8_t{7});
  return {invocation, dy_, dx_, dalpha_, kept_};
}

void RankRun::Decode(const std::vector<std::byte>& rows, std::vector<float>& all) {
  const std::vector<float> values = testing::Decode(problem_.shape.dtype, rows);
  std::copy(values.begin(), values.end(), all.begin() + first_token_ * problem_.shape.hidden_size);
}

absl::StatusOr<engine::ForwardResult> RankRun::Forward(const Invocation& invocation, bool needs_backward) {
  engine::ForwardArgs args = ForwardArguments(invocation);
  args.needs_backward = needs_backward;
  LRMOE_ASSIGN_OR_RETURN(engine::ForwardResult result, engine_->Forward(args));
  Decode(y_, output_->y);
  return result;
}

absl::StatusOr<engine::BackwardResult> RankRun::Backward(const Invocation& invocation) {
  LRMOE_ASSIGN_OR_RETURN(engine::BackwardResult result, engine_->Backward(BackwardArguments(invocation)));
  Decode(dx_, output_->dx);
  const int64_t first_pair = first_token_ * problem_.shape.top_k;
  std::copy(dalpha_.begin(), dalpha_.end(), output_->dalpha.begin() + first_pair);
  std::copy(kept_.begin(), kept_.end(), output_->kept.begin() + first_pair);
  return result;
}

void RankRun::ReadGradients(int32_t layer) {
  for (int32_t e : engine_->store().owned()) {
    std::vector<float> copy;
    const auto gradient = engine_->store().HostGradient(layer, e, copy);
    LRMOE_CHECK(gradient.ok());
    const auto w2 = gradient->begin() + engine_->store().w2_offset();
    output_->dw1[e].assign(gradient->begin(), w2);
    output_->dw2[e].assign(w2, gradient->end());
  }
}

std::vector<absl::Status> RunRanks(const MoeProblem& problem, const RunSetup& setup, LayerOutput& output,
                                   const RankScenario& scenario,
                                   std::vector<std::vector<engine::InvocationReport>>* reports) {
  const auto num_ranks = static_cast<int32_t>(problem.tokens_of_rank.size());
  const int64_t n = problem.num_tokens();
  output = {};
  output.y.resize(n * problem.shape.hidden_size);
  output.dx.resize(n * problem.shape.hidden_size);
  output.dalpha.resize(n * problem.shape.top_k);
  output.kept.resize(n * problem.shape.top_k);
  output.dw1.resize(problem.shape.num_experts);
  output.dw2.resize(problem.shape.num_experts);

  PlanRendezvous rendezvous(num_ranks, problem.shape.num_experts, setup.plan);
  std::vector<std::unique_ptr<transport::Transport>> transports =
      setup.make_transports ? setup.make_transports(num_ranks) : transport::CreateInprocGroup(num_ranks);
  std::vector<absl::Status> statuses(num_ranks);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_ptr<transport::Transport> transport = std::move(transports[rank]);
      if (setup.wrap) transport = setup.wrap(rank, std::move(transport));
      std::unique_ptr<engine::PlanProvider> plans = rendezvous.Provider(rank);
      engine::EngineOptions options = setup.options;
      options.model.shape = problem.shape;
      options.model.num_layers = std::max(1, options.model.num_layers);
      options.poison_buffers = true;
      absl::StatusOr<std::unique_ptr<engine::Engine>> engine = engine::Engine::Create(
          options, transport.get(), plans.get(), setup.make_device ? setup.make_device(rank) : nullptr);
      statuses[rank] = engine.status();
      if (!engine.ok()) return;
      RankRun run(problem, rank, engine->get(), &output);
      statuses[rank] = run.Load();
      if (statuses[rank].ok()) statuses[rank] = scenario(run);
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (reports != nullptr) {
    reports->clear();
    for (int32_t rank = 0; rank < num_ranks; ++rank) reports->push_back(rendezvous.Reports(rank));
  }
  return statuses;
}

std::vector<absl::Status> RunLayer(const MoeProblem& problem, const RunSetup& setup, LayerOutput& output,
                                   std::vector<std::vector<engine::InvocationReport>>* reports) {
  return RunRanks(
      problem, setup, output,
      [](RankRun& run) -> absl::Status {
        LRMOE_RETURN_IF_ERROR(run.Forward({1, 0, 0}).status());
        LRMOE_RETURN_IF_ERROR(run.Backward({1, 0, 0}).status());
        run.ReadGradients(0);
        return absl::OkStatus();
      },
      reports);
}

}  // namespace lrmoe::testing
