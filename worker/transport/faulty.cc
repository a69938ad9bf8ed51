#include "worker/transport/faulty.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/random.h"
#include "common/status_macros.h"
#include "worker/transport/contract.h"

namespace lrmoe::transport {
namespace {

class FaultyTransport : public Transport {
 public:
  FaultyTransport(std::unique_ptr<Transport> inner, const FaultPlan& plan)
      : inner_(std::move(inner)), plan_(plan) {}

  int32_t rank() const override { return inner_->rank(); }
  int32_t size() const override { return inner_->size(); }

  absl::Status AllToAllV(const Call& call, std::span<const std::byte> send,
                         std::span<const int64_t> send_bytes, std::span<std::byte> recv,
                         std::span<const int64_t> recv_bytes) override {
    return Run(call, [&] { return inner_->AllToAllV(call, send, send_bytes, recv, recv_bytes); });
  }
  absl::StatusOr<Ticket> StartAllToAllV(const Call& call, SendParts send, RecvParts recv) override {
    Ticket ticket{};
    LRMOE_RETURN_IF_ERROR(Run(call, [&]() -> absl::Status {
      LRMOE_ASSIGN_OR_RETURN(ticket, inner_->StartAllToAllV(call, send, recv));
      return absl::OkStatus();
    }));
    started_.emplace(ticket, call);
    return ticket;
  }
  // An operation like others for faults. After a hang the inner exchange stays as it is: this rank never
  // arrives.
  absl::StatusOr<std::chrono::steady_clock::time_point> Finish(Ticket ticket, Deadline deadline) override {
    Call call = started_.extract(ticket).mapped();
    call.deadline = deadline;
    absl::StatusOr<std::chrono::steady_clock::time_point> done = absl::UnknownError("not run");
    const absl::Status status = Run(call, [&] {
      done = inner_->Finish(ticket, deadline);
      return done.status();
    });
    if (!status.ok() && !hung_ && absl::IsUnknown(done.status())) (void)inner_->Finish(ticket, deadline);
    LRMOE_RETURN_IF_ERROR(status);
    return done;
  }
  absl::Status AllGather(const Call& call, std::span<const std::byte> send,
                         std::span<std::byte> recv) override {
    return Run(call, [&] { return inner_->AllGather(call, send, recv); });
  }
  absl::Status AllReduce(const Call& call, std::span<int64_t> values, Reduction reduction) override {
    return Run(call, [&] { return inner_->AllReduce(call, values, reduction); });
  }
  absl::Status AllReduce(const Call& call, std::span<double> values, Reduction reduction) override {
    return Run(call, [&] { return inner_->AllReduce(call, values, reduction); });
  }
  absl::Status Broadcast(const Call& call, int32_t root, std::span<std::byte> buffer) override {
    return Run(call, [&] { return inner_->Broadcast(call, root, buffer); });
  }
  absl::Status Barrier(const Call& call) override {
    return Run(call, [&] { return inner_->Barrier(call); });
  }

  void Abort(absl::string_view reason) override {
    {
      std::lock_guard lock(mutex_);
      if (!aborted_) aborted_ = absl::StrCat("rank ", rank(), " aborted: ", reason);
    }
    changed_.notify_all();
    inner_->Abort(reason);
  }

 private:
  template <typename Operation>
  absl::Status Run(const Call& call, const Operation& operation) {
    if (hung_) return EpochIsDead(call, rank(), "an injected hang");
    const int64_t index = operation_idx_++;
    if (index < plan_.first_operation) return operation();
    // Of its own generator per operation and rank, so that a fault depends on nothing but seed, rank and
    // position.
    Random random(Random(plan_.seed ^ Random(static_cast<uint64_t>(rank()) + 1).Next()).Next() + index);
    const bool abort = random.Uniform() < plan_.abort_probability;
    const bool hang = random.Uniform() < plan_.hang_probability;
    const bool delay = random.Uniform() < plan_.delay_probability;
    if (abort) {
      const std::string reason =
          absl::StrCat("injected fault at operation ", index, " (", call.operation, ")");
      Abort(reason);
      return EpochIsDead(call, rank(), absl::StrCat("rank ", rank(), " aborted: ", reason));
    }
    if (hang) return Hang(call, index);
    if (delay) {
      for (int32_t i = 0; i < plan_.delay_yields; ++i) std::this_thread::yield();
    }
    return operation();
  }

  absl::Status Hang(const Call& call, int64_t index) {
    hung_ = true;
    std::unique_lock lock(mutex_);
    if (changed_.wait_until(lock, call.deadline, [&] { return aborted_.has_value(); })) {
      return EpochIsDead(call, rank(), *aborted_);
    }
    return absl::DeadlineExceededError(
        absl::StrCat(Where(call, rank()), ": injected fault: hung at operation ", index));
  }

  const std::unique_ptr<Transport> inner_;
  const FaultPlan plan_;
  int64_t operation_idx_ = 0;       // of the calling thread
  bool hung_ = false;               // of the calling thread
  std::map<Ticket, Call> started_;  // of the calling thread

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<std::string> aborted_;  // mutex_
};

void CheckProbability(double probability) {
  LRMOE_CHECK_GE(probability, 0.0);
  LRMOE_CHECK_LE(probability, 1.0);
}

}  // namespace

std::unique_ptr<Transport> CreateFaulty(std::unique_ptr<Transport> inner, const FaultPlan& plan) {
  CheckProbability(plan.abort_probability);
  CheckProbability(plan.hang_probability);
  CheckProbability(plan.delay_probability);
  LRMOE_CHECK_GE(plan.delay_yields, 0);
  return std::make_unique<FaultyTransport>(std::move(inner), plan);
}

}  // namespace lrmoe::transport
