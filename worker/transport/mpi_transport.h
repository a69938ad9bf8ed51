// The transport of one epoch over Open MPI, and what it shares with the runtime. Part of mpi.cc; mpi.h is the
// interface.
#pragma once

#include <mpi.h>
#include <sched.h>
#include <time.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "worker/transport/mpi.h"
#include "worker/transport/transport.h"

namespace lrmoe::transport {

std::string MpiError(int code);

// What to do between two polls. A reply within microseconds is met by spinning; then the processor goes to
// whoever wants it (ranks may outnumber cores); after 2 ms the peer is busy with something long, and sleeping
// 50 us costs little of what is being waited for.
class Backoff {
 public:
  void Pause() {
    if (++polls_ <= kSpins) return;
    if (polls_ == kSpins + 1) since_ = std::chrono::steady_clock::now();
    if (polls_ % 16 == 0 && std::chrono::steady_clock::now() - since_ > std::chrono::milliseconds(2))
      sleeping_ = true;
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
  std::chrono::steady_clock::time_point since_;
};

// Shared by the runtime and its transports.
struct MpiShared {
  std::mutex mpi;                  // held around every MPI call
  int64_t epochs = 0;              // mpi: transports created
  bool newest_epoch_died = false;  // mpi
};

// Over a communicator of its own. Called with shared->mpi held.
std::unique_ptr<Transport> CreateMpiTransport(std::shared_ptr<MpiShared> shared, MPI_Comm comm,
                                              const MpiPlace& place, const MpiOptions& options);

}  // namespace lrmoe::transport
