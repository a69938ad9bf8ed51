// How often a step takes from the heap once it has run before. Tensors, and indices and scalars by row, pair
// or token, lie in the engine's arena, which does not grow then. Bookkeeping by experts, ranks and instances
// still comes from the heap (half of it the plan itself), so this is a bound and not zero.
// Counted is operator new on the ranks' own threads; not counted: malloc, as oneDNN's sgemm uses it, and the
// optimizer queue's thread. The type is fp32, because oneDNN's bf16 matmul takes descriptors from the heap at
// every call.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <iostream>
#include <new>
#include <vector>

#include "common/status_macros.h"
#include "tests/support/engine/engine_runs.h"

namespace {

// Of this thread, while it counts.
thread_local bool counting = false;
thread_local int64_t num_allocations = 0;
thread_local int64_t allocated_bytes = 0;

void* Allocate(std::size_t size, std::size_t alignment) {
  if (counting) {
    ++num_allocations;
    allocated_bytes += static_cast<int64_t>(size);
  }
  void* p = nullptr;
  if (posix_memalign(&p, std::max(alignment, sizeof(void*)), std::max<std::size_t>(size, 1)) != 0)
    throw std::bad_alloc();
  return p;
}

}  // namespace

void* operator new(std::size_t size) {
  return Allocate(size, 16);
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  return Allocate(size, static_cast<std::size_t>(alignment));
}
void operator delete(void* p) noexcept {
  std::free(p);
}
void operator delete(void* p, std::size_t) noexcept {
  std::free(p);
}
void operator delete(void* p, std::align_val_t) noexcept {
  std::free(p);
}
void operator delete(void* p, std::size_t, std::align_val_t) noexcept {
  std::free(p);
}

namespace lrmoe::testing {
namespace {

constexpr int kRanks = 2, kSteps = 6, kWarmUp = 3;

struct Counted {
  int64_t allocations = 0, bytes = 0, growths = 0;
};

// Forward, backward and update of one step on this rank.
absl::Status Step(RankRun& run, int64_t step) {
  const Invocation invocation{step, 0, 0};
  const engine::ForwardArgs forward = run.ForwardArguments(invocation);
  LRMOE_RETURN_IF_ERROR(run.engine().Forward(forward).status());
  LRMOE_RETURN_IF_ERROR(run.engine().Backward(run.BackwardArguments(invocation)).status());
  LRMOE_RETURN_IF_ERROR(run.engine().OptimizerStep({.step = step}));
  return run.engine().ZeroGradients();
}

// What each step took on rank 0.
std::vector<Counted> CountSteps(int64_t tokens, double retention) {
  LayerShape shape;
  shape.num_experts = 8;
  shape.top_k = 2;
  shape.hidden_size = 64;
  shape.intermediate_size = 32;
  shape.dtype = DataType::kFp32;
  const MoeProblem problem = RandomProblem(shape, std::vector<int64_t>(kRanks, tokens), Routing::kUniform, 7);
  // The same plan every step, whatever its number.
  const PlanFunction plan = [retention](const Invocation& invocation, const RoutedCounts& counts) {
    ExecutionPlan execution = ScriptedPlans{.seed = 3, .retention = retention}({1, 0, 0}, counts);
    execution.plan.invocation = invocation;
    return absl::StatusOr<ExecutionPlan>(execution);
  };
  std::vector<Counted> counted;
  LayerOutput output;
  const auto statuses = RunRanks(problem, {{}, plan, {}}, output, [&](RankRun& run) -> absl::Status {
    for (int64_t step = 1; step <= kSteps; ++step) {
      num_allocations = allocated_bytes = 0;
      counting = run.rank() == 0;
      const absl::Status status = Step(run, step);
      counting = false;
      LRMOE_RETURN_IF_ERROR(status);
      if (run.rank() == 0)
        counted.push_back({num_allocations, allocated_bytes, run.engine().arena_growths()});
    }
    return absl::OkStatus();
  });
  for (const absl::Status& status : statuses) {
    INFO(status.ToString());
    REQUIRE(status.ok());
  }
  return counted;
}

TEST_CASE("what a step takes from the heap does not grow with its rows", "[allocations]") {
  // Bookkeeping of 2 ranks and 8 experts, and the copy of the plan. A step of the larger problem has 8000
  // pairs: 4 bytes of each would be 32,000.
  constexpr int64_t kMost = 400, kMostBytes = 32'000;
  for (const double retention : {1.0, 0.7}) {
    for (const int64_t tokens : {300, 4000}) {
      CAPTURE(retention, tokens);
      const std::vector<Counted> steps = CountSteps(tokens, retention);
      REQUIRE(steps.size() == kSteps);
      for (int step = kWarmUp; step < kSteps; ++step) {
        CAPTURE(step);
        CHECK(steps[step].allocations <= kMost);
        CHECK(steps[step].bytes <= kMostBytes);
        CHECK(steps[step].growths == steps[kWarmUp].growths);
      }
      std::cout << "retention " << retention << ", " << tokens << " tokens: a step takes "
                << steps.back().allocations << " allocations and " << steps.back().bytes
                << " bytes from the heap\n";
    }
  }
}

}  // namespace
}  // namespace lrmoe::testing
