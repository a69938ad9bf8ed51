// The decorator without faults keeps the contract; with faults it is the same for the same seed.
#include "worker/transport/faulty.h"

#include <catch2/catch.hpp>
#include <mutex>

#include "tests/contract/transport/thread_ranks.h"

namespace lrmoe::transport {
namespace {

ThreadRanks Decorated(const FaultPlan& plan) {
  return ThreadRanks(
      [plan](std::unique_ptr<Transport> inner) { return CreateFaulty(std::move(inner), plan); });
}

void RequireNoFailures(const std::vector<std::string>& failures) {
  for (const std::string& failure : failures) UNSCOPED_INFO(failure);
  REQUIRE(failures.empty());
}

TEST_CASE("faulty without faults passes the conformance suite", "[transport]") {
  ThreadRanks ranks = Decorated({});
  RunConformance(ranks);
}

TEST_CASE("faulty with delays passes the conformance suite", "[transport]") {
  ThreadRanks ranks = Decorated({.seed = 11, .delay_probability = 0.1, .delay_yields = 10});
  RunConformance(ranks);
}

// The operation at which each rank first failed, and its own status text.
std::vector<std::pair<int, std::string>> FirstFailures(const FaultPlan& plan, int32_t size,
                                                       std::chrono::milliseconds limit) {
  std::vector<std::pair<int, std::string>> first(size);
  ThreadRanks ranks = Decorated(plan);
  RequireNoFailures(ranks.Run(size, [&](Transport& t, Expectations& expect) {
    for (int i = 0; i < 200; ++i) {
      const absl::Status status = t.Barrier({"barrier", {.step = i}, After(limit)});
      if (status.ok()) continue;
      first[t.rank()] = {i, std::string(status.message())};
      expect.Check(absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status), status.ToString());
      expect.Code(t.Barrier({"after", {}, After(std::chrono::seconds(60))}), absl::StatusCode::kUnavailable,
                  "an operation after the fault");
      return;
    }
    expect.Check(false, "no fault was injected");
  }));
  return first;
}

TEST_CASE("injected aborts are the same for the same seed and end all ranks at the same operation",
          "[transport]") {
  std::vector<int> points;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    const FaultPlan plan{.seed = seed, .abort_probability = 0.02, .first_operation = 5};
    const auto once = FirstFailures(plan, 3, std::chrono::seconds(60));
    for (const auto& [point, message] : once) {
      CHECK(point >= 5);
      CHECK_THAT(message, Catch::Contains("injected fault at operation"));
    }
    const int earliest = std::min({once[0].first, once[1].first, once[2].first});
    const auto again = FirstFailures(plan, 3, std::chrono::seconds(60));
    CHECK(earliest == std::min({again[0].first, again[1].first, again[2].first}));
    points.push_back(earliest);
  }
  std::sort(points.begin(), points.end());
  CHECK(std::unique(points.begin(), points.end()) - points.begin() > 3);  // seeds differ
}

TEST_CASE("an injected hang is seen by the others as a missing rank, and ends with the deadline",
          "[transport]") {
  const FaultPlan plan{.seed = 5, .hang_probability = 0.05};
  const auto first = FirstFailures(plan, 2, std::chrono::milliseconds(500));
  const bool rank_0_hung = first[0].second.find("injected fault: hung") != std::string::npos;
  CHECK_THAT(first[rank_0_hung ? 0 : 1].second, Catch::Contains("injected fault: hung"));
  CHECK_THAT(first[rank_0_hung ? 1 : 0].second,
             Catch::Contains(rank_0_hung ? "rank 0 did not arrive" : "rank 1 did not arrive"));
}

TEST_CASE("an abort wakes a rank that hangs", "[transport]") {
  auto group = CreateInprocGroup(1);
  auto faulty = CreateFaulty(std::move(group[0]), {.seed = 1, .hang_probability = 1.0});
  std::thread aborter([&] { faulty->Abort("enough"); });
  const absl::Status status = faulty->Barrier({"barrier", {}, After(std::chrono::seconds(60))});
  aborter.join();
  CHECK(status.code() == absl::StatusCode::kUnavailable);
  CHECK_THAT(std::string(status.message()), Catch::Contains("enough"));
}

}  // namespace
}  // namespace lrmoe::transport
