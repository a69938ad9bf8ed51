// A transport whose rank sends over a link of limited speed, in real time: what an exchange costs where the
// network is slower than this machine's memory. A model of one link per rank, without latency: an exchange
// ends when the rank's own bytes are out; waiting for peers comes on top.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>

#include "worker/transport/forwarding.h"

namespace lrmoe::bench {

// Small exchanges are carried at once.
class SlowTransport : public transport::ForwardingTransport {
 public:
  SlowTransport(std::unique_ptr<transport::Transport> inner, double bytes_per_s)
      : ForwardingTransport(std::move(inner)), bytes_per_s_(bytes_per_s) {}

  absl::StatusOr<transport::Ticket> StartAllToAllV(const transport::Call& call, transport::SendParts send,
                                                   transport::RecvParts recv) override;
  absl::StatusOr<std::chrono::steady_clock::time_point> Finish(transport::Ticket ticket,
                                                               Deadline deadline) override;

 private:
  using TimePoint = std::chrono::steady_clock::time_point;

  const double bytes_per_s_;
  TimePoint free_{};                             // when the link has sent all it was given
  std::map<transport::Ticket, TimePoint> sent_;  // when the bytes of what was started are out
};

}  // namespace lrmoe::bench
