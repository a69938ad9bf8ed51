// The collective operations by one message to and from each peer, over whatever can send messages: what a
// backend writes is Start, Finish and Abort. One hop, and who is missing is known exactly; at the few hundred
// bytes and tens of ranks the small operations are used for, that beats trees. Large reductions go in slices.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "worker/transport/transport.h"

namespace lrmoe::transport {

class DirectTransport : public Transport {
 public:
  int32_t rank() const final { return rank_; }
  int32_t size() const final { return size_; }

  absl::Status AllToAllV(const Call& call, std::span<const std::byte> send,
                         std::span<const int64_t> send_bytes, std::span<std::byte> recv,
                         std::span<const int64_t> recv_bytes) final;
  absl::StatusOr<Ticket> StartAllToAllV(const Call& call, SendParts send, RecvParts recv) final;
  absl::Status AllGather(const Call& call, std::span<const std::byte> send, std::span<std::byte> recv) final;
  absl::Status AllReduce(const Call& call, std::span<int64_t> values, Reduction reduction) final;
  absl::Status AllReduce(const Call& call, std::span<double> values, Reduction reduction) final;
  absl::Status Broadcast(const Call& call, int32_t root, std::span<std::byte> buffer) final;
  absl::Status Barrier(const Call& call) final;

 protected:
  enum class Kind : int { kAllToAllV = 1, kAllGather, kReduceInt, kReduceDouble, kBroadcast, kBarrier };
  static absl::string_view Name(Kind kind);

  // Message sizes >= 0; peers are other ranks, each at most once per direction.
  struct Send {
    int32_t peer;
    const std::byte* from;
    int64_t bytes;
  };
  struct Receive {
    int32_t peer;
    std::byte* to;
    int64_t bytes;
  };
  struct Messages {
    Kind kind = Kind::kBarrier;
    std::vector<Send> sends;
    std::vector<Receive> receives;
    // The part that stays here, copied when the others are on their way.
    const std::byte* own_from = nullptr;
    std::byte* own_to = nullptr;
    int64_t own_bytes = 0;
  };

  DirectTransport(int32_t rank, int32_t size) : rank_(rank), size_(size) {}

  // Sends messages on their way, with errors of the contract. The backend's Finish waits for them. waits: it
  // is called next, so nobody else needs to see to them meanwhile.
  virtual absl::StatusOr<Ticket> Start(const Call& call, const Messages& messages, bool waits) = 0;
  virtual int num_started() const = 0;  // and not finished

  // For a backend whose epoch died: a transfer may still be reading what lies here.
  std::vector<std::byte>& scratch() { return scratch_; }

 private:
  // Returns when everything was received and the send buffers are free.
  absl::Status Exchange(const Call& call, const Messages& messages);
  void Clear(Kind kind);
  void SetParts(SendParts send, RecvParts recv);
  // To and from each peer one block; empty ones too: arrival is the message.
  void Gather(Kind kind, const std::byte* block, std::byte* blocks, int64_t bytes);
  template <typename T>
  absl::Status Reduce(const Call& call, Kind kind, std::span<T> values, Reduction reduction);

  const int32_t rank_;
  const int32_t size_;
  // Of the thread that calls the operations; members to be allocated once.
  Messages messages_;
  std::vector<std::span<const std::byte>> send_parts_;
  std::vector<std::span<std::byte>> recv_parts_;
  std::vector<std::byte> scratch_;
};

}  // namespace lrmoe::transport
