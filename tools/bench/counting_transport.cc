#include "tools/bench/counting_transport.h"

#include <utility>

namespace lrmoe::bench {

std::map<std::string, int64_t> CountingTransport::TakeSentBytes() {
  return std::exchange(sent_bytes_, {});
}

void CountingTransport::Count(const transport::Call& call, int64_t bytes) {
  sent_bytes_[std::string(call.operation.data(), call.operation.size())] += bytes;
}

absl::Status CountingTransport::AllToAllV(const transport::Call& call, std::span<const std::byte> send,
                                          std::span<const int64_t> send_bytes, std::span<std::byte> recv,
                                          std::span<const int64_t> recv_bytes) {
  for (int32_t peer = 0; peer < size(); ++peer)
    if (peer != rank()) Count(call, send_bytes[peer]);
  return inner_->AllToAllV(call, send, send_bytes, recv, recv_bytes);
}

absl::StatusOr<transport::Ticket> CountingTransport::StartAllToAllV(const transport::Call& call,
                                                                    transport::SendParts send,
                                                                    transport::RecvParts recv) {
  for (int32_t peer = 0; peer < size(); ++peer)
    if (peer != rank()) Count(call, static_cast<int64_t>(send[peer].size()));
  return inner_->StartAllToAllV(call, send, recv);
}

absl::Status CountingTransport::AllGather(const transport::Call& call, std::span<const std::byte> send,
                                          std::span<std::byte> recv) {
  CountToAll(call, send.size());
  return inner_->AllGather(call, send, recv);
}

absl::Status CountingTransport::AllReduce(const transport::Call& call, std::span<int64_t> values,
                                          transport::Reduction reduction) {
  CountToAll(call, values.size_bytes());
  return inner_->AllReduce(call, values, reduction);
}

absl::Status CountingTransport::AllReduce(const transport::Call& call, std::span<double> values,
                                          transport::Reduction reduction) {
  CountToAll(call, values.size_bytes());
  return inner_->AllReduce(call, values, reduction);
}

absl::Status CountingTransport::Broadcast(const transport::Call& call, int32_t root,
                                          std::span<std::byte> buffer) {
  if (rank() == root) CountToAll(call, buffer.size());
  return inner_->Broadcast(call, root, buffer);
}

}  // namespace lrmoe::bench
