// The transport over NCCL as it is built for production, over a fake of NCCL, ranks as threads.
#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cuda/device.h"
#include "tests/contract/transport/conformance.h"
#include "tests/support/device/engine_checks.h"
#include "tests/unit/cuda/require_passed.h"
#include "tests/unit/cuda_production/fresh.h"
#include "tests/unit/cuda_production/nccl_ranks.h"

namespace lrmoe::fake_cuda {
namespace {

using namespace std::chrono_literals;  // NOLINT: tests
using transport::Call;
using transport::Expectations;
using transport::Ticket;
using transport::Transport;

constexpr int kRemoteError = 6, kSystemError = 2;  // ncclRemoteError, ncclSystemError

void RequireNoFailures(const std::vector<std::string>& failures) {
  for (const std::string& failure : failures) UNSCOPED_INFO(failure);
  REQUIRE(failures.empty());
}

// `bytes(from, to)` bytes from each rank to each, each the number of the rank it comes from, and one more.
struct Exchange {
  Exchange(const Transport& t, const std::function<size_t(int32_t from, int32_t to)>& bytes)
      : out(t.size()), in(t.size()) {
    for (int32_t peer = 0; peer < t.size(); ++peer) {
      out[peer].assign(bytes(t.rank(), peer), static_cast<std::byte>(t.rank() + 1));
      in[peer].assign(bytes(peer, t.rank()), std::byte{0xA5});
      send.emplace_back(out[peer]);
      recv.emplace_back(in[peer]);
    }
  }
  Exchange(const Transport& t, size_t bytes) : Exchange(t, [bytes](int32_t, int32_t) { return bytes; }) {}
  bool Complete() const {
    for (size_t from = 0; from < in.size(); ++from)
      for (const std::byte byte : in[from])
        if (byte != static_cast<std::byte>(from + 1)) return false;
    return true;
  }
  std::vector<std::vector<std::byte>> out, in;
  std::vector<std::span<const std::byte>> send;
  std::vector<std::span<std::byte>> recv;
};

Call Within(std::chrono::milliseconds limit) {
  return {"rows", {.step = 1, .layer = 2, .micro_batch = 3}, After(limit)};
}

}  // namespace

TEST_CASE("NCCL passes the conformance suite with host buffers staged", "[cuda][nccl]") {
  const FreshMachine fresh;
  NcclRanks ranks(true, {1, 2, 4});
  RunConformance(ranks);
}

TEST_CASE("NCCL's control transport passes the conformance suite beside it", "[cuda][nccl]") {
  const FreshMachine fresh;
  NcclRanks ranks(false, {3});
  RunConformance(ranks);
}

TEST_CASE("engines exchange rows in device memory over NCCL and equal the CPU's", "[cuda][nccl]") {
  const FreshMachine fresh;
  const testing::EngineDevice on{
      .make_device = [](int32_t rank) { return kernels::cuda::CreateCudaDevice(rank); },
      .make_transports = [](int32_t num_ranks) { return NcclTransports(num_ranks, false); }};
  testing::RequirePassed(testing::CheckLayers(on, {2, 4}));
}

TEST_CASE("NCCL that takes long to start, and to launch, is waited for", "[cuda][nccl]") {
  const FreshMachine fresh;
  SetNcclPolls(1000);
  NcclRanks ranks(true);
  RequireNoFailures(ranks.Run(3, [](Transport& t, Expectations& expect) {
    Exchange rows(t, 100);
    const auto ticket = t.StartAllToAllV(Within(600s), rows.send, rows.recv);
    expect.Ok(ticket.status(), "start");
    if (ticket.ok()) expect.Ok(t.Finish(*ticket, After(600s)).status(), "finish");
    expect.Check(rows.Complete(), "everybody's bytes");
  }));
}

TEST_CASE("NCCL refuses what it cannot do and says why", "[cuda][nccl]") {
  const FreshMachine fresh;
  const auto own = [](int32_t rank) { return rank; };
  const auto expect = [&](absl::StatusCode code, const std::string& text,
                          const std::function<int32_t(int32_t)>& device_of, std::chrono::milliseconds limit) {
    for (const auto& connected : ConnectAll(2, {.start_timeout = limit}, device_of)) {
      CHECK(connected.status().code() == code);
      CHECK_THAT(std::string(connected.status().message()),
                 Catch::Contains(text) || Catch::Contains("has ended") || Catch::Contains("another rank"));
    }
    RequireNothingLeft();
    Reset();
  };
  SetNcclVersion(21700);
  expect(absl::StatusCode::kFailedPrecondition, "NCCL has version code 21700; allowed: 21800", own, 60s);
  expect(
      absl::StatusCode::kFailedPrecondition, "start of NCCL: invalid usage: last error",
      [](int32_t) { return 0; }, 60s);
  expect(
      absl::StatusCode::kFailedPrecondition, "cudaErrorInvalidDevice", [](int32_t) { return 9; }, 60s);
  Fail("ncclGetUniqueId", kSystemError);
  const auto connected = ConnectAll(2, {}, own);
  CHECK_THAT(std::string(connected[0].status().message()), Catch::Contains("ncclGetUniqueId: unhandled"));
  CHECK_THAT(std::string(connected[1].status().message()), Catch::Contains("another rank has no NCCL"));
}

TEST_CASE("a rank that does not come to the start of NCCL is waited for until the deadline", "[cuda][nccl]") {
  const FreshMachine fresh;
  Fail("ncclCommInitRankConfig", kSystemError);
  std::vector<absl::StatusCode> codes;
  for (const auto& connected : ConnectAll(2, {.start_timeout = 50ms}, [](int32_t rank) { return rank; }))
    codes.push_back(connected.status().code());
  std::sort(codes.begin(), codes.end());
  CHECK(codes == std::vector{absl::StatusCode::kDeadlineExceeded, absl::StatusCode::kFailedPrecondition});
}

TEST_CASE("an error of NCCL in an exchange ends the epoch and is named", "[cuda][nccl]") {
  const FreshMachine fresh;
  FailNccl(1, 1, kRemoteError);
  NcclRanks ranks(true);
  RequireNoFailures(ranks.Run(2, [](Transport& t, Expectations& expect) {
    absl::Status status;
    int done = 0;
    for (; done < 3 && status.ok(); ++done) {
      Exchange rows(t, 100);
      const auto ticket = t.StartAllToAllV(Within(500ms), rows.send, rows.recv);
      status = ticket.ok() ? t.Finish(*ticket, After(500ms)).status() : ticket.status();
    }
    expect.Check(done == 2, "the second exchange is the first that fails");
    if (t.rank() == 1) {
      expect.Code(status, absl::StatusCode::kUnavailable, "the rank whose NCCL fails");
      expect.Contains(status, "rank 1, rows (step 1 layer 2 micro-batch 3): NCCL");
      expect.Contains(status, "remote process exited");
    }
    expect.Check(!t.Barrier(Within(60s)).ok(), "the epoch has ended");
  }));
}

TEST_CASE("a rank whose peer never finishes has its deadline, whatever else is under way", "[cuda][nccl]") {
  const FreshMachine fresh;
  FailNccl(1, 1, kRemoteError);  // its second exchange never moves
  NcclRanks ranks(true);
  RequireNoFailures(ranks.Run(2, [](Transport& t, Expectations& expect) {
    Exchange first(t, 100), second(t, 5000);
    const auto one = t.StartAllToAllV(Within(600s), first.send, first.recv);
    expect.Ok(one.status(), "first");
    if (t.rank() == 1) expect.Ok(t.Finish(*one, After(600s)).status(), "first");
    const auto two = t.StartAllToAllV(Within(600s), second.send, second.recv);
    if (t.rank() == 1) return;
    expect.Ok(two.status(), "second");
    expect.Ok(t.Finish(*one, After(600s)).status(), "what can finish does, though a later one hangs");
    expect.Check(first.Complete(), "the first exchange's bytes");
    const absl::Status late = t.Finish(*two, After(20ms)).status();
    expect.Code(late, absl::StatusCode::kDeadlineExceeded, "second");
    expect.Contains(late, "not all peers came before the deadline");
  }));
}

TEST_CASE("an abort from another thread ends an exchange that would hang", "[cuda][nccl]") {
  const FreshMachine fresh;
  FailNccl(1, 0, kRemoteError);
  NcclRanks ranks(true);
  RequireNoFailures(ranks.Run(2, [](Transport& t, Expectations& expect) {
    Exchange rows(t, 100);
    const auto ticket = t.StartAllToAllV(Within(600s), rows.send, rows.recv);
    if (t.rank() == 1 || !ticket.ok()) return;
    std::thread aborter([&] { t.Abort("asked to stop"); });
    const absl::Status status = t.Finish(*ticket, After(600s)).status();
    aborter.join();
    expect.Code(status, absl::StatusCode::kUnavailable, "finish");
    expect.Check(!t.Barrier(Within(60s)).ok(), "the epoch has ended");
  }));
}

TEST_CASE("exchanges over NCCL finish in any order, and parts of any size, also none", "[cuda][nccl]") {
  const FreshMachine fresh;
  NcclRanks ranks(true);
  RequireNoFailures(ranks.Run(4, [](Transport& t, Expectations& expect) {
    for (int32_t round = 0; round < 6; ++round) {
      std::vector<Exchange> rows;
      std::vector<Ticket> tickets;
      for (int32_t which = 0; which < 3; ++which)
        rows.emplace_back(t, [&](int32_t from, int32_t to) {
          return static_cast<size_t>((from * 7 + to * 5 + which + round) % 4 * 1000);
        });
      for (Exchange& one : rows) {
        const auto ticket = t.StartAllToAllV(Within(600s), one.send, one.recv);
        expect.Ok(ticket.status(), "start");
        if (!ticket.ok()) return;
        tickets.push_back(*ticket);
      }
      for (int32_t i = 0; i < 3; ++i) {
        const int32_t which = (i + t.rank() + round) % 3;
        expect.Ok(t.Finish(tickets[which], After(600s)).status(), "finish");
        expect.Check(rows[which].Complete(), "everybody's bytes");
      }
    }
  }));
}

}  // namespace lrmoe::fake_cuda
