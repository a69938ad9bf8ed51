// The engine's way to the transport for one operation of one invocation: fills in names and deadlines, counts
// bytes that leave this rank, waits for the device, and keeps waiting for peers out of the processor time.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/ids.h"
#include "common/memory_model.h"
#include "kernels/kernels.h"
#include "worker/engine/buffers.h"
#include "worker/engine/phase_clock.h"
#include "worker/transport/transport.h"

namespace lrmoe::engine {

// Rows between all pairs of ranks, too many to stage at once: they travel in rounds through a small buffer.
struct StagedTransfer {
  std::vector<int64_t> send_units, recv_units;  // [G]
  int64_t max_units = 0;                        // of any (sender, receiver); equal on all ranks
  int64_t max_peers = 1;  // most receivers of one sender or senders of one receiver; equal on all ranks
  int64_t unit_bytes = 0;
};
// Copies units [first, first + count) for or from `peer`, count * unit_bytes bytes, in the staging arena's
// memory.
using FillUnits = std::function<void(int32_t peer, int64_t first, int64_t count, std::byte* out)>;
using TakeUnits = std::function<void(int32_t peer, int64_t first, int64_t count, const std::byte* in)>;

class Exchange;

// Rows on their way: from Start to Finish, the buffers are the transport's. One that is dropped before, after
// a failure, ends the epoch and waits until the buffers are free: declare it behind them.
class RowsUnderWay {
 public:
  RowsUnderWay() = default;
  RowsUnderWay(RowsUnderWay&& other) noexcept { *this = std::move(other); }
  RowsUnderWay& operator=(RowsUnderWay&& other) noexcept;
  ~RowsUnderWay();

 private:
  friend class Exchange;
  Exchange* exchange_ = nullptr;  // null: nothing is under way
  transport::Ticket ticket_{};
  absl::string_view operation_;
  std::chrono::steady_clock::time_point start_;
};

class Exchange {
 public:
  // All outlive the exchange. overlap: what is started goes on while the rank computes; else it is done when
  // Start returns.
  Exchange(transport::Transport* transport, const Invocation& invocation, std::chrono::milliseconds timeout,
           PhaseClock* clock, kernels::Device* device, bool overlap = false);

  int32_t rank() const { return transport_->rank(); }
  int32_t num_ranks() const { return transport_->size(); }

  // Buffers of every operation may lie in the device's memory, if the transport takes them from there; what
  // the device was told before is done when they are sent. send_rows[r] rows of row_bytes to each rank,
  // recv_rows[r] from each; buffers hold at least that much.
  absl::Status Rows(absl::string_view operation, std::span<const std::byte> send,
                    std::span<const int64_t> send_rows, std::span<std::byte> recv,
                    std::span<const int64_t> recv_rows, int64_t row_bytes);
  // The same, not waited for.
  absl::StatusOr<RowsUnderWay> StartRows(absl::string_view operation, std::span<const std::byte> send,
                                         std::span<const int64_t> send_rows, std::span<std::byte> recv,
                                         std::span<const int64_t> recv_rows, int64_t row_bytes);
  // Between parts that may lie anywhere, one for each rank.
  absl::StatusOr<RowsUnderWay> Start(absl::string_view operation, transport::SendParts send,
                                     transport::RecvParts recv);
  absl::Status Finish(RowsUnderWay& rows);
  absl::Status AllGather(absl::string_view operation, std::span<const std::byte> send,
                         std::span<std::byte> recv);

  // Stages at most kExchangeStagingBytes (or one unit per peer) in `arena`, each for sending and receiving.
  // Nothing happens when max_units is 0.
  absl::Status Staged(absl::string_view operation, const StagedTransfer& transfer, Arena& arena,
                      const FillUnits& fill, const TakeUnits& take);

  // Bytes sent to other ranks since the last call.
  int64_t TakeSentBytes();
  // By operation, in the order of their first.
  const std::vector<ExchangeTime>& times() const { return times_; }

 private:
  friend class RowsUnderWay;
  using TimePoint = std::chrono::steady_clock::time_point;
  void Record(absl::string_view operation, TimePoint start, TimePoint end, double waited_ms);
  // Runs one that waits to its end.
  template <typename Operation>
  absl::Status Wait(absl::string_view operation, const Operation& run);
  transport::Call MakeCall(absl::string_view operation) const;

  transport::Transport* transport_;
  Invocation invocation_;
  std::chrono::milliseconds timeout_;
  PhaseClock* clock_;
  kernels::Device* device_;
  bool overlap_;
  int64_t sent_bytes_ = 0;
  std::vector<ExchangeTime> times_;
};

}  // namespace lrmoe::engine
