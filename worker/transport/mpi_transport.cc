#include "worker/transport/mpi_transport.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status_macros.h"
#include "worker/transport/contract.h"
#include "worker/transport/direct.h"

namespace lrmoe::transport {

std::string MpiError(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return absl::StrCat("MPI error ", code);
  return std::string(text, length);
}

namespace {

using std::chrono::steady_clock;

// Tags: 0 carries the reason of an abort; exchange number n of kind k has tag (n mod exchanges) * 8 + k.
constexpr int kAbortTag = 0;
constexpr int kTagsPerExchange = 8;
constexpr int kReasonBytes = 1024;

// After an exchange failed, how long matched but unfinished receives may go on.
constexpr auto kDrainLimit = std::chrono::milliseconds(100);

class MpiTransport : public DirectTransport {
 public:
  MpiTransport(std::shared_ptr<MpiShared> shared, MPI_Comm comm, const MpiPlace& place,
               const MpiOptions& options)
      : DirectTransport(place.rank, place.size),
        shared_(std::move(shared)),
        comm_(comm),
        options_(options),
        epoch_(shared_->epochs) {
    int* upper = nullptr;
    int found = 0;
    MPI_Comm_get_attr(comm_, MPI_TAG_UB, &upper, &found);
    num_tags_ = (found ? *upper : 32767) / kTagsPerExchange;
    MPI_Irecv(peer_reason_, kReasonBytes, MPI_BYTE, MPI_ANY_SOURCE, kAbortTag, comm_, &abort_note_);
    if (options_.progress_thread && place.size > 1) progress_ = std::thread([this] { Progress(); });
  }

  // MPI_Comm_free is collective and has no deadline, so the communicator lives until MPI_Finalize.
  ~MpiTransport() override {
    if (progress_.joinable()) {
      {
        Foreground lock(*this);
        ending_ = true;
      }
      wake_.notify_all();
      progress_.join();
    }
    Foreground lock(*this);
    for (Transfer& transfer : transfers_) Drain(transfer);
    if (abort_note_ != MPI_REQUEST_NULL) {
      MPI_Cancel(&abort_note_);
      MPI_Wait(&abort_note_, MPI_STATUS_IGNORE);
    }
    // A transfer may still be reading what a dead epoch left behind.
    if (dead_) new std::vector<std::byte>(std::move(scratch()));
  }

  absl::StatusOr<steady_clock::time_point> Finish(Ticket ticket, Deadline deadline) override {
    Foreground lock(*this);
    const auto number = static_cast<int64_t>(ticket);
    const auto found = std::find_if(transfers_.begin(), transfers_.end(),
                                    [&](const Transfer& t) { return t.taken && t.number == number; });
    LRMOE_CHECK(found != transfers_.end());
    Transfer& transfer = *found;
    transfer.call.deadline = deadline;
    if (!dead_ && AbortAsked()) Die(asked_reason_);
    absl::Status status = dead_ ? EpochIsDead(transfer.call, rank(), dead_reason_) : Wait(transfer);
    if (!status.ok()) {
      if (!dead_) Die(std::string(status.message()));
      Drain(transfer);
    }
    transfer.taken = false;
    LRMOE_RETURN_IF_ERROR(status);
    return transfer.done;
  }

  void Abort(absl::string_view reason) override {
    {
      std::lock_guard lock(abort_mutex_);
      if (abort_requested_.load()) return;
      abort_reason_ = absl::StrCat("rank ", rank(), " aborted: ", reason);
      abort_requested_.store(true);
    }
    // A running operation sees the request at its next poll, ends and lets go of the lock.
    Foreground lock(*this);
    if (!dead_) Die(abort_reason_);
  }

 private:
  struct Part {
    int32_t peer;
    bool receives;
    int64_t bytes;
  };
  // The messages of one exchange.
  struct Transfer {
    bool taken = false;  // from its start until it is finished
    int64_t number = 0;  // of the exchange: equal on all ranks
    Call call;
    Kind kind{};
    bool background = false;  // the progress thread polls it
    int open = 0;             // messages under way
    absl::Status status;      // the first error of a message
    steady_clock::time_point done;
    std::vector<MPI_Request> requests;
    std::vector<Part> parts;  // of the request with the same index
  };

  // shared_->mpi, before the progress thread.
  class Foreground {
   public:
    explicit Foreground(MpiTransport& transport) : transport_(transport) {
      ++transport_.in_foreground_;
      transport_.shared_->mpi.lock();
    }
    ~Foreground() {
      const bool wake = --transport_.in_foreground_ == 0 && transport_.HasBackgroundWork();
      transport_.shared_->mpi.unlock();
      if (wake) transport_.wake_.notify_all();
    }

   private:
    MpiTransport& transport_;
  };

  absl::StatusOr<Ticket> Start(const Call& call, const Messages& messages, bool waits) override {
    int64_t number = 0;
    {
      Foreground lock(*this);
      if (!dead_ && AbortAsked()) Die(asked_reason_);
      if (dead_) return EpochIsDead(call, rank(), dead_reason_);
      Transfer& transfer =
          *std::find_if(transfers_.begin(), transfers_.end(), [](const Transfer& t) { return !t.taken; });
      transfer.number = number = ++exchange_;
      transfer.call = call;
      transfer.kind = messages.kind;
      transfer.background = !waits && progress_.joinable();
      if (absl::Status status = Post(transfer, messages); !status.ok()) {
        Die(std::string(status.message()));
        Drain(transfer);
        return status;
      }
      transfer.taken = true;
    }
    if (messages.own_bytes > 0) std::memcpy(messages.own_to, messages.own_from, messages.own_bytes);
    return Ticket{number};
  }

  int num_started() const override {
    // Only the thread that calls the operations takes and gives back.
    return static_cast<int>(
        std::count_if(transfers_.begin(), transfers_.end(), [](const Transfer& t) { return t.taken; }));
  }

  // Calls MPI while the rank computes and something is under way.
  void Progress() {
    std::unique_lock lock(shared_->mpi);
    Backoff backoff;
    while (true) {
      wake_.wait(lock, [&] { return ending_ || (in_foreground_ == 0 && HasBackgroundWork()); });
      if (ending_) return;
      bool moved = false;
      for (Transfer& transfer : transfers_) moved |= transfer.background && Poll(transfer);
      lock.unlock();
      if (moved) backoff.Reset();
      backoff.Pause();
      lock.lock();
    }
  }

  // All below: with shared_->mpi held.

  bool HasBackgroundWork() const {
    return !dead_ && std::any_of(transfers_.begin(), transfers_.end(), [](const Transfer& t) {
      return t.taken && t.background && t.open > 0 && t.status.ok();
    });
  }

  absl::Status Post(Transfer& transfer, const Messages& messages) {
    const int tag =
        static_cast<int>(transfer.number % num_tags_) * kTagsPerExchange + static_cast<int>(messages.kind);
    transfer.requests.clear();
    transfer.parts.clear();
    transfer.status = absl::OkStatus();
    auto post = [&](int32_t peer, bool receives, int64_t total, auto&& start) {
      for (int64_t offset = 0;; offset += options_.max_message_bytes) {
        const int64_t bytes = std::min(options_.max_message_bytes, total - offset);
        MPI_Request request = MPI_REQUEST_NULL;
        const int code = start(offset, static_cast<int>(bytes), &request);
        if (code != MPI_SUCCESS) return PeerFailed(transfer, peer, code);
        transfer.requests.push_back(request);
        transfer.parts.push_back({peer, receives, bytes});
        if (offset + bytes >= total) return absl::OkStatus();
      }
    };
    for (const Receive& one : messages.receives) {
      LRMOE_RETURN_IF_ERROR(
          post(one.peer, true, one.bytes, [&](int64_t offset, int bytes, MPI_Request* request) {
            return MPI_Irecv(bytes ? one.to + offset : nullptr, bytes, MPI_BYTE, one.peer, tag, comm_,
                             request);
          }));
    }
    for (const DirectTransport::Send& one : messages.sends) {
      LRMOE_RETURN_IF_ERROR(
          post(one.peer, false, one.bytes, [&](int64_t offset, int bytes, MPI_Request* request) {
            return MPI_Isend(bytes ? one.from + offset : nullptr, bytes, MPI_BYTE, one.peer, tag, comm_,
                             request);
          }));
    }
    transfer.open = static_cast<int>(transfer.requests.size());
    transfer.done = steady_clock::now();
    return absl::OkStatus();
  }

  // Whether messages were done since the last time.
  bool Poll(Transfer& transfer) {
    if (transfer.open == 0 || !transfer.status.ok()) return false;
    const int count = static_cast<int>(transfer.requests.size());
    finished_.resize(count);
    statuses_.resize(count);
    int done = 0;
    const int code = MPI_Testsome(count, transfer.requests.data(), &done, finished_.data(), statuses_.data());
    if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) {
      transfer.status = PeerFailed(transfer, transfer.parts[0].peer, code);
      return false;
    }
    for (int i = 0; i < done; ++i)
      transfer.status.Update(
          CheckDone(transfer, transfer.parts[finished_[i]], statuses_[i], code == MPI_ERR_IN_STATUS));
    transfer.open -= done;
    if (transfer.open == 0) transfer.done = steady_clock::now();
    return done > 0;
  }

  absl::Status Wait(Transfer& transfer) {
    Backoff backoff;
    for (int poll = 1; transfer.open > 0; ++poll) {
      const bool moved = Poll(transfer);
      LRMOE_RETURN_IF_ERROR(transfer.status);
      if (moved) {
        backoff.Reset();
        continue;
      }
      // Asking costs as much as polling the messages, so less often; a request from this process at once.
      if ((poll % 8 == 0 || abort_requested_.load(std::memory_order_relaxed)) && AbortAsked()) {
        Die(asked_reason_);
        return EpochIsDead(transfer.call, rank(), dead_reason_);
      }
      if (poll % 64 == 0) LRMOE_RETURN_IF_ERROR(CheckKinds(transfer, poll / 64 % size()));
      if (steady_clock::now() >= transfer.call.deadline)
        return MissingRanks(transfer.call, rank(), Awaited(transfer));
      backoff.Pause();
    }
    return transfer.status;
  }

  absl::Status CheckDone(const Transfer& transfer, const Part& part, const MPI_Status& status,
                         bool has_code) const {
    int error_class = MPI_SUCCESS;
    if (has_code) MPI_Error_class(status.MPI_ERROR, &error_class);
    if (error_class != MPI_SUCCESS && error_class != MPI_ERR_TRUNCATE) {
      return PeerFailed(transfer, part.peer, status.MPI_ERROR);
    }
    if (!part.receives) return absl::OkStatus();
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    if (error_class == MPI_SUCCESS && bytes == part.bytes) return absl::OkStatus();
    const std::string sent = error_class == MPI_SUCCESS ? absl::StrCat(bytes) : "more";
    return absl::FailedPreconditionError(
        absl::StrCat(Where(transfer.call, rank()), ": ranks disagree about sizes: rank ", part.peer,
                     " sends ", sent, " bytes, rank ", rank(), " expects ", part.bytes));
  }

  // A waiting message of this exchange with another kind: its sender calls something else. Asks of one peer
  // per call, since a message of a later exchange hides those behind it.
  absl::Status CheckKinds(const Transfer& transfer, int32_t peer) const {
    int found = 0;
    MPI_Status status;
    if (MPI_Iprobe(peer, MPI_ANY_TAG, comm_, &found, &status) != MPI_SUCCESS || !found)
      return absl::OkStatus();
    const Kind theirs = static_cast<Kind>(status.MPI_TAG % kTagsPerExchange);
    if (status.MPI_TAG == kAbortTag || status.MPI_TAG / kTagsPerExchange != transfer.number % num_tags_ ||
        theirs == transfer.kind) {
      return absl::OkStatus();
    }
    return absl::FailedPreconditionError(absl::StrCat(Where(transfer.call, rank()), ": ranks disagree: rank ",
                                                      rank(), " calls ", Name(transfer.kind), ", rank ",
                                                      status.MPI_SOURCE, " calls ", Name(theirs)));
  }

  absl::Status PeerFailed(const Transfer& transfer, int32_t peer, int code) const {
    return absl::UnavailableError(
        absl::StrCat(Where(transfer.call, rank()), ": rank ", peer, ": ", MpiError(code)));
  }

  // Whom this rank waits for: those that owe data, or else those that have not taken theirs.
  std::vector<int32_t> Awaited(const Transfer& transfer) const {
    for (const bool receives : {true, false}) {
      std::set<int32_t> peers;
      for (size_t i = 0; i < transfer.requests.size(); ++i) {
        if (transfer.requests[i] != MPI_REQUEST_NULL && transfer.parts[i].receives == receives)
          peers.insert(transfer.parts[i].peer);
      }
      if (!peers.empty()) return {peers.begin(), peers.end()};
    }
    return {};
  }

  // True when this process or a peer has asked for the end; asked_reason_ is then set.
  bool AbortAsked() {
    if (abort_requested_.load()) {
      std::lock_guard lock(abort_mutex_);
      asked_reason_ = abort_reason_;
      return true;
    }
    int done = 0;
    MPI_Status status;
    if (abort_note_ == MPI_REQUEST_NULL || MPI_Test(&abort_note_, &done, &status) != MPI_SUCCESS || !done) {
      return false;
    }
    int length = 0;
    MPI_Get_count(&status, MPI_BYTE, &length);
    asked_reason_.assign(peer_reason_, length);
    asked_by_peer_ = true;
    return true;
  }

  // Ends the epoch here and tells the peers, unless one of them told us.
  void Die(const std::string& reason) {
    dead_ = true;
    dead_reason_ = reason;
    if (shared_->epochs == epoch_) shared_->newest_epoch_died = true;
    if (asked_by_peer_) return;
    // Small enough to leave at once; the text is never freed, should a peer be slow to take it.
    const auto* text = new std::string(dead_reason_.substr(0, kReasonBytes));
    for (int32_t i = 1; i < size(); ++i) {
      MPI_Request request = MPI_REQUEST_NULL;
      const int32_t peer = (rank() + i) % size();
      if (MPI_Isend(text->data(), static_cast<int>(text->size()), MPI_BYTE, peer, kAbortTag, comm_,
                    &request) != MPI_SUCCESS) {
        continue;
      }
      int done = 0;
      MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (!done) MPI_Request_free(&request);
    }
  }

  // Takes back the receives nobody has answered and lets those under way end.
  void Drain(Transfer& transfer) {
    const Deadline limit = After(kDrainLimit);
    for (size_t i = 0; i < transfer.requests.size(); ++i) {
      MPI_Request& request = transfer.requests[i];
      if (request == MPI_REQUEST_NULL) continue;
      if (transfer.parts[i].receives) MPI_Cancel(&request);
      int done = 0;
      while (MPI_Test(&request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done &&
             steady_clock::now() < limit) {
        sched_yield();
      }
      if (request != MPI_REQUEST_NULL) MPI_Request_free(&request);
    }
    transfer.requests.clear();
    transfer.open = 0;
  }

  const std::shared_ptr<MpiShared> shared_;
  const MPI_Comm comm_;
  const MpiOptions options_;
  const int64_t epoch_;
  int64_t num_tags_ = 1;  // after so many exchanges tags repeat

  std::mutex abort_mutex_;  // may be taken while holding shared_->mpi, never the other way round
  std::atomic<bool> abort_requested_{false};
  std::string abort_reason_;  // abort_mutex_

  std::thread progress_;
  std::condition_variable wake_;       // of the progress thread
  std::atomic<int> in_foreground_{0};  // who has shared_->mpi or waits for it, other than that thread

  // shared_->mpi:
  bool ending_ = false;
  int64_t exchange_ = 0;
  bool dead_ = false;
  std::string dead_reason_;
  bool asked_by_peer_ = false;
  std::string asked_reason_;
  MPI_Request abort_note_ = MPI_REQUEST_NULL;
  char peer_reason_[kReasonBytes];
  std::array<Transfer, kMaxStarted + 1> transfers_;  // one more for an operation that waits
  std::vector<int> finished_;
  std::vector<MPI_Status> statuses_;
};

}  // namespace

std::unique_ptr<Transport> CreateMpiTransport(std::shared_ptr<MpiShared> shared, MPI_Comm comm,
                                              const MpiPlace& place, const MpiOptions& options) {
  return std::make_unique<MpiTransport>(std::move(shared), comm, place, options);
}

}  // namespace lrmoe::transport
