// Open MPI. The only file that includes mpi.h is mpi.cc.
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

// Owns MPI_Init_thread .. MPI_Finalize; at most one per process. Destroy the transports first.
class MpiRuntime {
 public:
  virtual ~MpiRuntime() = default;
  virtual MpiPlace place() const = 0;
  // Over a duplicate of MPI_COMM_WORLD. Collective.
  virtual absl::StatusOr<std::unique_ptr<Transport>> CreateTransport() = 0;
  // Ends every process of the job at once with `exit_code`. For a dead epoch, when finalizing would hang.
  [[noreturn]] virtual void AbortJob(int exit_code) = 0;
};

// FailedPrecondition when MPI cannot start or lacks the thread support needed (MPI_THREAD_SERIALIZED).
absl::StatusOr<std::unique_ptr<MpiRuntime>> StartMpi();

}  // namespace lrmoe::transport
