// Open MPI. The only files that include mpi.h are mpi.cc and mpi_transport.{h,cc}.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "worker/transport/transport.h"

namespace lrmoe::transport {

// Where this process stands among the ranks; from the launcher.
struct MpiPlace {
  int32_t rank = 0;
  int32_t size = 1;
  int32_t local_rank = 0;  // among the ranks of this host
  int32_t local_size = 1;
};

struct MpiOptions {
  // Larger parts travel as several messages; 1..2^30, equal on all ranks.
  int64_t max_message_bytes = int64_t{1} << 30;
  // MPI moves bytes only while somebody calls it. With this, a thread of the transport does so while
  // exchanges are started and not finished; it wants a core. Without, they move when an operation is called.
  bool progress_thread = false;
};

// Owns MPI_Init_thread .. MPI_Finalize; at most one per process. Destroy the transports first. When the
// newest epoch has died, the destructor leaves MPI unfinalized (finalizing waits for all ranks, without a
// deadline); mpirun then ends the job when the process exits. Threads: MPI runs with MPI_THREAD_SERIALIZED;
// all calls are serialised in here.
//
// Beyond the contract: a rank whose epoch dies tells its peers, who see it in the operation they run or the
// next one. A peer whose process died is noticed by mpirun, which ends the job, or by the deadline.
class MpiRuntime {
 public:
  virtual ~MpiRuntime() = default;
  virtual MpiPlace place() const = 0;
  // A new epoch, over a duplicate of MPI_COMM_WORLD. Collective; DeadlineExceeded when not all ranks call it
  // within a minute. After an epoch died, a transfer that was under way may still touch its buffers while a
  // later epoch runs: free them only when no other epoch follows, or after the next one was created.
  virtual absl::StatusOr<std::unique_ptr<Transport>> CreateTransport(const MpiOptions& options = {}) = 0;
  // Ends every process of the job at once with `exit_code`. For a dead epoch, when finalizing would hang.
  [[noreturn]] virtual void AbortJob(int exit_code) = 0;
};

// FailedPrecondition when MPI cannot start or lacks the thread support needed (MPI_THREAD_SERIALIZED).
absl::StatusOr<std::unique_ptr<MpiRuntime>> StartMpi();

}  // namespace lrmoe::transport
