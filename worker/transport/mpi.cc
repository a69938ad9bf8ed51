#include "worker/transport/mpi.h"

#include <mpi.h>

#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "worker/transport/mpi_transport.h"

namespace lrmoe::transport {
namespace {

using std::chrono::steady_clock;

constexpr auto kCreationLimit = std::chrono::seconds(60);

class MpiRuntimeImpl : public MpiRuntime {
 public:
  explicit MpiRuntimeImpl(const MpiPlace& place) : place_(place) {}
  ~MpiRuntimeImpl() override {
    std::lock_guard lock(shared_->mpi);
    if (!shared_->newest_epoch_died) MPI_Finalize();
  }

  MpiPlace place() const override { return place_; }

  absl::StatusOr<std::unique_ptr<Transport>> CreateTransport(const MpiOptions& options) override {
    LRMOE_CHECK_GE(options.max_message_bytes, 1);
    LRMOE_CHECK_LE(options.max_message_bytes, int64_t{1} << 30);
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
    return CreateMpiTransport(shared_, comm, place_, options);
  }

  void AbortJob(int exit_code) override {
    MPI_Abort(MPI_COMM_WORLD, exit_code);
    std::_Exit(exit_code);
  }

 private:
  const MpiPlace place_;
  const std::shared_ptr<MpiShared> shared_ = std::make_shared<MpiShared>();
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
