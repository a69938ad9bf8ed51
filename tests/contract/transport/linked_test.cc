// The conformance suite over a transport with a link of its own for device memory, and what it promises
// beyond.
#include <catch2/catch.hpp>
#include <thread>

#include "tests/contract/transport/thread_ranks.h"
#include "worker/transport/device_link.h"

namespace lrmoe::transport {
namespace {

// "Device memory" is what the test says; bytes go through an inproc group of their own.
class FakeLink : public DeviceLink {
 public:
  using HoldsFunction = std::function<bool(const void*)>;
  FakeLink(std::unique_ptr<Transport> wire, HoldsFunction holds)
      : wire_(std::move(wire)), holds_(std::move(holds)) {}
  bool Holds(const void* pointer) const override { return holds_(pointer); }
  absl::StatusOr<Ticket> Start(const Call& call, SendParts send, RecvParts recv) override {
    return wire_->StartAllToAllV(call, send, recv);
  }
  absl::StatusOr<std::chrono::steady_clock::time_point> Finish(Ticket ticket, Deadline deadline) override {
    return wire_->Finish(ticket, deadline);
  }
  void Abort() override { wire_->Abort("the epoch has ended"); }

 private:
  const std::unique_ptr<Transport> wire_;
  const HoldsFunction holds_;
};

// ThreadRanks decorates the transports of a group one after another, in rank order.
ThreadRanks LinkedRanks(FakeLink::HoldsFunction holds) {
  auto wires = std::make_shared<std::vector<std::unique_ptr<Transport>>>();
  return ThreadRanks([wires, holds](std::unique_ptr<Transport> control) {
    if (control->rank() == 0) *wires = CreateInprocGroup(control->size());
    const int32_t rank = control->rank();
    return CreateLinkedTransport(std::move(control),
                                 std::make_unique<FakeLink>(std::move((*wires)[rank]), holds));
  });
}

void RequireNoFailures(const std::vector<std::string>& failures) {
  for (const std::string& failure : failures) UNSCOPED_INFO(failure);
  REQUIRE(failures.empty());
}

const Call kCall{"exchange", {}, After(std::chrono::seconds(600))};

}  // namespace

TEST_CASE("a linked transport passes the conformance suite over its link", "[transport]") {
  ThreadRanks ranks = LinkedRanks([](const void*) { return true; });
  RunConformance(ranks);
}

TEST_CASE("a linked transport passes the conformance suite over its control transport", "[transport]") {
  ThreadRanks ranks = LinkedRanks([](const void*) { return false; });
  RunConformance(ranks);
}

TEST_CASE("host and device buffers in one exchange are refused by name; the epoch lives", "[transport]") {
  std::vector<std::byte> device(1 << 10);
  ThreadRanks ranks =
      LinkedRanks([&](const void* p) { return p >= device.data() && p < device.data() + device.size(); });
  RequireNoFailures(ranks.Run(2, [&](Transport& t, Expectations& expect) {
    const std::vector<int64_t> sizes{4, 4};
    std::vector<std::byte> host(8);
    const absl::Status status = t.AllToAllV(kCall, std::span(device).first(8), sizes, host, sizes);
    expect.Code(status, absl::StatusCode::kInvalidArgument, "mixed");
    expect.Contains(status, "send lies in device memory, recv in host memory");
    expect.Ok(t.Barrier(kCall), "Barrier");
  }));
}

TEST_CASE("ranks that disagree about where buffers lie learn of it; empty ones fit either", "[transport]") {
  std::vector<std::byte> device(1 << 10);
  ThreadRanks ranks =
      LinkedRanks([&](const void* p) { return p >= device.data() && p < device.data() + device.size(); });
  RequireNoFailures(ranks.Run(3, [&](Transport& t, Expectations& expect) {
    // Rank 0 sends rank 1 eight bytes; rank 2 has nothing.
    const std::vector<int64_t> none(3, 0), to_1{0, 8, 0}, from_0{8, 0, 0};
    const auto exchange = [&](std::span<std::byte> to) {
      if (t.rank() == 0) return t.AllToAllV(kCall, std::span(device).first(8), to_1, {}, none);
      if (t.rank() == 1) return t.AllToAllV(kCall, {}, none, to, from_0);
      return t.AllToAllV(kCall, {}, none, {}, none);
    };
    expect.Ok(exchange(std::span(device).subspan(512, 8)), "device to device");
    std::vector<std::byte> host(8);
    const absl::Status status = exchange(host);
    expect.Code(status, absl::StatusCode::kFailedPrecondition, "places");
    expect.Contains(status, "rank 0 uses device memory, rank 1 host memory");
  }));
}

}  // namespace lrmoe::transport
