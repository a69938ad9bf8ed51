// A transport that counts what leaves its rank, by operation name: what the engine says it sent is checked
// against this.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "worker/transport/forwarding.h"

namespace lrmoe::bench {

class CountingTransport : public transport::ForwardingTransport {
 public:
  explicit CountingTransport(std::unique_ptr<transport::Transport> inner)
      : ForwardingTransport(std::move(inner)) {}

  // Bytes sent to other ranks since the last call, by operation.
  std::map<std::string, int64_t> TakeSentBytes();

  absl::StatusOr<transport::Ticket> StartAllToAllV(const transport::Call& call, transport::SendParts send,
                                                   transport::RecvParts recv) override;
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

 private:
  void Count(const transport::Call& call, int64_t bytes);
  // To every other rank.
  void CountToAll(const transport::Call& call, size_t bytes) {
    Count(call, static_cast<int64_t>(bytes) * (size() - 1));
  }

  std::map<std::string, int64_t> sent_bytes_;
};

}  // namespace lrmoe::bench
