#include "tools/bench/slow_transport.h"

#include <algorithm>
#include <thread>

#include "common/status_macros.h"

namespace lrmoe::bench {

absl::StatusOr<transport::Ticket> SlowTransport::StartAllToAllV(const transport::Call& call,
                                                                transport::SendParts send,
                                                                transport::RecvParts recv) {
  int64_t bytes = 0;
  for (int32_t r = 0; r < size(); ++r)
    if (r != rank()) bytes += static_cast<int64_t>(send[r].size());
  LRMOE_ASSIGN_OR_RETURN(const transport::Ticket ticket, inner_->StartAllToAllV(call, send, recv));
  const std::chrono::duration<double> time(static_cast<double>(bytes) / bytes_per_s_);
  free_ = std::max(free_, std::chrono::steady_clock::now()) +
          std::chrono::duration_cast<std::chrono::steady_clock::duration>(time);
  sent_[ticket] = free_;
  return ticket;
}

absl::StatusOr<std::chrono::steady_clock::time_point> SlowTransport::Finish(transport::Ticket ticket,
                                                                            Deadline deadline) {
  const TimePoint sent = sent_.extract(ticket).mapped();
  std::this_thread::sleep_until(sent);
  LRMOE_RETURN_IF_ERROR(inner_->Finish(ticket, deadline).status());
  return sent;
}

}  // namespace lrmoe::bench
