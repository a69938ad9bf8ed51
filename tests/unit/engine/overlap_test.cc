// Exchanges that go on while the rank computes: the same bits, the same bytes on the wire, no more memory,
// and buffers that stay the transport's until it is done with them, also when something fails meanwhile.
#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <mutex>
#include <string>

#include "common/random.h"
#include "common/status_macros.h"
#include "tests/support/engine/engine_runs.h"
#include "worker/engine/routing.h"
#include "worker/transport/faulty.h"
#include "worker/transport/forwarding.h"

using namespace lrmoe;
using namespace lrmoe::testing;

namespace {

struct Seen {
  std::mutex mutex;
  std::map<std::string, int64_t> started;     // by operation
  std::map<std::string, int64_t> sent_bytes;  // by operation, to other ranks
  int most_at_once = 0;
  std::vector<std::string> failures;
};

// Notes what is started and sent; what is sent must not change while it is under way, what is received not be
// touched, and all must be finished.
class WatchingTransport : public transport::ForwardingTransport {
 public:
  WatchingTransport(std::unique_ptr<Transport> inner, Seen* seen)
      : ForwardingTransport(std::move(inner)), seen_(seen) {}
  ~WatchingTransport() override { Expect(open_.empty(), "an exchange was never finished"); }

  absl::Status AllToAllV(const transport::Call& call, std::span<const std::byte> send,
                         std::span<const int64_t> send_bytes, std::span<std::byte> recv,
                         std::span<const int64_t> recv_bytes) override {
    for (int32_t r = 0; r < size(); ++r) Count(call, r, send_bytes[r]);
    return inner_->AllToAllV(call, send, send_bytes, recv, recv_bytes);
  }
  absl::StatusOr<transport::Ticket> StartAllToAllV(const transport::Call& call, transport::SendParts send,
                                                   transport::RecvParts recv) override {
    for (int32_t r = 0; r < size(); ++r) Count(call, r, static_cast<int64_t>(send[r].size()));
    LRMOE_ASSIGN_OR_RETURN(const transport::Ticket ticket, inner_->StartAllToAllV(call, send, recv));
    Open& open = open_[ticket];
    open.operation = std::string(call.operation.data(), call.operation.size());
    open.send.assign(send.begin(), send.end());
    open.recv.assign(recv.begin(), recv.end());
    open.content = Contents(open);
    std::lock_guard lock(seen_->mutex);
    ++seen_->started[open.operation];
    seen_->most_at_once = std::max(seen_->most_at_once, static_cast<int>(open_.size()));
    return ticket;
  }
  absl::StatusOr<std::chrono::steady_clock::time_point> Finish(transport::Ticket ticket,
                                                               Deadline deadline) override {
    const Open open = std::move(open_.extract(ticket).mapped());
    Expect(Contents(open) == open.content, open.operation + ": bytes changed while under way");
    return inner_->Finish(ticket, deadline);
  }

 private:
  struct Open {
    std::string operation;
    std::vector<std::span<const std::byte>> send;
    std::vector<std::span<std::byte>> recv;
    std::vector<std::byte> content;
  };
  // Nothing arrives before Finish with the transports used here.
  static std::vector<std::byte> Contents(const Open& open) {
    std::vector<std::byte> out;
    for (const auto& part : open.send) out.insert(out.end(), part.begin(), part.end());
    for (const auto& part : open.recv) out.insert(out.end(), part.begin(), part.end());
    return out;
  }
  void Count(const transport::Call& call, int32_t to, int64_t bytes) {
    if (to == rank()) return;
    std::lock_guard lock(seen_->mutex);
    seen_->sent_bytes[std::string(call.operation.data(), call.operation.size())] += bytes;
  }
  void Expect(bool condition, const std::string& what) {
    if (condition) return;
    std::lock_guard lock(seen_->mutex);
    seen_->failures.push_back("rank " + std::to_string(rank()) + ": " + what);
  }

  Seen* const seen_;
  std::map<transport::Ticket, Open> open_;
};

void RequireNoFailures(const Seen& seen) {
  for (const std::string& failure : seen.failures) UNSCOPED_INFO(failure);
  REQUIRE(seen.failures.empty());
}

}  // namespace

TEST_CASE("overlap changes no bit and no byte on the wire: random shapes, plans, replicas, recomputation") {
  std::map<std::string, int64_t> started;
  int most_at_once = 0;
  for (uint64_t seed = 0; seed < 150; ++seed) {
    CAPTURE(seed);
    Random random(seed + 5000);
    LayerShape shape;
    shape.num_experts = static_cast<int32_t>(random.Between(1, 12));
    shape.top_k = static_cast<int32_t>(random.Between(1, std::min(3, shape.num_experts)));
    shape.hidden_size = static_cast<int32_t>(seed % 10 == 0 ? 64 : random.Between(2, 40));
    shape.intermediate_size = static_cast<int32_t>(seed % 10 == 0 ? 64 : random.Between(2, 24));
    shape.dtype = random.Below(2) == 0 ? DataType::kFp32 : DataType::kBf16;
    std::vector<int64_t> tokens(random.Between(1, 4));
    for (int64_t& n : tokens) n = random.Below(4) == 0 ? 0 : random.Between(1, 30);
    const MoeProblem problem = RandomProblem(shape, tokens, static_cast<Routing>(random.Below(3)), seed);
    ScriptedPlans plans;
    plans.seed = seed;
    plans.retention = random.Below(3) == 0 ? 1.0 : random.Uniform();
    plans.replica_probability = random.Uniform();
    plans.router_gradient = random.Below(2) == 0 ? RouterGradient::kExact : RouterGradient::kRetained;
    RunSetup setup{{}, plans, {}};
    setup.options.recompute_activation = random.Below(2) == 0;
    LayerOutput outputs[2];
    Seen seen[2];
    for (const bool overlap : {false, true}) {
      setup.options.overlap = overlap;
      setup.options.least_piece_bytes = 1;
      setup.wrap = [&](int32_t, std::unique_ptr<transport::Transport> inner) {
        return std::make_unique<WatchingTransport>(std::move(inner), &seen[overlap]);
      };
      for (const absl::Status& status : RunLayer(problem, setup, outputs[overlap])) {
        INFO(status.ToString());
        REQUIRE(status.ok());
      }
      RequireNoFailures(seen[overlap]);
    }
    REQUIRE(outputs[0].kept == outputs[1].kept);
    REQUIRE(Encode(DataType::kFp32, outputs[0].y) == Encode(DataType::kFp32, outputs[1].y));
    REQUIRE(Encode(DataType::kFp32, outputs[0].dx) == Encode(DataType::kFp32, outputs[1].dx));
    REQUIRE(Encode(DataType::kFp32, outputs[0].dalpha) == Encode(DataType::kFp32, outputs[1].dalpha));
    REQUIRE(outputs[0].dw1 == outputs[1].dw1);
    REQUIRE(outputs[0].dw2 == outputs[1].dw2);
    REQUIRE(seen[0].sent_bytes == seen[1].sent_bytes);
    REQUIRE(seen[0].most_at_once <= 1);
    for (const auto& [operation, count] : seen[1].started)
      started[operation] += count - seen[0].started[operation];
    most_at_once = std::max(most_at_once, seen[1].most_at_once);
  }
  CHECK(started["forward return"] > 100);  // more exchanges than without: pieces
  CHECK(started["backward return"] == 0);
  CHECK(most_at_once == 2);
}

TEST_CASE("pieces: consecutive from the last instance on, never more memory than the rows of all") {
  int64_t divided = 0;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const auto num_ranks = static_cast<int32_t>(random.Between(1, 4));
    LayerPlan plan;
    plan.ranks.resize(num_ranks);
    for (int64_t i = random.Between(1, 30); i > 0; --i) {
      InstancePlan& instance = plan.instances.emplace_back();
      instance.rank_idx = static_cast<int32_t>(random.Below(num_ranks));
      instance.forward_rows = random.Below(4) == 0 ? 0 : random.Between(1, random.Below(5) == 0 ? 900 : 100);
    }
    const int64_t h = random.Between(1, 64), f = random.Between(1, 64), least = random.Between(1, 60);
    const std::vector<int32_t> piece = engine::ReturnPieces(plan, h, f, least);
    REQUIRE(piece.size() == plan.instances.size());
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      std::vector<int64_t> rows(engine::kMaxPieces, 0);
      int32_t before = engine::kMaxPieces;
      int64_t all = 0;
      for (size_t i = 0; i < piece.size(); ++i) {
        if (plan.instances[i].rank_idx != rank) continue;
        REQUIRE(piece[i] >= 0);
        REQUIRE(piece[i] < engine::kMaxPieces);
        REQUIRE(piece[i] <= before);
        before = piece[i];
        rows[piece[i]] += plan.instances[i].forward_rows;
        all += plan.instances[i].forward_rows;
      }
      int64_t left = all - rows[0];
      divided += left > 0;
      for (int32_t c = 1; c < engine::kMaxPieces; left -= rows[c++])
        REQUIRE((left == 0 || (rows[c - 1] + rows[c]) * h + left * f <= all * h));
      if (all < 2 * least) REQUIRE(rows[0] == all);
    }
  }
  CHECK(divided > 500);
}

TEST_CASE("with overlap the peak is never above the memory model's") {
  for (const bool recompute : {false, true}) {
    for (const double retention : {1.0, 0.6, 0.2}) {
      for (const auto& tokens : {std::vector<int64_t>{1300, 700}, {500, 900, 1100}, {1500, 0}}) {
        CAPTURE(recompute, retention, tokens);
        LayerShape shape;
        shape.num_experts = 12;
        shape.top_k = 2;
        shape.hidden_size = 96;
        shape.intermediate_size = 48;
        const MoeProblem problem = RandomProblem(shape, tokens, Routing::kSkewed, 3);
        ScriptedPlans plans{.seed = 17, .replica_probability = 0.0, .retention = retention};
        plans.scatter_backward = false;
        RunSetup setup{{}, plans, {}};
        setup.options.recompute_activation = recompute;
        setup.options.overlap = true;
        setup.options.least_piece_bytes = 1;
        LayerOutput output;
        std::vector<std::vector<engine::InvocationReport>> reports;
        for (const absl::Status& status : RunLayer(problem, setup, output, &reports)) REQUIRE(status.ok());
        for (const auto& rank : reports) {
          CAPTURE(rank[0].predicted_bytes, rank[0].peak_bytes);
          CHECK(static_cast<double>(rank[0].peak_bytes) <=
                1.02 * static_cast<double>(rank[0].predicted_bytes));
        }
      }
    }
  }
}

TEST_CASE("a fault while rows are under way never hangs and leaves no exchange behind") {
  LayerShape shape;
  shape.num_experts = 8;
  shape.top_k = 2;
  shape.hidden_size = 16;
  shape.intermediate_size = 8;
  shape.dtype = DataType::kFp32;
  const MoeProblem problem = RandomProblem(shape, {17, 19, 15}, Routing::kUniform, 12);
  int failed = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    CAPTURE(seed);
    RunSetup setup{{}, ScriptedPlans{.seed = 2, .replica_probability = 0.5, .retention = 0.6}, {}};
    setup.options.overlap = true;
    setup.options.least_piece_bytes = 1;
    setup.options.collective_timeout = std::chrono::milliseconds(300);
    setup.options.plan_timeout = std::chrono::milliseconds(300);
    Seen seen;
    setup.wrap = [&](int32_t rank, std::unique_ptr<transport::Transport> inner) {
      transport::FaultPlan faults;
      faults.seed = seed * 10 + static_cast<uint64_t>(rank);
      faults.abort_probability = seed % 3 != 0 ? 0.04 : 0.0;
      faults.hang_probability = seed % 6 == 0 ? 0.04 : 0.0;
      faults.delay_probability = 0.2;
      return std::make_unique<WatchingTransport>(transport::CreateFaulty(std::move(inner), faults), &seen);
    };
    LayerOutput output;
    const std::vector<absl::Status> statuses = RunLayer(problem, setup, output);
    RequireNoFailures(seen);
    for (const absl::Status& status : statuses) {
      INFO(status.ToString());
      REQUIRE((status.ok() || absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)));
      failed += !status.ok();
    }
    if (!std::all_of(statuses.begin(), statuses.end(), [](const absl::Status& s) { return s.ok(); }))
      continue;
    const MoeResult reference = ReferenceLayer(problem, output.kept, true);
    REQUIRE(RelativeError(output.y, reference.y) < 1e-5);
    REQUIRE(RelativeError(output.dx, reference.dx) < 1e-5);
  }
  REQUIRE(failed > 0);
}
