#include "worker/transport/mpi.h"

#include <mpi.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status_macros.h"
#include "worker/transport/contract.h"
#include "worker/transport/direct.h"

namespace lrmoe::transport {
namespace {

using std::chrono::steady_clock;

// Tags: 0 carries the reason of an abort; exchange number n of kind k has tag (n mod exchanges) * 8 + k.
constexpr int kAbortTag = 0;
constexpr int kTagsPerExchange = 8;
constexpr int kReasonBytes = 1024;

constexpr auto kCreationLimit = std::chrono::seconds(60);
// After an exchange failed, how long matched but unfinished receives may go on.
constexpr auto kDrainLimit = std::chrono::milliseconds(100);

std::string MpiError(int code) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) return absl::StrCat("MPI error ", code);
  return std::string(text, length);
}

// What to do between two polls. A reply within microseconds is met by spinning; then the processor goes to
// whoever wants it (ranks may outnumber cores); after 2 ms the peer is busy with something long, and sleeping
// 50 us costs little of what is being waited for.
class Backoff {
 public:
  void Pause() {
    if (++polls_ <= kSpins) return;
    if (polls_ == kSpins + 1) since_ = steady_clock::now();
    if (polls_ % 16 == 0 && steady_clock::now() - since_ > std::chrono::milliseconds(2)) sleeping_ = true;
    if (!sleeping_) {
      sched_yield();
      return;
    }
    const timespec nap{0, 50'000};
    nanosleep(&nap, nullptr);
  }
  void Reset() {
    polls_ = 0;
    sleeping_ = false;
  }

 private:
  static constexpr int64_t kSpins = 32;
  int64_t polls_ = 0;
  bool sleeping_ = false;
  steady_clock::time_point since_;
};

// Shared by the runtime and its transports.
struct Shared {
  std::mutex mpi;                  // held around every MPI call
  int64_t epochs = 0;              // mpi: transports created
  bool newest_epoch_died = false;  // mpi
};

class MpiTransport : public DirectTransport {
 public:
  MpiTransport(std::shared_ptr<Shared> shared, MPI_Comm comm, const MpiPlace& place,
               int64_t max_message_bytes)
      : DirectTransport(place.rank, place.size),
        shared_(std::move(shared)),
        comm_(comm),
        max_message_bytes_(max_message_bytes),
        epoch_(shared_->epochs) {
    int* upper = nullptr;
    int found = 0;
    MPI_Comm_get_attr(comm_, MPI_TAG_UB, &upper, &found);
    num_tags_ = (found ? *upper : 32767) / kTagsPerExchange;
    MPI_Irecv(peer_reason_, kReasonBytes, MPI_BYTE, MPI_ANY_SOURCE, kAbortTag, comm_, &abort_note_);
  }

  // MPI_Comm_free is collective and has no deadline, so the communicator lives until MPI_Finalize.
  ~MpiTransport() override {
    std::lock_guard lock(shared_->mpi);
    if (abort_note_ != MPI_REQUEST_NULL) {
      MPI_Cancel(&abort_note_);
      MPI_Wait(&abort_note_, MPI_STATUS_IGNORE);
    }
    // A transfer may still be reading what a dead epoch left behind.
    if (dead_) new std::vector<std::byte>(std::move(scratch()));
  }

  void Abort(absl::string_view reason) override {
    {
      std::lock_guard lock(abort_mutex_);
      if (abort_requested_.load()) return;
      abort_reason_ = absl::StrCat("rank ", rank(), " aborted: ", reason);
      abort_requested_.store(true);
    }
    // A running operation sees the request at its next poll, ends and lets go of the lock.
    std::lock_guard lock(shared_->mpi);
    if (!dead_) Die(abort_reason_);
  }

 private:
  struct Part {
    int32_t peer;
    bool receives;
    int64_t bytes;
  };

  absl::Status Exchange(const Call& call, const Messages& messages) override {
    std::lock_guard lock(shared_->mpi);
    if (!dead_ && AbortAsked()) Die(asked_reason_);
    if (dead_) return EpochIsDead(call, rank(), dead_reason_);
    ++exchange_;
    absl::Status status = Post(call, messages);
    if (status.ok()) {
      if (messages.own_bytes > 0) std::memcpy(messages.own_to, messages.own_from, messages.own_bytes);
      status = Finish(call, messages.kind);
    }
    if (!status.ok()) {
      if (!dead_) Die(std::string(status.message()));
      Drain();
    }
    return status;
  }

  // All below: with shared_->mpi held.

  absl::Status Post(const Call& call, const Messages& messages) {
    const int tag =
        static_cast<int>(exchange_ % num_tags_) * kTagsPerExchange + static_cast<int>(messages.kind);
    requests_.clear();
    parts_.clear();
    auto post = [&](int32_t peer, bool receives, int64_t total, auto&& start) {
      for (int64_t offset = 0;; offset += max_message_bytes_) {
        const int64_t bytes = std::min(max_message_bytes_, total - offset);
        MPI_Request request = MPI_REQUEST_NULL;
        const int code = start(offset, static_cast<int>(bytes), &request);
        if (code != MPI_SUCCESS) return PeerFailed(call, peer, code);
        requests_.push_back(request);
        parts_.push_back({peer, receives, bytes});
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
    for (const Send& one : messages.sends) {
      LRMOE_RETURN_IF_ERROR(
          post(one.peer, false, one.bytes, [&](int64_t offset, int bytes, MPI_Request* request) {
            return MPI_Isend(bytes ? one.from + offset : nullptr, bytes, MPI_BYTE, one.peer, tag, comm_,
                             request);
          }));
    }
    return absl::OkStatus();
  }

  absl::Status Finish(const Call& call, Kind kind) {
    const int count = static_cast<int>(requests_.size());
    finished_.resize(count);
    statuses_.resize(count);
    Backoff backoff;
    for (int pending = count, poll = 1; pending > 0; ++poll) {
      int done = 0;
      const int code = MPI_Testsome(count, requests_.data(), &done, finished_.data(), statuses_.data());
      if (code != MPI_SUCCESS && code != MPI_ERR_IN_STATUS) return PeerFailed(call, parts_[0].peer, code);
      for (int i = 0; i < done; ++i) {
        LRMOE_RETURN_IF_ERROR(CheckDone(call, parts_[finished_[i]], statuses_[i], code == MPI_ERR_IN_STATUS));
      }
      pending -= done;
      if (done > 0) {
        backoff.Reset();
        continue;
      }
      // Asking costs as much as polling the messages, so less often; a request from this process at once.
      if ((poll % 8 == 0 || abort_requested_.load(std::memory_order_relaxed)) && AbortAsked()) {
        Die(asked_reason_);
        return EpochIsDead(call, rank(), dead_reason_);
      }
      if (poll % 64 == 0) LRMOE_RETURN_IF_ERROR(CheckKinds(call, kind, poll / 64 % size()));
      if (steady_clock::now() >= call.deadline) return MissingRanks(call, rank(), Awaited());
      backoff.Pause();
    }
    return absl::OkStatus();
  }

  absl::Status CheckDone(const Call& call, const Part& part, const MPI_Status& status, bool has_code) const {
    int error_class = MPI_SUCCESS;
    if (has_code) MPI_Error_class(status.MPI_ERROR, &error_class);
    if (error_class != MPI_SUCCESS && error_class != MPI_ERR_TRUNCATE) {
      return PeerFailed(call, part.peer, status.MPI_ERROR);
    }
    if (!part.receives) return absl::OkStatus();
    int bytes = 0;
    MPI_Get_count(&status, MPI_BYTE, &bytes);
    if (error_class == MPI_SUCCESS && bytes == part.bytes) return absl::OkStatus();
    const std::string sent = error_class == MPI_SUCCESS ? absl::StrCat(bytes) : "more";
    return absl::FailedPreconditionError(
        absl::StrCat(Where(call, rank()), ": ranks disagree about sizes: rank ", part.peer, " sends ", sent,
                     " bytes, rank ", rank(), " expects ", part.bytes));
  }

  // A waiting message of this exchange with another kind: its sender calls something else. Asks of one peer
  // per call, since a message of a later exchange hides those behind it.
  absl::Status CheckKinds(const Call& call, Kind kind, int32_t peer) const {
    int found = 0;
    MPI_Status status;
    if (MPI_Iprobe(peer, MPI_ANY_TAG, comm_, &found, &status) != MPI_SUCCESS || !found)
      return absl::OkStatus();
    const Kind theirs = static_cast<Kind>(status.MPI_TAG % kTagsPerExchange);
    if (status.MPI_TAG == kAbortTag || status.MPI_TAG / kTagsPerExchange != exchange_ % num_tags_ ||
        theirs == kind) {
      return absl::OkStatus();
    }
    return absl::FailedPreconditionError(absl::StrCat(Where(call, rank()), ": ranks disagree: rank ", rank(),
                                                      " calls ", Name(kind), ", rank ", status.MPI_SOURCE,
                                                      " calls ", Name(theirs)));
  }

  absl::Status PeerFailed(const Call& call, int32_t peer, int code) const {
    return absl::UnavailableError(absl::StrCat(Where(call, rank()), ": rank ", peer, ": ", MpiError(code)));
  }

  // Whom this rank waits for: those that owe data, or else those that have not taken theirs.
  std::vector<int32_t> Awaited() const {
    for (const bool receives : {true, false}) {
      std::set<int32_t> peers;
      for (size_t i = 0; i < requests_.size(); ++i) {
        if (requests_[i] != MPI_REQUEST_NULL && parts_[i].receives == receives) peers.insert(parts_[i].peer);
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
  void Drain() {
    const Deadline limit = After(kDrainLimit);
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == MPI_REQUEST_NULL) continue;
      if (parts_[i].receives) MPI_Cancel(&requests_[i]);
      int done = 0;
      while (MPI_Test(&requests_[i], &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done &&
             steady_clock::now() < limit) {
        sched_yield();
      }
      if (requests_[i] != MPI_REQUEST_NULL) MPI_Request_free(&requests_[i]);
    }
    requests_.clear();
  }

  const std::shared_ptr<Shared> shared_;
  const MPI_Comm comm_;
  const int64_t max_message_bytes_;
  const int64_t epoch_;
  int64_t num_tags_ = 1;  // after so many exchanges tags repeat

  std::mutex abort_mutex_;  // may be taken while holding shared_->mpi, never the other way round
  std::atomic<bool> abort_requested_{false};
  std::string abort_reason_;  // abort_mutex_

  // shared_->mpi:
  int64_t exchange_ = 0;
  bool dead_ = false;
  std::string dead_reason_;
  bool asked_by_peer_ = false;
  std::string asked_reason_;
  MPI_Request abort_note_ = MPI_REQUEST_NULL;
  char peer_reason_[kReasonBytes];
  std::vector<MPI_Request> requests_;
  std::vector<Part> parts_;  // of the request with the same index
  std::vector<int> finished_;
  std::vector<MPI_Status> statuses_;
};

class MpiRuntimeImpl : public MpiRuntime {
 public:
  explicit MpiRuntimeImpl(const MpiPlace& place) : place_(place) {}
  ~MpiRuntimeImpl() override {
    std::lock_guard lock(shared_->mpi);
    if (!shared_->newest_epoch_died) MPI_Finalize();
  }

  MpiPlace place() const override { return place_; }

  absl::StatusOr<std::unique_ptr<Transport>> CreateTransport(int64_t max_message_bytes) override {
    LRMOE_CHECK_GE(max_message_bytes, 1);
    LRMOE_CHECK_LE(max_message_bytes, int64_t{1} << 30);
    std::lock_guard lock(shared_->mpi);
    ++shared_->epochs;
    shared_->newest_epoch_died = true;  // until it is known to live
    MPI_Comm comm = MPI_COMM_NULL;
    MPI_Request request = MPI_REQUEST_NULL;
    int code = MPI_Comm_idup(MPI_COMM_WORLD, &comm, &request);
    const Deadline deadline = After(kCreationLimit);
    Backoff backoff;
    for (int done = 0; code == MPI_SUCCESS && !done;) {
      code = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (done) break;
      if (steady_clock::now() >= deadline) {
        return absl::DeadlineExceededError(
            absl::StrCat("rank ", place_.rank, ", new epoch: not all ranks asked for it within 60 s"));
      }
      backoff.Pause();
    }
    if (code != MPI_SUCCESS) {
      return absl::UnavailableError(absl::StrCat("rank ", place_.rank, ", new epoch: ", MpiError(code)));
    }
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    shared_->newest_epoch_died = false;
    return std::make_unique<MpiTransport>(shared_, comm, place_, max_message_bytes);
  }

  void AbortJob(int exit_code) override {
    MPI_Abort(MPI_COMM_WORLD, exit_code);
    std::_Exit(exit_code);
  }

 private:
  const MpiPlace place_;
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

}  // namespace

absl::StatusOr<std::unique_ptr<MpiRuntime>> StartMpi() {
  int started = 0;
  MPI_Initialized(&started);
  if (started)
    return absl::FailedPreconditionError("MPI was started before in this process; it can be started once");
  int provided = MPI_THREAD_SINGLE;
  if (const int code = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided);
      code != MPI_SUCCESS) {
    return absl::FailedPreconditionError(absl::StrCat("MPI_Init_thread: ", MpiError(code)));
  }
  MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  if (provided < MPI_THREAD_SERIALIZED) {
    MPI_Finalize();
    return absl::FailedPreconditionError(absl::StrCat("MPI provides thread level ", provided, ", need ",
                                                      int{MPI_THREAD_SERIALIZED},
                                                      " (MPI_THREAD_SERIALIZED)"));
  }
  MpiPlace place;
  MPI_Comm_rank(MPI_COMM_WORLD, &place.rank);
  MPI_Comm_size(MPI_COMM_WORLD, &place.size);
  MPI_Comm host = MPI_COMM_NULL;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
  MPI_Comm_rank(host, &place.local_rank);
  MPI_Comm_size(host, &place.local_size);
  MPI_Comm_free(&host);
  return std::make_unique<MpiRuntimeImpl>(place);
}

}  // namespace lrmoe::transport
