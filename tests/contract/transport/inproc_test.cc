// The conformance suite over threads, and what inproc promises beyond the contract.
#include "worker/transport/inproc.h"

#include <catch2/catch.hpp>

#include "tests/contract/transport/thread_ranks.h"

namespace lrmoe::transport {
namespace {

void RequireNoFailures(const std::vector<std::string>& failures) {
  for (const std::string& failure : failures) UNSCOPED_INFO(failure);
  REQUIRE(failures.empty());
}

TEST_CASE("inproc passes the conformance suite", "[transport]") {
  ThreadRanks ranks;
  RunConformance(ranks);
}

TEST_CASE("inproc exchanges more than 2^31 bytes", "[.large]") {
  ThreadRanks ranks;
  RequireNoFailures(ranks.Run(2, LargeExchange()));
}

TEST_CASE("inproc gives DeadlineExceeded naming all missing ranks to every rank that waits", "[transport]") {
  ThreadRanks ranks;
  RequireNoFailures(ranks.Run(5, [](Transport& t, Expectations& expect) {
    if (t.rank() == 1 || t.rank() == 3) return;
    // Rank 0 gives up first; the others would wait much longer.
    const auto limit = t.rank() == 0 ? std::chrono::milliseconds(1000) : std::chrono::milliseconds(60000);
    const absl::Status status =
        t.Barrier({"meeting", {.step = 1, .layer = 2, .micro_batch = 3}, After(limit)});
    expect.Code(status, absl::StatusCode::kDeadlineExceeded, "missing ranks");
    expect.Contains(status, "rank " + std::to_string(t.rank()) + ", meeting (step 1 layer 2 micro-batch 3)");
    expect.Contains(status, "ranks 1, 3 did not arrive");
  }));
}

TEST_CASE("inproc names both sides of a disagreement on every rank", "[transport]") {
  ThreadRanks ranks;
  const Call call{"exchange", {}, After(std::chrono::seconds(60))};
  RequireNoFailures(ranks.Run(3, [&](Transport& t, Expectations& expect) {
    std::vector<std::byte> send(9), recv(9);
    std::vector<int64_t> sent{3, 3, 3}, received{3, 3, 3};
    if (t.rank() == 2) sent = {3, 4, 2}, received = {3, 4, 2};
    const absl::Status status = t.AllToAllV(call, send, sent, recv, received);
    expect.Code(status, absl::StatusCode::kFailedPrecondition, "sizes");
    expect.Contains(status, "rank 1 sends 3 bytes to rank 2, which expects 4");
  }));
  RequireNoFailures(ranks.Run(3, [&](Transport& t, Expectations& expect) {
    std::vector<std::byte> block(4), blocks(12);
    const absl::Status status = t.rank() == 1 ? t.Barrier(call) : t.AllGather(call, block, blocks);
    expect.Code(status, absl::StatusCode::kFailedPrecondition, "kinds");
    expect.Contains(status, "rank 0 calls AllGather for exchange, rank 1 calls Barrier");
  }));
}

TEST_CASE("inproc tells the others that a rank is gone", "[transport]") {
  auto group = CreateInprocGroup(2);
  group[1].reset();
  const absl::Status status = group[0]->Barrier({"alone", {}, After(std::chrono::seconds(60))});
  CHECK(status.code() == absl::StatusCode::kUnavailable);
  CHECK_THAT(std::string(status.message()), Catch::Contains("rank 1 is gone"));
}

}  // namespace
}  // namespace lrmoe::transport
