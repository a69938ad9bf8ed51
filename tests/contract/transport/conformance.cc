#include "tests/contract/transport/conformance.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <thread>

#include "common/random.h"
#include "tests/contract/transport/conformance_steps.h"

namespace lrmoe::transport {

Call Far(absl::string_view operation) {
  return {operation, {.step = 7, .layer = 3, .micro_batch = 1}, After(std::chrono::seconds(60))};
}

Bytes FilledBlock(int64_t exchange, int32_t from, int32_t to, int64_t size) {
  Bytes block(size);
  Random random(static_cast<uint64_t>(exchange) * 1000003 + from * 4099 + to * 257);
  for (int64_t i = 0; i < size; i += 8) {
    const uint64_t word = random.Next();
    std::memcpy(block.data() + i, &word, std::min<int64_t>(8, size - i));
  }
  return block;
}

Matrix RandomSizes(Random& random, int32_t size) {
  Matrix sizes(size, std::vector<int64_t>(size, 0));
  const uint64_t shape = random.Below(4);
  for (int32_t from = 0; from < size; ++from) {
    for (int32_t to = 0; to < size; ++to) {
      if (shape == 0 && from != to) continue;            // only to itself
      if (shape == 1 && random.Below(2) == 0) continue;  // many zeros
      if (shape == 2 && to != size - 1) continue;        // everything to one rank
      sizes[from][to] = random.Below(3) == 0 ? random.Between(1, 9) : random.Between(1, 40000);
    }
  }
  return sizes;
}

void ExchangeAndCheck(Transport& t, Expectations& expect, const Matrix& sizes, int64_t exchange) {
  const int32_t n = t.size();
  std::vector<int64_t> send_bytes(n), recv_bytes(n);
  Bytes send, wanted;
  for (int32_t peer = 0; peer < n; ++peer) {
    send_bytes[peer] = sizes[t.rank()][peer];
    recv_bytes[peer] = sizes[peer][t.rank()];
    const Bytes out = FilledBlock(exchange, t.rank(), peer, send_bytes[peer]);
    send.insert(send.end(), out.begin(), out.end());
    const Bytes in = FilledBlock(exchange, peer, t.rank(), recv_bytes[peer]);
    wanted.insert(wanted.end(), in.begin(), in.end());
  }
  Bytes recv(wanted.size(), kPoison);
  const Bytes before = send;
  expect.Ok(t.AllToAllV(Far("exchange"), send, send_bytes, recv, recv_bytes), "AllToAllV");
  expect.Check(recv == wanted, "AllToAllV: received bytes differ in exchange " + std::to_string(exchange));
  expect.Check(send == before, "AllToAllV changed its send buffer");
}

static absl::Status StartAndFinish(Transport& t) {
  const std::vector<std::span<const std::byte>> send(t.size());
  const std::vector<std::span<std::byte>> recv(t.size());
  const absl::StatusOr<Ticket> ticket = t.StartAllToAllV(Far("after"), send, recv);
  return ticket.ok() ? t.Finish(*ticket, Far("").deadline).status() : ticket.status();
}

void ExpectDead(Transport& t, Expectations& expect) {
  Bytes block(8), blocks(8 * t.size());
  int64_t integer = 0;
  double real = 0;
  const std::vector<int64_t> sizes(t.size(), 8);
  Bytes out(8 * t.size());
  constexpr auto kUnavailable = absl::StatusCode::kUnavailable;
  expect.Code(t.Barrier(Far("after")), kUnavailable, "Barrier on a dead epoch");
  expect.Code(t.AllGather(Far("after"), block, blocks), kUnavailable, "AllGather on a dead epoch");
  expect.Code(t.Broadcast(Far("after"), 0, block), kUnavailable, "Broadcast on a dead epoch");
  expect.Code(t.AllToAllV(Far("after"), out, sizes, blocks, sizes), kUnavailable,
              "AllToAllV on a dead epoch");
  expect.Code(StartAndFinish(t), kUnavailable, "an exchange started on a dead epoch");
  expect.Code(t.AllReduce(Far("after"), std::span(&integer, 1), Reduction::kSum), kUnavailable, "AllReduce");
  expect.Code(t.AllReduce(Far("after"), std::span(&real, 1), Reduction::kSum), kUnavailable, "AllReduce");
}

bool StartTogether(Transport& t, Expectations& expect) {
  const absl::Status status = t.Barrier(Far("start"));
  if (status.ok()) return true;
  expect.Code(status, absl::StatusCode::kUnavailable, "Barrier");
  ExpectDead(t, expect);
  return false;
}

namespace {

RankBody RandomExchanges(uint64_t seed) {
  return [seed](Transport& t, Expectations& expect) {
    Random random(seed);
    for (int64_t exchange = 0; exchange < 12; ++exchange) {
      ExchangeAndCheck(t, expect, RandomSizes(random, t.size()), exchange);
    }
  };
}

RankBody EmptyExchange(uint64_t) {
  return [](Transport& t, Expectations& expect) {
    const std::vector<int64_t> zero(t.size(), 0);
    expect.Ok(t.AllToAllV(Far("empty"), {}, zero, {}, zero), "AllToAllV of nothing");
    expect.Ok(t.AllGather(Far("empty"), {}, {}), "AllGather of nothing");
    expect.Ok(t.AllReduce(Far("empty"), std::span<int64_t>{}, Reduction::kSum), "AllReduce of nothing");
    expect.Ok(t.AllReduce(Far("empty"), std::span<double>{}, Reduction::kMax), "AllReduce of nothing");
    expect.Ok(t.Broadcast(Far("empty"), 0, {}), "Broadcast of nothing");
    expect.Ok(t.Barrier(Far("empty")), "Barrier");
  };
}

RankBody Gather(uint64_t seed) {
  return [seed](Transport& t, Expectations& expect) {
    Random random(seed);
    for (int64_t exchange = 0; exchange < 6; ++exchange) {
      const int64_t block = random.Below(4) == 0 ? 256 : random.Between(0, 70000);
      const Bytes send = FilledBlock(exchange, t.rank(), 0, block);
      Bytes recv(block * t.size(), kPoison), wanted;
      for (int32_t peer = 0; peer < t.size(); ++peer) {
        const Bytes part = FilledBlock(exchange, peer, 0, block);
        wanted.insert(wanted.end(), part.begin(), part.end());
      }
      expect.Ok(t.AllGather(Far("gather"), send, recv), "AllGather");
      expect.Check(recv == wanted, "AllGather: received bytes differ");
    }
  };
}

template <typename T>
T Value(uint64_t seed, int32_t rank, size_t i) {
  Random random(seed + rank * 7919 + i * 104729);
  if constexpr (std::is_same_v<T, double>) {
    return std::ldexp(random.Uniform() - 0.5, static_cast<int>(random.Between(-30, 30)));
  } else {
    return static_cast<T>(random.Next() >> 8) - (T{1} << 54);
  }
}

template <typename T>
void ReduceAndCheck(Transport& t, Expectations& expect, uint64_t seed, size_t n, Reduction reduction) {
  std::vector<T> values(n), wanted(n);
  for (size_t i = 0; i < n; ++i) {
    values[i] = Value<T>(seed, t.rank(), i);
    T result = Value<T>(seed, 0, i);
    for (int32_t rank = 1; rank < t.size(); ++rank) {
      const T next = Value<T>(seed, rank, i);
      result = reduction == Reduction::kSum   ? result + next
               : reduction == Reduction::kMin ? std::min(result, next)
                                              : std::max(result, next);
    }
    wanted[i] = result;
  }
  expect.Ok(t.AllReduce(Far("reduce"), std::span<T>(values), reduction), "AllReduce");
  expect.Check(n == 0 || std::memcmp(values.data(), wanted.data(), n * sizeof(T)) == 0,
               "AllReduce of " + std::to_string(n) + " values is not the rank-order result, bit for bit");
}

RankBody Reduce(uint64_t seed) {
  return [seed](Transport& t, Expectations& expect) {
    Random random(seed);
    for (const Reduction reduction : {Reduction::kSum, Reduction::kMin, Reduction::kMax}) {
      for (const size_t n :
           {size_t{1}, size_t{3}, size_t(random.Between(2, 2000)), size_t(random.Between(9000, 20000))}) {
        ReduceAndCheck<int64_t>(t, expect, random.Next() >> 20, n, reduction);
        ReduceAndCheck<double>(t, expect, random.Next() >> 20, n, reduction);
      }
    }
  };
}

RankBody ReduceNaN(uint64_t) {
  return [](Transport& t, Expectations& expect) {
    for (const Reduction reduction : {Reduction::kSum, Reduction::kMin, Reduction::kMax}) {
      for (int32_t bad = 0; bad < t.size(); ++bad) {
        double value[2] = {1.0 + t.rank(), t.rank() == bad ? std::numeric_limits<double>::quiet_NaN() : 2.0};
        expect.Ok(t.AllReduce(Far("reduce"), std::span<double>(value), reduction), "AllReduce");
        expect.Check(!std::isnan(value[0]) && std::isnan(value[1]), "a NaN on one rank must reach all ranks");
      }
    }
  };
}

RankBody BroadcastFromEach(uint64_t seed) {
  return [seed](Transport& t, Expectations& expect) {
    Random random(seed);
    for (int32_t root = 0; root < t.size(); ++root) {
      const int64_t size = random.Between(0, 50000);
      const Bytes wanted = FilledBlock(root, root, 0, size);
      Bytes buffer = t.rank() == root ? wanted : Bytes(size, kPoison);
      expect.Ok(t.Broadcast(Far("broadcast"), root, buffer), "Broadcast");
      expect.Check(buffer == wanted, "Broadcast: bytes differ from those of root " + std::to_string(root));
    }
  };
}

// Many operations back to back, ranks slipping against each other: none may take another one's bytes.
RankBody MixedOperations(uint64_t seed) {
  return [seed](Transport& t, Expectations& expect) {
    Random random(seed);
    Random own(seed * 31 + t.rank());
    for (int64_t exchange = 0; exchange < 120; ++exchange) {
      for (uint64_t yields = own.Below(3); yields > 0; --yields) std::this_thread::yield();
      switch (random.Below(4)) {
        case 0:
          ExchangeAndCheck(t, expect, Matrix(t.size(), std::vector<int64_t>(t.size(), random.Between(0, 64))),
                           exchange);
          break;
        case 1: {
          int64_t value = t.rank() + exchange;
          expect.Ok(t.AllReduce(Far("sum"), std::span<int64_t>(&value, 1), Reduction::kSum), "AllReduce");
          expect.Check(value == t.size() * exchange + t.size() * (t.size() - 1) / 2, "sum");
          break;
        }
        case 2: {
          const int32_t root = static_cast<int32_t>(random.Below(t.size()));
          int64_t value = t.rank() == root ? exchange : -1;
          expect.Ok(t.Broadcast(Far("root"), root, std::as_writable_bytes(std::span(&value, 1))),
                    "Broadcast");
          expect.Check(value == exchange, "root's value");
          break;
        }
        default:
          expect.Ok(t.Barrier(Far("barrier")), "Barrier");
      }
    }
  };
}

RankBody BadArguments(uint64_t) {
  return [](Transport& t, Expectations& expect) {
    constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
    const int32_t n = t.size();
    Bytes buffer(10 * n), other(10 * n);
    const std::vector<int64_t> good(n, 10);
    auto exchange = [&](std::vector<int64_t> sizes, const std::string& part) {
      for (const bool sending : {true, false}) {
        const absl::Status status =
            t.AllToAllV(Far("bad sizes"), buffer, sending ? sizes : good, other, sending ? good : sizes);
        expect.Code(status, kInvalid, part);
        expect.Contains(status, part);
        expect.Contains(status, sending ? "send_bytes" : "recv_bytes");
        expect.Contains(status, "bad sizes (step 7 layer 3 micro-batch 1)");
      }
    };
    exchange(std::vector<int64_t>(n + 1, 0), "one per rank");
    exchange(std::vector<int64_t>(n, 9), "must equal the size of the");
    std::vector<int64_t> sizes = good;
    sizes[n - 1] = -1;
    exchange(sizes, "must be >= 0");
    if (n > 1) {
      sizes[0] = sizes[n - 1] = std::numeric_limits<int64_t>::max();
      exchange(sizes, "2^63");
    }
    expect.Code(t.AllGather(Far("bad"), buffer, other), n == 1 ? absl::StatusCode::kOk : kInvalid,
                "AllGather size");
    expect.Code(t.Broadcast(Far("bad"), n, buffer), kInvalid, "root too large");
    expect.Code(t.Broadcast(Far("bad"), -1, buffer), kInvalid, "root negative");
    // Nothing was sent: the epoch is alive.
    ExchangeAndCheck(t, expect, Matrix(n, std::vector<int64_t>(n, 33)), 1);
  };
}

// The last rank never takes part in one operation of each kind; `which` says which kind.
RankBody MissingRank(int which) {
  return [which](Transport& t, Expectations& expect) {
    const int32_t absent = t.size() - 1;
    if (!StartTogether(t, expect)) return;
    if (t.rank() == absent) return;
    const Call call{
        "lonely call", {.step = 9, .layer = 2, .micro_batch = 4}, After(std::chrono::milliseconds(40))};
    Bytes out(8 * t.size()), in(8 * t.size());
    int64_t integer = 1;
    double real = 1;
    const std::vector<int64_t> sizes(t.size(), 8);
    absl::Status status;
    if (which == 0) status = t.Barrier(call);
    if (which == 1) status = t.AllToAllV(call, out, sizes, in, sizes);
    if (which == 2) status = t.AllGather(call, std::span(out).first(8), in);
    if (which == 3) status = t.AllReduce(call, std::span(&integer, 1), Reduction::kSum);
    if (which == 4) status = t.AllReduce(call, std::span(&real, 1), Reduction::kSum);
    if (which == 5) status = t.Broadcast(call, absent, in);
    // A rank whose peer noticed first may learn of it as the end of the epoch; the same words reach it.
    expect.Check(absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status), "got " + status.ToString());
    expect.Contains(status, std::to_string(absent) + " did not arrive");  // the last of the missing
    expect.Contains(status, "lonely call (step 9 layer 2 micro-batch 4)");
    ExpectDead(t, expect);
  };
}

RankBody LateRank(uint64_t) {
  return [](Transport& t, Expectations& expect) {
    // Already over when it is called; with peers that never come.
    if (t.rank() == t.size() - 1) return;
    const absl::Status status = t.Barrier({"late", {}, After(-std::chrono::seconds(1))});
    expect.Check(absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status), "got " + status.ToString());
  };
}

RankBody AbortBeforeCall(uint64_t) {
  return [](Transport& t, Expectations& expect) {
    if (!StartTogether(t, expect)) return;
    if (t.rank() == 0) {
      t.Abort("the test says so");
      t.Abort("another reason");  // idempotent: the first one stands
    }
    const absl::Status status = t.Barrier(Far("aborted call"));
    expect.Code(status, absl::StatusCode::kUnavailable, "Barrier after an abort");
    expect.Contains(status, "rank 0");
    expect.Contains(status, "the test says so");
    expect.Contains(status, "aborted call");
    ExpectDead(t, expect);
  };
}

RankBody AbortFromAnotherThread(uint64_t) {
  return [](Transport& t, Expectations& expect) {
    if (!StartTogether(t, expect)) return;
    if (t.rank() == t.size() - 1) return;  // the others wait for it until the abort
    std::thread aborter([&t] {
      if (t.rank() != 0) return;
      for (int i = 0; i < 50; ++i) std::this_thread::yield();
      t.Abort("asked to stop");
    });
    const absl::Status status = t.Barrier(Far("waiting"));
    aborter.join();
    expect.Code(status, absl::StatusCode::kUnavailable, "Barrier under an abort");
    expect.Contains(status, "asked to stop");
    ExpectDead(t, expect);
  };
}

// Ranks that call different things must not hang until the deadline, nor get data.
RankBody Disagreement(int which) {
  return [which](Transport& t, Expectations& expect) {
    const int32_t n = t.size();
    const bool odd = t.rank() == n - 1;
    Bytes out(64 * n), in(64 * n);
    std::vector<int64_t> sizes(n, 16), other = sizes;
    other[0] = 24;  // what the odd rank sends to rank 0, which expects 16
    const std::span<std::byte> all(in);
    absl::Status status;
    if (which == 0)
      status =
          odd ? t.Barrier(Far("left")) : t.AllGather(Far("right"), std::span(out).first(8), all.first(8 * n));
    if (which == 1) {
      status = t.AllToAllV(Far("sizes"), std::span(out).first(16 * n + (odd ? 8 : 0)), odd ? other : sizes,
                           all.first(16 * n), sizes);
    }
    if (which == 2) {
      const size_t block = odd ? 16 : 8;
      status = t.AllGather(Far("blocks"), std::span(out).first(block), all.first(block * n));
    }
    if (which == 3) status = t.Broadcast(Far("buffer"), 0, all.first(odd ? 9 : 8));
    // An implementation may let a rank that was not concerned finish; the next operation tells it.
    const absl::Status next = t.Barrier(Far("next"));
    expect.Check(!next.ok(), "the epoch must be dead after a disagreement");
    expect.Contains(status.ok() ? next : status, "disagree");
    ExpectDead(t, expect);
  };
}

}  // namespace

const std::vector<ConformanceCase>& ConformanceCases() {
  static const std::vector<ConformanceCase>* const cases = [] {
    auto* list = new std::vector<ConformanceCase>{
        {"random all-to-all-v", RandomExchanges, 1, 8},
        {"empty operations", EmptyExchange},
        {"all-gather", Gather, 1, 4},
        {"all-reduce in rank order", Reduce, 1, 3},
        {"all-reduce keeps NaN", ReduceNaN},
        {"broadcast from each root", BroadcastFromEach, 1, 3},
        {"mixed operations back to back", MixedOperations, 1, 4},
        {"bad arguments leave the epoch alive", BadArguments},
        {"a call whose deadline is over", LateRank, 2},
        {"abort before a call", AbortBeforeCall},
        {"abort from another thread", AbortFromAnotherThread, 2, 5},
    };
    for (int which = 0; which < 6; ++which) {
      list->push_back({"a rank that never arrives, operation " + std::to_string(which),
                       [which](uint64_t) { return MissingRank(which); }, 2});
    }
    for (int which = 0; which < 4; ++which) {
      list->push_back({"ranks that disagree, way " + std::to_string(which),
                       [which](uint64_t) { return Disagreement(which); }, 2});
    }
    for (ConformanceCase& one : StartedCases()) list->push_back(std::move(one));
    return list;
  }();
  return *cases;
}

RankBody LargeExchange() {
  return [](Transport& t, Expectations& expect) {
    const int32_t n = t.size(), next = (t.rank() + 1) % n, previous = (t.rank() + n - 1) % n;
    const int64_t large = (int64_t{1} << 31) + 4097, small = 17, stride = 4096;
    std::vector<int64_t> send_bytes(n, small), recv_bytes(n, small);
    send_bytes[next] = recv_bytes[previous] = large;
    auto offset = [](const std::vector<int64_t>& sizes, int32_t peer) {
      return std::accumulate(sizes.begin(), sizes.begin() + peer, int64_t{0});
    };
    Bytes send(offset(send_bytes, n)), recv(offset(recv_bytes, n));
    auto payload = [](int32_t from, int64_t i) {
      return static_cast<std::byte>(Random(from * 7919 + i).Next() & 0xFF);
    };
    for (int64_t i = 0; i < large; i += stride) {
      send[offset(send_bytes, next) + i] = payload(t.rank(), i);
    }
    expect.Ok(t.AllToAllV(Far("large"), send, send_bytes, recv, recv_bytes), "AllToAllV");
    int64_t wrong = 0;
    for (int64_t i = 0; i < large; i += stride) {
      wrong += recv[offset(recv_bytes, previous) + i] != payload(previous, i);
    }
    expect.Check(wrong == 0, std::to_string(wrong) + " sampled bytes of the large part differ");
  };
}

}  // namespace lrmoe::transport
