#include "worker/engine/exchange.h"

#include <algorithm>

#include "common/check.h"
#include "common/status_macros.h"
#include "worker/engine/routing.h"

namespace lrmoe::engine {
namespace {

using std::chrono::steady_clock;

double Milliseconds(steady_clock::duration time) {
  return std::chrono::duration<double, std::milli>(time).count();
}

}  // namespace
Exchange::Exchange(transport::Transport* transport, const Invocation& invocation,
                   std::chrono::milliseconds timeout, PhaseClock* clock, kernels::Device* device,
                   bool overlap)
    : transport_(transport),
      invocation_(invocation),
      timeout_(timeout),
      clock_(clock),
      device_(device),
      overlap_(overlap) {}

RowsUnderWay& RowsUnderWay::operator=(RowsUnderWay&& other) noexcept {
  LRMOE_CHECK(exchange_ == nullptr);
  exchange_ = std::exchange(other.exchange_, nullptr);
  ticket_ = other.ticket_;
  operation_ = other.operation_;
  start_ = other.start_;
  return *this;
}

RowsUnderWay::~RowsUnderWay() {
  if (exchange_ == nullptr) return;
  exchange_->transport_->Abort(absl::StrCat(operation_, " was given up"));
  (void)exchange_->Finish(*this);
}

void Exchange::Record(absl::string_view operation, TimePoint start, TimePoint end, double waited_ms) {
  auto time = std::find_if(times_.begin(), times_.end(),
                           [&](const ExchangeTime& t) { return t.operation == operation; });
  if (time == times_.end()) time = times_.insert(time, {operation});
  start = std::max(start, time->end);  // what is under way at the same time counts once
  if (end > start) time->under_way_ms += Milliseconds(end - start);
  time->end = std::max(time->end, end);
  time->waited_ms += waited_ms;
}

template <typename Operation>
absl::Status Exchange::Wait(absl::string_view operation, const Operation& run) {
  LRMOE_RETURN_IF_ERROR(device_->Wait());
  clock_->Pause();
  const TimePoint start = steady_clock::now();
  absl::Status status = run();
  const TimePoint end = steady_clock::now();
  Record(operation, start, end, Milliseconds(end - start));
  clock_->Resume();
  return status;
}

transport::Call Exchange::MakeCall(absl::string_view operation) const {
  return {operation, invocation_, After(timeout_)};
}

absl::Status Exchange::Rows(absl::string_view operation, std::span<const std::byte> send,
                            std::span<const int64_t> send_rows, std::span<std::byte> recv,
                            std::span<const int64_t> recv_rows, int64_t row_bytes) {
  if (num_ranks() == 1)
    return StartRows(operation, send, send_rows, recv, recv_rows, row_bytes).status();  // is over at once
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
  return Wait(operation, [&] {
    return transport_->AllToAllV(MakeCall(operation), send.first(send_total), send_bytes,
                                 recv.first(recv_total), recv_bytes);
  });
}

absl::StatusOr<RowsUnderWay> Exchange::StartRows(absl::string_view operation, std::span<const std::byte> send,
                                                 std::span<const int64_t> send_rows,
                                                 std::span<std::byte> recv,
                                                 std::span<const int64_t> recv_rows, int64_t row_bytes) {
  std::vector<std::span<const std::byte>> send_parts;
  std::vector<std::span<std::byte>> recv_parts;
  for (int32_t r = 0; r < num_ranks(); ++r) {
    send_parts.push_back(send.first(send_rows[r] * row_bytes));
    send = send.subspan(send_rows[r] * row_bytes);
    recv_parts.push_back(recv.first(recv_rows[r] * row_bytes));
    recv = recv.subspan(recv_rows[r] * row_bytes);
  }
  return Start(operation, send_parts, recv_parts);
}

absl::StatusOr<RowsUnderWay> Exchange::Start(absl::string_view operation, transport::SendParts send,
                                             transport::RecvParts recv) {
  if (num_ranks() == 1) {  // the device's own business, in its order
    LRMOE_CHECK_EQ(send[0].size(), recv[0].size());
    device_->Copy(recv[0].data(), send[0].data(), static_cast<int64_t>(send[0].size()));
    return RowsUnderWay();
  }
  for (int32_t r = 0; r < num_ranks(); ++r)
    if (r != rank()) sent_bytes_ += static_cast<int64_t>(send[r].size());
  LRMOE_RETURN_IF_ERROR(device_->Wait());
  clock_->Pause();
  RowsUnderWay rows;
  rows.operation_ = operation;
  rows.start_ = steady_clock::now();
  absl::StatusOr<transport::Ticket> ticket = transport_->StartAllToAllV(MakeCall(operation), send, recv);
  Record(operation, rows.start_, {}, Milliseconds(steady_clock::now() - rows.start_));
  clock_->Resume();
  LRMOE_RETURN_IF_ERROR(ticket.status());
  rows.ticket_ = *ticket;
  rows.exchange_ = this;
  if (!overlap_) LRMOE_RETURN_IF_ERROR(Finish(rows));
  return rows;
}

absl::Status Exchange::Finish(RowsUnderWay& rows) {
  if (rows.exchange_ == nullptr) return absl::OkStatus();
  rows.exchange_ = nullptr;
  clock_->Pause();
  const TimePoint asked = steady_clock::now();
  const absl::StatusOr<TimePoint> done = transport_->Finish(rows.ticket_, After(timeout_));
  const TimePoint now = steady_clock::now();
  Record(rows.operation_, rows.start_, done.ok() ? *done : now, Milliseconds(now - asked));
  clock_->Resume();
  return done.status();
}

absl::Status Exchange::AllGather(absl::string_view operation, std::span<const std::byte> send,
                                 std::span<std::byte> recv) {
  sent_bytes_ += static_cast<int64_t>(send.size()) * (num_ranks() - 1);
  return Wait(operation, [&] { return transport_->AllGather(MakeCall(operation), send, recv); });
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
