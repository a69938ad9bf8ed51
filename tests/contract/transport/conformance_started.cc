// Exchanges that are started and finished later: the part of the suite about what is under way.
#include <algorithm>
#include <memory>
#include <thread>

#include "tests/contract/transport/conformance_steps.h"

namespace lrmoe::transport {
namespace {

// One exchange between parts that lie anywhere, with gaps that must stay as they are.
class Started {
 public:
  Started(Transport& t, const Matrix& sizes, int64_t exchange, Random& places)
      : t_(t),
        wanted_send_(Lay(sizes, exchange, places, true)),
        wanted_recv_(Lay(sizes, exchange, places, false)) {
    send_ = wanted_send_;
    recv_ = Bytes(wanted_recv_.size(), kPoison);
    for (const auto& [offset, size] : send_places_)
      send_parts_.push_back(std::span(send_).subspan(offset, size));
    for (const auto& [offset, size] : recv_places_)
      recv_parts_.push_back(std::span(recv_).subspan(offset, size));
  }

  absl::Status Start(const Call& call) {
    const absl::StatusOr<Ticket> ticket = t_.StartAllToAllV(call, send_parts_, recv_parts_);
    if (ticket.ok()) ticket_ = *ticket;
    // The lists may go.
    send_parts_.assign(send_parts_.size(), {});
    recv_parts_.assign(recv_parts_.size(), {});
    return ticket.status();
  }
  absl::Status Finish(Deadline deadline) { return t_.Finish(ticket_, deadline).status(); }

  void Check(Expectations& expect, const std::string& what) const {
    expect.Check(recv_ == wanted_recv_, what + ": received bytes differ, or bytes between the parts");
    expect.Check(send_ == wanted_send_, what + ": the parts to send were changed");
  }

 private:
  using Places = std::vector<std::pair<int64_t, int64_t>>;  // offset, size

  // The whole buffer as it should be, parts in a random order and not side by side.
  Bytes Lay(const Matrix& sizes, int64_t exchange, Random& random, bool sends) {
    const int32_t n = t_.size();
    std::vector<int32_t> order(n);
    for (int32_t peer = 0; peer < n; ++peer) order[peer] = peer;
    for (int32_t i = n - 1; i > 0; --i) std::swap(order[i], order[random.Below(i + 1)]);
    Places& places = sends ? send_places_ : recv_places_;
    places.resize(n);
    Bytes buffer;
    for (const int32_t peer : order) {
      buffer.resize(buffer.size() + random.Below(20), kPoison);
      const int32_t from = sends ? t_.rank() : peer, to = sends ? peer : t_.rank();
      const Bytes block = FilledBlock(exchange, from, to, sizes[from][to]);
      places[peer] = {static_cast<int64_t>(buffer.size()), static_cast<int64_t>(block.size())};
      buffer.insert(buffer.end(), block.begin(), block.end());
    }
    return buffer;
  }

  Transport& t_;
  Places send_places_, recv_places_;
  const Bytes wanted_send_, wanted_recv_;
  Bytes send_, recv_;
  std::vector<std::span<const std::byte>> send_parts_;
  std::vector<std::span<std::byte>> recv_parts_;
  Ticket ticket_{};
};

// Up to the most that may be under way, with other operations in between, finished in another order on each
// rank.
RankBody SeveralUnderWay(uint64_t seed) {
  return [seed](Transport& t, Expectations& expect) {
    Random random(seed + 77), own(seed * 131 + t.rank());
    for (int round = 0; round < 4; ++round) {
      std::vector<std::unique_ptr<Started>> started;
      const int64_t count = round == 0 ? kMaxStarted - 1 : random.Between(1, 4);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t exchange = round * 100 + i;
        started.push_back(std::make_unique<Started>(t, RandomSizes(random, t.size()), exchange, own));
        expect.Ok(started.back()->Start(Far("several")), "StartAllToAllV");
        for (uint64_t yields = own.Below(3); yields > 0; --yields) std::this_thread::yield();
        if (random.Below(3) == 0) ExchangeAndCheck(t, expect, RandomSizes(random, t.size()), exchange + 50);
        if (random.Below(3) != 0) continue;
        int64_t value = t.rank();
        expect.Ok(t.AllReduce(Far("sum"), std::span(&value, 1), Reduction::kSum), "AllReduce");
        expect.Check(value == t.size() * (t.size() - 1) / 2, "sum");
      }
      while (!started.empty()) {
        const size_t one = own.Below(started.size());
        expect.Ok(started[one]->Finish(Far("").deadline), "Finish");
        started[one]->Check(expect, "round " + std::to_string(round));
        started.erase(started.begin() + static_cast<int64_t>(one));
      }
    }
  };
}

RankBody NothingStarted(uint64_t) {
  return [](Transport& t, Expectations& expect) {
    const std::vector<std::span<const std::byte>> send(t.size());
    const std::vector<std::span<std::byte>> recv(t.size());
    const absl::StatusOr<Ticket> ticket = t.StartAllToAllV(Far("nothing"), send, recv);
    expect.Ok(ticket.status(), "StartAllToAllV of nothing");
    if (ticket.ok()) expect.Ok(t.Finish(*ticket, Far("").deadline).status(), "Finish");
  };
}

RankBody BadStarts(uint64_t) {
  return [](Transport& t, Expectations& expect) {
    constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
    const int32_t n = t.size();
    Bytes out(10), in(10);
    std::vector<std::span<const std::byte>> send(n), long_send(n + 1), to_itself(n);
    std::vector<std::span<std::byte>> recv(n), long_recv(n + 1);
    to_itself[t.rank()] = out;
    const auto refused = [&](const absl::StatusOr<Ticket>& ticket, const std::string& part) {
      expect.Code(ticket.status(), kInvalid, part);
      expect.Contains(ticket.status(), part);
      expect.Contains(ticket.status(), "bad start (step 7 layer 3 micro-batch 1)");
    };
    refused(t.StartAllToAllV(Far("bad start"), long_send, recv),
            "send has " + std::to_string(n + 1) + " parts");
    refused(t.StartAllToAllV(Far("bad start"), send, long_recv),
            "recv has " + std::to_string(n + 1) + " parts");
    refused(t.StartAllToAllV(Far("bad start"), to_itself, recv), "10 bytes to itself");
    std::vector<Ticket> started;
    for (int i = 0; i < kMaxStarted; ++i) {
      const absl::StatusOr<Ticket> ticket = t.StartAllToAllV(Far("many"), send, recv);
      expect.Ok(ticket.status(), "StartAllToAllV");
      if (ticket.ok()) started.push_back(*ticket);
    }
    refused(t.StartAllToAllV(Far("bad start"), send, recv), "allowed: " + std::to_string(kMaxStarted));
    for (const Ticket ticket : started) expect.Ok(t.Finish(ticket, Far("").deadline).status(), "Finish");
    ExchangeAndCheck(t, expect, Matrix(n, std::vector<int64_t>(n, 33)), 1);
  };
}

// The last rank never starts, and with `aborts` ends the epoch instead of staying away.
RankBody MissingStart(bool aborts) {
  return [aborts](Transport& t, Expectations& expect) {
    const int32_t absent = t.size() - 1;
    if (!StartTogether(t, expect)) return;
    if (t.rank() == absent) {
      if (aborts) t.Abort("enough of this");
      return;
    }
    Random own(t.rank());
    const Matrix sizes(t.size(), std::vector<int64_t>(t.size(), 5000));
    Started first(t, sizes, 1, own), second(t, sizes, 2, own);
    const auto limit = aborts ? std::chrono::seconds(60) : std::chrono::milliseconds(40);
    const Call call{"lonely start", {.step = 9, .layer = 2, .micro_batch = 4}, After(limit)};
    absl::Status status = first.Start(call);
    const bool started = status.ok();
    const bool two = started && second.Start(call).ok();
    if (started) status = first.Finish(call.deadline);
    if (aborts) {
      expect.Code(status, absl::StatusCode::kUnavailable, "an abort while an exchange is under way");
      expect.Contains(status, "enough of this");
    } else {
      expect.Check(absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status),
                   "got " + status.ToString());
      expect.Contains(status, std::to_string(absent) + " did not arrive");
    }
    expect.Contains(status, "lonely start (step 9 layer 2 micro-batch 4)");
    ExpectDead(t, expect);
    if (two)
      expect.Code(second.Finish(Far("").deadline), absl::StatusCode::kUnavailable, "the second exchange");
  };
}

// This process ends the epoch with an exchange under way; its parts are its own again after Finish.
RankBody OwnAbort(uint64_t) {
  return [](Transport& t, Expectations& expect) {
    if (!StartTogether(t, expect)) return;
    Random own(t.rank());
    auto started =
        std::make_unique<Started>(t, Matrix(t.size(), std::vector<int64_t>(t.size(), 300000)), 1, own);
    const absl::Status status = started->Start(Far("to be ended"));
    if (status.ok()) {
      t.Abort("the test says so");
      expect.Code(started->Finish(Far("").deadline), absl::StatusCode::kUnavailable, "Finish after an abort");
    } else {
      expect.Code(status, absl::StatusCode::kUnavailable, "StartAllToAllV");
    }
    ExpectDead(t, expect);
  };
}

RankBody SizesDisagree(uint64_t) {
  return [](Transport& t, Expectations& expect) {
    const bool odd = t.rank() == t.size() - 1;
    Matrix sizes(t.size(), std::vector<int64_t>(t.size(), 16));
    if (odd) sizes[t.rank()][0] = 24;  // rank 0 expects 16
    Random own(t.rank());
    Started started(t, sizes, 1, own);
    absl::Status status = started.Start(Far("sizes"));
    if (status.ok()) status = started.Finish(Far("").deadline);
    // An implementation may let a rank that was not concerned finish; the next operation tells it.
    const absl::Status next = t.Barrier(Far("next"));
    expect.Check(!next.ok(), "the epoch must be dead after a disagreement");
    expect.Contains(status.ok() ? next : status, "disagree");
    ExpectDead(t, expect);
  };
}

}  // namespace

std::vector<ConformanceCase> StartedCases() {
  return {
      {"several exchanges under way", SeveralUnderWay, 1, 5},
      {"an exchange of nothing that is started", NothingStarted},
      {"bad starts leave the epoch alive", BadStarts},
      {"a rank that never starts", [](uint64_t) { return MissingStart(false); }, 2},
      {"a rank that aborts instead of starting", [](uint64_t) { return MissingStart(true); }, 2, 3},
      {"abort with an exchange under way", OwnAbort, 1, 3},
      {"started exchanges whose sizes disagree", SizesDisagree, 2},
  };
}

}  // namespace lrmoe::transport
