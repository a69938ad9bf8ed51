// Not a test: `lrmoe-test-controller_rpc "[latency]"` prints how long a plan takes from the last rank's
// counts.
#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstdio>
#include <vector>

#include "tests/unit/controller_rpc/fixture.h"

namespace lrmoe::test {
namespace {

TEST_CASE("round trip of counts to plan, 8 ranks", "[.][latency]") {
  InProcessController controller;
  auto streams = JoinAll(controller.listener->address(), 8);
  std::vector<double> first_us, last_us, plan_us;
  const auto since = [](std::chrono::steady_clock::time_point begin) {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
  };
  for (int64_t step = 0; step < 2000; ++step) {
    SourceCounts counts{{step, 0, 0}, {1, 2, 3, 4, 5, 6, 7, 8}};
    for (int rank = 0; rank < 7; ++rank) streams[rank]->Send(counts);
    const auto begin = std::chrono::steady_clock::now();
    streams[7]->Send(counts);
    plan_us.push_back(streams[7]->Expect<ExecutionPlan>().plan.plan_us);
    first_us.push_back(since(begin));
    for (int rank = 0; rank < 7; ++rank) streams[rank]->Expect<ExecutionPlan>();
    last_us.push_back(since(begin));
  }
  for (auto* times : {&plan_us, &first_us, &last_us}) {
    std::sort(times->begin(), times->end());
    std::printf("p50 %.0f us, p99 %.0f us: %s\n", (*times)[times->size() / 2],
                (*times)[times->size() * 99 / 100],
                times == &plan_us    ? "planner"
                : times == &first_us ? "last counts sent to its plan received"
                                     : "last counts sent to every rank's plan received");
  }
}

}  // namespace
}  // namespace lrmoe::test
