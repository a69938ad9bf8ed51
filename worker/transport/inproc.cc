#include "worker/transport/inproc.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status_macros.h"
#include "worker/transport/contract.h"

namespace lrmoe::transport {
namespace {

using std::chrono::steady_clock;

enum class Kind : uint8_t { kAllToAllV, kAllGather, kAllReduceInt, kAllReduceDouble, kBroadcast, kBarrier };

absl::string_view Name(Kind kind) {
  switch (kind) {
    case Kind::kAllToAllV:
      return "AllToAllV";
    case Kind::kAllGather:
      return "AllGather";
    case Kind::kAllReduceInt:
      return "AllReduce of int64";
    case Kind::kAllReduceDouble:
      return "AllReduce of double";
    case Kind::kBroadcast:
      return "Broadcast";
    case Kind::kBarrier:
      return "Barrier";
  }
  return "unknown";
}

// What a rank brings to a round. Points into the buffers of its caller, who stays inside the call until every
// rank has copied what it needs.
struct Offer {
  Kind kind = Kind::kBarrier;
  absl::string_view operation;
  const std::byte* send = nullptr;
  int64_t bytes = 0;     // of `send`; of the block, the values or the buffer
  int32_t argument = 0;  // root or reduction
  SendParts send_parts;  // AllToAllV
  RecvParts recv_parts;
};

// The ranks meet here once per operation. A round has two halves: all ranks arrive; all ranks copy, outside
// the lock, from each other's buffers. No rank leaves before all have copied.
class Group {
 public:
  explicit Group(int32_t size) : size_(size), offers_(size), arrived_(size, 0), gone_(size, false) {}

  int32_t size() const { return size_; }
  // Only between arrival and departure of the same round.
  const Offer& offer(int32_t rank) const { return offers_[rank]; }

  // Runs round number `round` of this rank; `copy` once every rank is here and all agree.
  absl::Status Meet(const Call& call, int32_t rank, int64_t round, const Offer& offer,
                    const std::function<void()>& copy) {
    std::unique_lock lock(mutex_);
    LRMOE_RETURN_IF_ERROR(Arrive(lock, call, rank, round, offer));
    lock.unlock();
    copy();
    lock.lock();
    if (--copying_ == 0) {
      copied_round_ = round;
      changed_.notify_all();
    }
    // Without a deadline: nobody can leave while others still read its buffers. All ranks are here and only
    // copy.
    changed_.wait(lock, [&] { return copied_round_ >= round; });
    return absl::OkStatus();
  }

  absl::Status CheckAlive(const Call& call, int32_t rank) {
    std::lock_guard lock(mutex_);
    return dead_ ? EpochIsDead(call, rank, *dead_) : absl::OkStatus();
  }

  void Abort(const std::string& reason) {
    std::lock_guard lock(mutex_);
    End(reason);
  }

  void Leave(int32_t rank) {
    std::lock_guard lock(mutex_);
    gone_[rank] = true;
    changed_.notify_all();
  }

 private:
  absl::Status Arrive(std::unique_lock<std::mutex>& lock, const Call& call, int32_t rank, int64_t round,
                      const Offer& offer) {
    if (dead_) return EpochIsDead(call, rank, *dead_);
    offers_[rank] = offer;
    arrived_[rank] = round;
    if (++num_arrived_ == size_) {
      num_arrived_ = 0;
      copying_ = size_;
      full_round_ = round;
      disagreement_ = Disagreement();
      if (!disagreement_.empty()) End(disagreement_);
      changed_.notify_all();
    }
    while (full_round_ < round) {
      if (timed_out_round_ == round) return MissingRanks(call, rank, missing_);
      if (dead_) return EpochIsDead(call, rank, *dead_);
      const std::vector<int32_t> missing = Missing(round);
      for (int32_t peer : missing) {
        if (gone_[peer]) {
          End(absl::StrCat("rank ", peer, " is gone"));
          return EpochIsDead(call, rank, *dead_);
        }
      }
      if (changed_.wait_until(lock, call.deadline) == std::cv_status::timeout && full_round_ < round &&
          !dead_) {
        missing_ = Missing(round);
        timed_out_round_ = round;
        const absl::Status status = MissingRanks(call, rank, missing_);
        End(std::string(status.message()));
        return status;
      }
    }
    if (!disagreement_.empty()) {
      return absl::FailedPreconditionError(absl::StrCat(Where(call, rank), ": ", disagreement_));
    }
    return absl::OkStatus();
  }

  void End(const std::string& reason) {
    if (!dead_) dead_ = reason;
    changed_.notify_all();
  }

  std::vector<int32_t> Missing(int64_t round) const {
    std::vector<int32_t> missing;
    for (int32_t peer = 0; peer < size_; ++peer) {
      if (arrived_[peer] < round) missing.push_back(peer);
    }
    return missing;
  }

  // Empty when the offers fit together; otherwise the first pair that does not, both sides named.
  std::string Disagreement() const {
    const Offer& first = offers_[0];
    for (int32_t rank = 1; rank < size_; ++rank) {
      const Offer& other = offers_[rank];
      if (other.kind != first.kind) {
        return absl::StrCat("ranks disagree: rank 0 calls ", Name(first.kind), " for ", first.operation,
                            ", rank ", rank, " calls ", Name(other.kind), " for ", other.operation);
      }
      if (first.kind != Kind::kAllToAllV &&
          (other.bytes != first.bytes || other.argument != first.argument)) {
        return absl::StrCat("ranks disagree about ", Name(first.kind), ": rank 0 has ", first.bytes,
                            " bytes and argument ", first.argument, ", rank ", rank, " has ", other.bytes,
                            " bytes and argument ", other.argument);
      }
    }
    if (first.kind != Kind::kAllToAllV) return "";
    for (int32_t from = 0; from < size_; ++from) {
      for (int32_t to = 0; to < size_; ++to) {
        const size_t sent = offers_[from].send_parts[to].size(),
                     expected = offers_[to].recv_parts[from].size();
        if (sent == expected) continue;
        return absl::StrCat("ranks disagree about AllToAllV: rank ", from, " sends ", sent, " bytes to rank ",
                            to, ", which expects ", expected);
      }
    }
    return "";
  }

  const int32_t size_;
  std::vector<Offer> offers_;  // written under mutex_ on arrival; read without it until departure

  std::mutex mutex_;
  std::condition_variable changed_;
  // All below: mutex_. Rounds count from 1; 0 is before the first.
  std::vector<int64_t> arrived_;  // last round each rank arrived in
  std::vector<bool> gone_;        // its transport was destroyed
  int32_t num_arrived_ = 0;       // in the round that is filling
  int32_t copying_ = 0;           // in the round that is full
  int64_t full_round_ = 0;        // last round every rank arrived in
  int64_t copied_round_ = 0;      // last round every rank has copied in
  int64_t timed_out_round_ = 0;   // and the ranks it missed
  std::vector<int32_t> missing_;
  std::string disagreement_;  // of full_round_
  std::optional<std::string> dead_;
};

void Copy(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

class InprocTransport : public Transport {
 public:
  InprocTransport(std::shared_ptr<Group> group, int32_t rank, CopyBytes copy)
      : group_(std::move(group)), rank_(rank), copy_(std::move(copy)) {}
  ~InprocTransport() override { group_->Leave(rank_); }

  int32_t rank() const override { return rank_; }
  int32_t size() const override { return group_->size(); }

  absl::Status AllToAllV(const Call& call, std::span<const std::byte> send,
                         std::span<const int64_t> send_bytes, std::span<std::byte> recv,
                         std::span<const int64_t> recv_bytes) override {
    LRMOE_RETURN_IF_ERROR(CheckAllToAllV(call, rank_, size(), send, send_bytes, recv, recv_bytes));
    Split(send, send_bytes, send_parts_);
    Split(recv, recv_bytes, recv_parts_);
    MeetStarted(last_ticket_, call.deadline);
    return MeetParts(call, send_parts_, recv_parts_);
  }

  // Nothing moves before the end: the ranks meet when one of them must go on. So every byte that is touched
  // too early, on either side, shows.
  absl::StatusOr<Ticket> StartAllToAllV(const Call& call, SendParts send, RecvParts recv) override {
    const auto started =
        std::count_if(started_.begin(), started_.end(), [](const Started& s) { return s.open; });
    LRMOE_RETURN_IF_ERROR(CheckStart(call, rank_, size(), send, recv, static_cast<int>(started)));
    LRMOE_RETURN_IF_ERROR(group_->CheckAlive(call, rank_));
    Started& free = *std::find_if(started_.begin(), started_.end(), [](const Started& s) { return !s.open; });
    free.ticket = ++last_ticket_;
    free.open = true;
    free.met = false;
    free.call = call;
    free.send.assign(send.begin(), send.end());
    free.recv.assign(recv.begin(), recv.end());
    return Ticket{free.ticket};
  }

  absl::StatusOr<steady_clock::time_point> Finish(Ticket ticket, Deadline deadline) override {
    const auto number = static_cast<int64_t>(ticket);
    const auto one = std::find_if(started_.begin(), started_.end(),
                                  [&](const Started& s) { return s.open && s.ticket == number; });
    LRMOE_CHECK(one != started_.end());
    MeetStarted(number, deadline);
    one->open = false;
    LRMOE_RETURN_IF_ERROR(one->status);
    LRMOE_RETURN_IF_ERROR(group_->CheckAlive(one->call, rank_));
    return one->done;
  }

  absl::Status AllGather(const Call& call, std::span<const std::byte> send,
                         std::span<std::byte> recv) override {
    LRMOE_RETURN_IF_ERROR(CheckAllGather(call, rank_, size(), send.size(), recv.size()));
    const int64_t block = static_cast<int64_t>(send.size());
    const Offer offer{
        .kind = Kind::kAllGather, .operation = call.operation, .send = send.data(), .bytes = block};
    return Meet(call, offer, [&] {
      for (int32_t peer = 0; peer < size() && block > 0; ++peer) {
        Copy(recv.data() + peer * block, group_->offer(peer).send, block);
      }
    });
  }

  absl::Status AllReduce(const Call& call, std::span<int64_t> values, Reduction reduction) override {
    return Reduce(call, Kind::kAllReduceInt, values, reduction);
  }
  absl::Status AllReduce(const Call& call, std::span<double> values, Reduction reduction) override {
    return Reduce(call, Kind::kAllReduceDouble, values, reduction);
  }

  absl::Status Broadcast(const Call& call, int32_t root, std::span<std::byte> buffer) override {
    LRMOE_RETURN_IF_ERROR(CheckRoot(call, rank_, size(), root));
    const int64_t bytes = static_cast<int64_t>(buffer.size());
    const Offer offer{.kind = Kind::kBroadcast,
                      .operation = call.operation,
                      .send = buffer.data(),
                      .bytes = bytes,
                      .argument = root};
    return Meet(call, offer, [&] {
      if (rank_ != root) Copy(buffer.data(), group_->offer(root).send, bytes);
    });
  }

  absl::Status Barrier(const Call& call) override {
    return Meet(call, Offer{.kind = Kind::kBarrier, .operation = call.operation}, [] {});
  }

  void Abort(absl::string_view reason) override {
    group_->Abort(absl::StrCat("rank ", rank_, " aborted: ", reason));
  }

 private:
  struct Started {
    int64_t ticket = 0;
    bool open = false;  // until it is finished
    bool met = false;   // the ranks have met for it; then status and done say how and when
    Call call;
    std::vector<std::span<const std::byte>> send;
    std::vector<std::span<std::byte>> recv;
    absl::Status status;
    steady_clock::time_point done;
  };

  // Meets for what was started up to this ticket, in the order of the starts.
  void MeetStarted(int64_t last, Deadline deadline) {
    while (true) {
      Started* next = nullptr;
      for (Started& one : started_) {
        const bool waits = one.open && !one.met && one.ticket <= last;
        if (waits && (next == nullptr || one.ticket < next->ticket)) next = &one;
      }
      if (next == nullptr) return;
      next->call.deadline = deadline;
      next->status = MeetParts(next->call, next->send, next->recv);
      next->done = steady_clock::now();
      next->met = true;
    }
  }

  absl::Status MeetParts(const Call& call, SendParts send, RecvParts recv) {
    Offer offer{.kind = Kind::kAllToAllV, .operation = call.operation};
    offer.send_parts = send;
    offer.recv_parts = recv;
    absl::Status copied;
    absl::Status met = group_->Meet(call, rank_, ++round_, offer, [&] {
      for (int32_t peer = 0; peer < size(); ++peer) {
        const std::byte* const from = group_->offer(peer).send_parts[rank_].data();
        const auto bytes = static_cast<int64_t>(recv[peer].size());
        if (bytes == 0) continue;
        if (!copy_)
          Copy(recv[peer].data(), from, bytes);
        else if (copied.ok())
          copied = copy_(recv[peer].data(), from, bytes);
      }
    });
    if (met.ok() && !copied.ok()) {
      Abort(copied.message());
      return EpochIsDead(call, rank_, copied.message());
    }
    return met;
  }

  absl::Status Meet(const Call& call, const Offer& offer, const std::function<void()>& copy) {
    MeetStarted(last_ticket_, call.deadline);
    return group_->Meet(call, rank_, ++round_, offer, copy);
  }

  template <typename T>
  absl::Status Reduce(const Call& call, Kind kind, std::span<T> values, Reduction reduction) {
    const Offer offer{.kind = kind,
                      .operation = call.operation,
                      .send = reinterpret_cast<const std::byte*>(values.data()),
                      .bytes = static_cast<int64_t>(values.size_bytes()),
                      .argument = static_cast<int32_t>(reduction)};
    // Peers read `values` until the round ends, so the result waits aside.
    std::vector<T> result(values.size());
    LRMOE_RETURN_IF_ERROR(Meet(call, offer, [&] {
      if (values.empty()) return;
      std::memcpy(result.data(), group_->offer(0).send, values.size_bytes());
      for (int32_t peer = 1; peer < size(); ++peer) {
        Accumulate(reduction, std::span<T>(result), reinterpret_cast<const T*>(group_->offer(peer).send));
      }
    }));
    if (!values.empty()) std::memcpy(values.data(), result.data(), values.size_bytes());
    return absl::OkStatus();
  }

  const std::shared_ptr<Group> group_;
  const int32_t rank_;
  const CopyBytes copy_;
  // The calling thread's; members to be allocated once.
  int64_t round_ = 0;
  int64_t last_ticket_ = 0;
  std::array<Started, kMaxStarted> started_;
  std::vector<std::span<const std::byte>> send_parts_;
  std::vector<std::span<std::byte>> recv_parts_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> CreateInprocGroup(int32_t size, CopyBytes copy) {
  LRMOE_CHECK_GE(size, 1);
  const auto group = std::make_shared<Group>(size);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int32_t rank = 0; rank < size; ++rank)
    transports.push_back(std::make_unique<InprocTransport>(group, rank, copy));
  return transports;
}

}  // namespace lrmoe::transport
