// Rows in device memory: a transport whose small and host-side operations go one way, and whose exchanges
// between device buffers go another, which knows nothing but how to move bytes (NCCL).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/statusor.h"
#include "worker/transport/transport.h"

namespace lrmoe::transport {

class DeviceLink {
 public:
  virtual ~DeviceLink() = default;
  // Whether the memory at `pointer` is the device's, whose pending work is done before an exchange.
  virtual bool Holds(const void* pointer) const = 0;
  // As Transport::StartAllToAllV and Finish, between device buffers. Called by all ranks, which have agreed
  // on the sizes; errors are DeadlineExceeded and Unavailable, and end the epoch.
  virtual absl::StatusOr<Ticket> Start(const Call& call, SendParts send, RecvParts recv) = 0;
  virtual absl::StatusOr<std::chrono::steady_clock::time_point> Finish(Ticket ticket, Deadline deadline) = 0;
  // From any thread: a running exchange ends soon.
  virtual void Abort() = 0;
};

// `control` carries everything that lies in host memory, and before each all-to-all-v one all-gather of the
// sizes, for which a start waits: so every rank is known to be there and to agree before the link is used,
// and whoever is missing is named. All parts of an exchange lie in host memory or all on the device
// (InvalidArgument), on all ranks alike (FailedPrecondition); empty ones fit either. In the middle of an
// exchange over the link, a rank learns of a peer's end from the link or by the deadline.
std::unique_ptr<Transport> CreateLinkedTransport(std::unique_ptr<Transport> control,
                                                 std::unique_ptr<DeviceLink> link);

}  // namespace lrmoe::transport
