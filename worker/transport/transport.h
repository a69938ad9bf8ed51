// One contract for moving bytes between the ranks of an epoch; every implementation passes the same
// conformance suite (tests/contract). Collective: all ranks call the same operations in the same order.
//
// Errors. DeadlineExceeded: a peer did not arrive in time. Unavailable: a peer is gone or the epoch was
// aborted. FailedPrecondition: the ranks disagree about the operation or its sizes; both sides are named;
// operation names and invocations are not compared. After these three the epoch is dead: every later call
// returns Unavailable at once, nothing is retried, buffers are unspecified. Not every rank sees the same one:
// a rank may have finished already, or learn of it as the end of the epoch. InvalidArgument: sizes that
// disagree with the own buffers, found before anything was sent; the epoch lives, but the peers wait for this
// rank: call again, or Abort. Each message names rank, peer (where one is known), operation and invocation.
//
// An all-to-all-v may be started and finished later, and this rank compute meanwhile. How much of it happens
// in between is up to the implementation, from nothing to everything: it may do all at the start, or at the
// end. A start has its place in the collective order like every operation; finishing has none: a rank
// finishes when it likes, in any order, other operations may come in between.
//
// Threads: one thread at a time calls the operations; Abort may be called from any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/deadline.h"
#include "common/ids.h"

namespace lrmoe::transport {

// Says which operation of which invocation is running (for errors, logs and the fault decorator) and until
// when.
struct Call {
  absl::string_view operation;  // e.g. "forward dispatch"; outlives the call, also one that is started
  Invocation invocation;
  Deadline deadline;
};

enum class Reduction : uint8_t { kSum, kMin, kMax };

// What goes to each rank and comes from it, wherever it lies; one part per rank, in rank order.
using SendParts = std::span<const std::span<const std::byte>>;
using RecvParts = std::span<const std::span<std::byte>>;

// An all-to-all-v that was started and not yet finished; of one transport.
enum class Ticket : int64_t {};
inline constexpr int kMaxStarted = 8;  // at a time

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int32_t rank() const = 0;
  virtual int32_t size() const = 0;

  // Sends send_bytes[r] bytes to each rank r: they lie one after another in `send`, in rank order, without
  // gaps. Receives recv_bytes[r] from each rank likewise into `recv`. Both sides know the sizes (from the
  // plan or an earlier exchange): recv_bytes[r] here == send_bytes[rank()] there. Zero sizes are normal;
  // sizes may exceed 2^31. `send` and `recv` do not overlap. The own part is copied locally.
  virtual absl::Status AllToAllV(const Call& call, std::span<const std::byte> send,
                                 std::span<const int64_t> send_bytes, std::span<std::byte> recv,
                                 std::span<const int64_t> recv_bytes);

  // The same between parts that may lie anywhere, without waiting for its end. Until Finish the parts are the
  // transport's: those to send do not change, those to receive are not touched; the lists of parts may go.
  // InvalidArgument, beyond what AllToAllV refuses, when kMaxStarted exchanges are started already (a running
  // AllToAllV may count as one). Where it waits for peers at all, then until the call's deadline.
  virtual absl::StatusOr<Ticket> StartAllToAllV(const Call& call, SendParts send, RecvParts recv) = 0;
  // Waits, until `deadline`, for all to be received and for the parts to send to be free. Once for each
  // ticket, also when the epoch has died: then the parts are the caller's again. Errors as of AllToAllV,
  // which name the operation that was started. Returns when it was complete, as far as that was noticed
  // before.
  virtual absl::StatusOr<std::chrono::steady_clock::time_point> Finish(Ticket ticket, Deadline deadline) = 0;

  // recv[r * block .. ] = the block of rank r, where block = send.size() is equal on all ranks;
  // recv.size() == block * size().
  virtual absl::Status AllGather(const Call& call, std::span<const std::byte> send,
                                 std::span<std::byte> recv) = 0;

  // Element-wise over all ranks, in place; the result is bitwise equal on all ranks and over repeated runs
  // (reduced in rank order).
  virtual absl::Status AllReduce(const Call& call, std::span<int64_t> values, Reduction reduction) = 0;
  virtual absl::Status AllReduce(const Call& call, std::span<double> values, Reduction reduction) = 0;

  // The buffer of `root` on all ranks; equal sizes.
  virtual absl::Status Broadcast(const Call& call, int32_t root, std::span<std::byte> buffer) = 0;

  virtual absl::Status Barrier(const Call& call) = 0;

  // Ends the epoch: running and later operations of this rank return Unavailable with `reason`, and peers
  // learn of it as soon as the implementation can tell them. Idempotent.
  virtual void Abort(absl::string_view reason) = 0;
};

}  // namespace lrmoe::transport
