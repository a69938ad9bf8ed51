// A base for transports around another one: everything goes to it, but for what the derived class overrides.
#pragma once

#include <memory>
#include <utility>

#include "worker/transport/transport.h"

namespace lrmoe::transport {

// AllToAllV is not forwarded: it is StartAllToAllV and Finish, which a derived class may override.
class ForwardingTransport : public Transport {
 public:
  explicit ForwardingTransport(std::unique_ptr<Transport> inner) : inner_(std::move(inner)) {}

  int32_t rank() const override { return inner_->rank(); }
  int32_t size() const override { return inner_->size(); }
  absl::StatusOr<Ticket> StartAllToAllV(const Call& call, SendParts send, RecvParts recv) override {
    return inner_->StartAllToAllV(call, send, recv);
  }
  absl::StatusOr<std::chrono::steady_clock::time_point> Finish(Ticket ticket, Deadline deadline) override {
    return inner_->Finish(ticket, deadline);
  }
  absl::Status AllGather(const Call& call, std::span<const std::byte> send,
                         std::span<std::byte> recv) override {
    return inner_->AllGather(call, send, recv);
  }
  absl::Status AllReduce(const Call& call, std::span<int64_t> values, Reduction reduction) override {
    return inner_->AllReduce(call, values, reduction);
  }
  absl::Status AllReduce(const Call& call, std::span<double> values, Reduction reduction) override {
    return inner_->AllReduce(call, values, reduction);
  }
  absl::Status Broadcast(const Call& call, int32_t root, std::span<std::byte> buffer) override {
    return inner_->Broadcast(call, root, buffer);
  }
  absl::Status Barrier(const Call& call) override { return inner_->Barrier(call); }
  void Abort(absl::string_view reason) override { inner_->Abort(reason); }

 protected:
  const std::unique_ptr<Transport> inner_;
};

}  // namespace lrmoe::transport
