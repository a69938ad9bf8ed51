// A transport that counts what leaves its rank, by operation name: what the engine says it sent is checked
// against this.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "worker/transport/transport.h"

namespace lrmoe::bench {

class CountingTransport : public transport::Transport {
 public:
  explicit CountingTransport(std::unique_ptr<transport::Transport> inner) : inner_(std::move(inner)) {}

  // Bytes sent to other ranks since the last call, by operation.
  std::map<std::string, int64_t> TakeSentBytes();

  int32_t rank() const override { return inner_->rank(); }
  int32_t size() const override { return inner_->size(); }
  absl::StatusOr<transport::Ticket> StartAllToAllV(const transport::Call& call, transport::SendParts send,
                                                   transport::RecvParts recv) override;
  absl::StatusOr<std::chrono::steady_clock::time_point> Finish(transport::Ticket ticket,
                                                               Deadline deadline) override {
    return inner_->Finish(ticket, deadline);
  }
  absl::Status AllToAllV(const transport::Call& call, std::span<const std::byte> send,
                         std::span<const int64_t> send_bytes, std::span<std::byte> recv,
                         std::span<const int64_t> recv_bytes) override;
  absl::Status AllGather(const transport::Call& call, std::span<const std::byte> send,
                         std::span<std::byte> recv) override;
  absl::Status AllReduce(const transport::Call& call, std::span<int64_t> values,
                         transport::Reduction reduction) override;
  absl::Status AllReduce(const transport::Call& call, std::span<double> values,
                         transport::Reduction reduction) override;
  absl::Status Broadcast(const transport::Call& call, int32_t root, std::span<std::byte> buffer) override;
  absl::Status Barrier(const transport::Call& call) override { return inner_->Barrier(call); }
  void Abort(absl::string_view reason) override { inner_->Abort(reason); }

 private:
  void Count(const transport::Call& call, int64_t bytes);
  // To every other rank.
  void CountToAll(const transport::Call& call, size_t bytes) {
    Count(call, static_cast<int64_t>(bytes) * (size() - 1));
  }

  const std::unique_ptr<transport::Transport> inner_;
  std::map<std::string, int64_t> sent_bytes_;
};

}  // namespace lrmoe::bench
