#include "worker/transport/direct.h"

#include <cstring>

#include "common/status_macros.h"
#include "worker/transport/contract.h"

namespace lrmoe::transport {
namespace {

// Reductions up to this size cross the network once (everybody gets everything), larger ones twice, in
// slices.
constexpr int64_t kDirectReductionBytes = 64 << 10;

}  // namespace

absl::string_view DirectTransport::Name(Kind kind) {
  switch (kind) {
    case Kind::kAllToAllV:
      return "AllToAllV";
    case Kind::kAllGather:
      return "AllGather";
    case Kind::kReduceInt:
      return "AllReduce of int64";
    case Kind::kReduceDouble:
      return "AllReduce of double";
    case Kind::kBroadcast:
      return "Broadcast";
    case Kind::kBarrier:
      return "Barrier";
  }
  return "an unknown operation";
}

void DirectTransport::Clear(Kind kind) {
  messages_.kind = kind;
  messages_.sends.clear();
  messages_.receives.clear();
  messages_.own_from = nullptr;
  messages_.own_to = nullptr;
  messages_.own_bytes = 0;
}

void DirectTransport::Gather(Kind kind, const std::byte* block, std::byte* blocks, int64_t bytes) {
  Clear(kind);
  // Beginning behind this rank: not everybody sends to rank 0 first.
  for (int32_t i = 1; i < size_; ++i) {
    const int32_t peer = (rank_ + i) % size_;
    messages_.sends.push_back({peer, block, bytes});
    messages_.receives.push_back({peer, bytes ? blocks + peer * bytes : nullptr, bytes});
  }
  if (bytes == 0) return;
  messages_.own_from = block;
  messages_.own_to = blocks + rank_ * bytes;
  messages_.own_bytes = bytes;
}

absl::Status DirectTransport::Exchange(const Call& call, const Messages& messages) {
  LRMOE_ASSIGN_OR_RETURN(const Ticket ticket, Start(call, messages, true));
  return Finish(ticket, call.deadline).status();
}

void DirectTransport::SetParts(SendParts send, RecvParts recv) {
  Clear(Kind::kAllToAllV);
  for (int32_t peer = 0; peer < size_; ++peer) {
    const auto sent = static_cast<int64_t>(send[peer].size());
    const auto received = static_cast<int64_t>(recv[peer].size());
    if (peer == rank_) {
      messages_.own_from = send[peer].data();
      messages_.own_to = recv[peer].data();
      messages_.own_bytes = sent;
    } else {
      // Nothing is sent for nothing: both sides know the sizes.
      if (sent > 0) messages_.sends.push_back({peer, send[peer].data(), sent});
      if (received > 0) messages_.receives.push_back({peer, recv[peer].data(), received});
    }
  }
}

absl::Status DirectTransport::AllToAllV(const Call& call, std::span<const std::byte> send,
                                        std::span<const int64_t> send_bytes, std::span<std::byte> recv,
                                        std::span<const int64_t> recv_bytes) {
  LRMOE_RETURN_IF_ERROR(CheckAllToAllV(call, rank_, size_, send, send_bytes, recv, recv_bytes));
  Split(send, send_bytes, send_parts_);
  Split(recv, recv_bytes, recv_parts_);
  SetParts(send_parts_, recv_parts_);
  return Exchange(call, messages_);
}

absl::StatusOr<Ticket> DirectTransport::StartAllToAllV(const Call& call, SendParts send, RecvParts recv) {
  LRMOE_RETURN_IF_ERROR(CheckStart(call, rank_, size_, send, recv, num_started()));
  SetParts(send, recv);
  return Start(call, messages_, false);
}

absl::Status DirectTransport::AllGather(const Call& call, std::span<const std::byte> send,
                                        std::span<std::byte> recv) {
  LRMOE_RETURN_IF_ERROR(CheckAllGather(call, rank_, size_, send.size(), recv.size()));
  Gather(Kind::kAllGather, send.data(), recv.data(), static_cast<int64_t>(send.size()));
  return Exchange(call, messages_);
}

absl::Status DirectTransport::AllReduce(const Call& call, std::span<int64_t> values, Reduction reduction) {
  return Reduce(call, Kind::kReduceInt, values, reduction);
}

absl::Status DirectTransport::AllReduce(const Call& call, std::span<double> values, Reduction reduction) {
  return Reduce(call, Kind::kReduceDouble, values, reduction);
}

template <typename T>
absl::Status DirectTransport::Reduce(const Call& call, Kind kind, std::span<T> values, Reduction reduction) {
  const int64_t n = static_cast<int64_t>(values.size());
  const bool direct = static_cast<int64_t>(values.size_bytes()) <= kDirectReductionBytes;
  std::byte* const bytes = reinterpret_cast<std::byte*>(values.data());
  auto slice_begin = [&](int32_t rank) { return n * rank / size_; };
  auto slice_bytes = [&](int32_t rank) {
    return static_cast<int64_t>((slice_begin(rank + 1) - slice_begin(rank)) * sizeof(T));
  };
  const int64_t own_begin = direct ? 0 : slice_begin(rank_);
  const int64_t own_bytes = direct ? static_cast<int64_t>(values.size_bytes()) : slice_bytes(rank_);
  scratch_.resize(static_cast<size_t>(own_bytes) * size_);
  std::byte* const parts = scratch_.data();  // of every rank, what this rank reduces
  Gather(kind, bytes, parts, own_bytes);
  if (!direct) {
    for (Send& send : messages_.sends) {
      send.from = bytes + slice_begin(send.peer) * sizeof(T);
      send.bytes = slice_bytes(send.peer);
    }
    messages_.own_from = bytes + own_begin * sizeof(T);
  }
  LRMOE_RETURN_IF_ERROR(Exchange(call, messages_));
  const std::span<T> own = values.subspan(own_begin, own_bytes / sizeof(T));
  if (own_bytes > 0) std::memcpy(own.data(), parts, own_bytes);
  for (int32_t peer = 1; peer < size_; ++peer) {
    Accumulate(reduction, own, reinterpret_cast<const T*>(parts + peer * own_bytes));
  }
  if (direct) return absl::OkStatus();
  Gather(kind, bytes + own_begin * sizeof(T), bytes, own_bytes);
  for (Receive& receive : messages_.receives) {
    receive.to = bytes + slice_begin(receive.peer) * sizeof(T);
    receive.bytes = slice_bytes(receive.peer);
  }
  messages_.own_bytes = 0;  // is in its place
  return Exchange(call, messages_);
}

// The root sends to each rank: right for the small buffers (plans, decisions) it is used for.
absl::Status DirectTransport::Broadcast(const Call& call, int32_t root, std::span<std::byte> buffer) {
  LRMOE_RETURN_IF_ERROR(CheckRoot(call, rank_, size_, root));
  Clear(Kind::kBroadcast);
  const int64_t bytes = static_cast<int64_t>(buffer.size());
  if (rank_ != root) {
    messages_.receives.push_back({root, buffer.data(), bytes});
  } else {
    for (int32_t i = 1; i < size_; ++i)
      messages_.sends.push_back({(rank_ + i) % size_, buffer.data(), bytes});
  }
  return Exchange(call, messages_);
}

absl::Status DirectTransport::Barrier(const Call& call) {
  Gather(Kind::kBarrier, nullptr, nullptr, 0);
  return Exchange(call, messages_);
}

}  // namespace lrmoe::transport
