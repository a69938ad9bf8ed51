#include "worker/engine/exchange.h"

#include <algorithm>

#include "common/check.h"
#include "common/status_macros.h"
#include "worker/engine/routing.h"

namespace lrmoe::engine {
Exchange::Exchange(transport::Transport* transport, const Invocation& invocation,
                   std::chrono::milliseconds timeout, PhaseClock* clock, kernels::Device* device)
    : transport_(transport), invocation_(invocation), timeout_(timeout), clock_(clock), device_(device) {}

transport::Call Exchange::MakeCall(absl::string_view operation) const {
  return {operation, invocation_, After(timeout_)};
}

absl::Status Exchange::Rows(absl::string_view operation, std::span<const std::byte> send,
                            std::span<const int64_t> send_rows, std::span<std::byte> recv,
                            std::span<const int64_t> recv_rows, int64_t row_bytes) {
  const auto size = static_cast<size_t>(num_ranks());
  std::vector<int64_t> send_bytes(size), recv_bytes(size);
  for (size_t r = 0; r < size; ++r) {
    send_bytes[r] = send_rows[r] * row_bytes;
    recv_bytes[r] = recv_rows[r] * row_bytes;
  }
  const int64_t send_total = Sum(send_bytes), recv_total = Sum(recv_bytes);
  LRMOE_CHECK_LE(send_total, static_cast<int64_t>(send.size()));
  LRMOE_CHECK_LE(recv_total, static_cast<int64_t>(recv.size()));
  sent_bytes_ += send_total - send_bytes[rank()];
  LRMOE_RETURN_IF_ERROR(device_->Wait());
  clock_->Pause();
  absl::Status status = transport_->AllToAllV(MakeCall(operation), send.first(send_total), send_bytes,
                                              recv.first(recv_total), recv_bytes);
  clock_->Resume();
  return status;
}

absl::Status Exchange::AllGather(absl::string_view operation, std::span<const std::byte> send,
                                 std::span<std::byte> recv) {
  sent_bytes_ += static_cast<int64_t>(send.size()) * (num_ranks() - 1);
  LRMOE_RETURN_IF_ERROR(device_->Wait());
  clock_->Pause();
  absl::Status status = transport_->AllGather(MakeCall(operation), send, recv);
  clock_->Resume();
  return status;
}

absl::Status Exchange::Max(absl::string_view operation, std::span<int64_t> values) {
  sent_bytes_ += static_cast<int64_t>(values.size_bytes()) * (num_ranks() - 1);
  LRMOE_RETURN_IF_ERROR(device_->Wait());
  clock_->Pause();
  absl::Status status = transport_->AllReduce(MakeCall(operation), values, transport::Reduction::kMax);
  clock_->Resume();
  return status;
}

absl::Status Exchange::Staged(absl::string_view operation, const StagedTransfer& transfer, Arena& arena,
                              const FillUnits& fill, const TakeUnits& take) {
  if (transfer.max_units == 0) return absl::OkStatus();
  const int64_t chunk =
      std::min(transfer.max_units,
               std::max<int64_t>(1, kExchangeStagingBytes /
                                        (transfer.unit_bytes * std::max<int64_t>(1, transfer.max_peers))));
  const auto in_chunk = [&](int64_t units, int64_t first) {
    return std::clamp<int64_t>(units - first, 0, chunk);
  };
  const auto size = static_cast<size_t>(num_ranks());
  std::vector<int64_t> send_rows(size), recv_rows(size);
  for (int64_t first = 0; first < transfer.max_units; first += chunk) {
    for (size_t r = 0; r < size; ++r) {
      send_rows[r] = in_chunk(transfer.send_units[r], first);
      recv_rows[r] = in_chunk(transfer.recv_units[r], first);
    }
    LRMOE_ASSIGN_OR_RETURN(Buffer send, arena.Take(Sum(send_rows) * transfer.unit_bytes, "staging to send"));
    LRMOE_ASSIGN_OR_RETURN(Buffer recv,
                           arena.Take(Sum(recv_rows) * transfer.unit_bytes, "staging to receive"));
    std::byte* out = send.data();
    for (size_t r = 0; r < size; ++r) {
      if (send_rows[r] == 0) continue;
      fill(static_cast<int32_t>(r), first, send_rows[r], out);
      out += send_rows[r] * transfer.unit_bytes;
    }
    LRMOE_RETURN_IF_ERROR(
        Rows(operation, send.bytes(), send_rows, recv.bytes(), recv_rows, transfer.unit_bytes));
    const std::byte* in = recv.data();
    for (size_t r = 0; r < size; ++r) {
      if (recv_rows[r] == 0) continue;
      take(static_cast<int32_t>(r), first, recv_rows[r], in);
      in += recv_rows[r] * transfer.unit_bytes;
    }
  }
  return absl::OkStatus();
}

int64_t Exchange::TakeSentBytes() {
  return std::exchange(sent_bytes_, 0);
}

}  // namespace lrmoe::engine
