// A transport whose rank sends over a link of limited speed, in real time: what an exchange costs where the
// network is slower than this machine's memory. A model of one link per rank, without latency: an exchange
// ends when the rank's own bytes are out; waiting for peers comes on top.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>

#include "worker/transport/transport.h"

namespace lrmoe::bench {

class SlowTransport : public transport::Transport {
 public:
  SlowTransport(std::unique_ptr<transport::Transport> inner, double bytes_per_s)
      : inner_(std::move(inner)), bytes_per_s_(bytes_per_s) {}

  int32_t rank() const override { return inner_->rank(); }
  int32_t size() const override { return inner_->size(); }
  absl::StatusOr<transport::Ticket> StartAllToAllV(const transport::Call& call, transport::SendParts send,
                                                   transport::RecvParts recv) override;
  absl::StatusOr<std::chrono::steady_clock::time_point> Finish(transport::Ticket ticket,
                                                               Deadline deadline) override;
  // The small ones are carried at once.
  absl::Status AllGather(const transport::Call& call, std::span<const std::byte> send,
                         std::span<std::byte> recv) override {
    return inner_->AllGather(call, send, recv);
  }
  absl::Status AllReduce(const transport::Call& call, std::span<int64_t> values,
                         transport::Reduction reduction) override {
    return inner_->AllReduce(call, values, reduction);
  }
  absl::Status AllReduce(const transport::Call& call, std::span<double> values,
                         transport::Reduction reduction) override {
    return inner_->AllReduce(call, values, reduction);
  }
  absl::Status Broadcast(const transport::Call& call, int32_t root, std::span<std::byte> buffer) override {
    return inner_->Broadcast(call, root, buffer);
  }
  absl::Status Barrier(const transport::Call& call) override { return inner_->Barrier(call); }
  void Abort(absl::string_view reason) override { inner_->Abort(reason); }

 private:
  using TimePoint = std::chrono::steady_clock::time_point;

  const std::unique_ptr<transport::Transport> inner_;
  const double bytes_per_s_;
  TimePoint free_{};                             // when the link has sent all it was given
  std::map<transport::Ticket, TimePoint> sent_;  // when the bytes of what was started are out
};

}  // namespace lrmoe::bench
