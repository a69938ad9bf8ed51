// NCCL. The only file that includes nccl.h is nccl.cc. One device per rank: NCCL refuses two ranks on one;
// several logical ranks on one device use inproc with a copy of its own (inproc.h).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "worker/transport/transport.h"

namespace lrmoe::transport {

struct NcclOptions {
  int32_t device = 0;  // ordinal; one of its own for each rank
  std::chrono::milliseconds start_timeout{60000};
  // Sends what lies in host memory over NCCL too, through the device: for tests of NCCL itself.
  bool stage_host_buffers = false;
};

// A communicator of all ranks of `control`, whose id rank 0 makes and `control` brings to the others; then
// the two as one transport (device_link.h). Collective. NCCL does not block: the deadline holds while it
// starts, too. FailedPrecondition naming NCCL's reason (too old, two ranks on one device, no way between two
// ranks); DeadlineExceeded when not all ranks come.
absl::StatusOr<std::unique_ptr<Transport>> CreateNcclTransport(std::unique_ptr<Transport> control,
                                                               const NcclOptions& options);

}  // namespace lrmoe::transport
