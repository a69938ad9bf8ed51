#include "worker/transport/nccl.h"

#include <cuda_runtime.h>
#include <nccl.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/transport/contract.h"
#include "worker/transport/device_link.h"

namespace lrmoe::transport {
namespace {

// Non-blocking communicators with abort: what this file uses.
constexpr int kOldestNccl = 21800;

absl::Status ToStatus(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(what, ": ", cudaGetErrorName(error)));
}
absl::Status ToStatus(ncclResult_t result, absl::string_view what) {
  if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(what, ": ", ncclGetErrorString(result)));
}

#define LRMOE_NCCL_RETURN_IF_ERROR(call) LRMOE_RETURN_IF_ERROR(ToStatus((call), #call))

// Device memory for host buffers that are staged. Kept from exchange to exchange: giving it back waits for
// the device, which may be busy with an exchange that never ends.
class Staged {
 public:
  ~Staged() { Free(); }
  absl::Status Grow(size_t bytes) {
    if (bytes <= bytes_) return absl::OkStatus();
    Free();
    LRMOE_RETURN_IF_ERROR(ToStatus(cudaMalloc(&data_, bytes), "staging memory"));
    bytes_ = bytes;
    return absl::OkStatus();
  }
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void Free() {
    if (data_ != nullptr) (void)cudaFree(std::exchange(data_, nullptr));
    bytes_ = 0;
  }
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

class NcclLink : public DeviceLink {
 public:
  NcclLink(int32_t rank, int32_t size, const NcclOptions& options)
      : rank_(rank), size_(size), options_(options) {}
  ~NcclLink() override {
    // Not ncclCommDestroy: it waits for peers, which may be gone. All exchanges were waited for.
    if (comm_ != nullptr) (void)ncclCommAbort(comm_);
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }

  absl::Status Start(const ncclUniqueId& id, Deadline deadline) {
    LRMOE_NCCL_RETURN_IF_ERROR(cudaSetDevice(options_.device));
    LRMOE_NCCL_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    LRMOE_NCCL_RETURN_IF_ERROR(ncclCommInitRankConfig(&comm_, size_, id, rank_, &config));
    return Settle("start of NCCL", deadline);
  }

  bool Holds(const void* pointer) const override { return options_.stage_host_buffers || OnDevice(pointer); }

  absl::Status AllToAllV(const Call& call, std::span<const std::byte> send,
                         std::span<const int64_t> send_bytes, std::span<std::byte> recv,
                         std::span<const int64_t> recv_bytes) override {
    absl::Status status = Exchange(call, send, send_bytes, recv, recv_bytes);
    if (status.ok()) return status;
    // Kernels of a dead communicator stop only when it is aborted.
    if (comm_ != nullptr) (void)ncclCommAbort(std::exchange(comm_, nullptr));
    const std::string message = absl::StrCat(Where(call, rank_), ": ", std::string(status.message()));
    return absl::Status(status.code(), message);
  }

  void Abort() override { aborted_ = true; }

 private:
  bool OnDevice(const void* pointer) const {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
      (void)cudaGetLastError();
      return false;
    }
    return attributes.type == cudaMemoryTypeDevice;
  }

  absl::Status Exchange(const Call& call, std::span<const std::byte> send,
                        std::span<const int64_t> send_bytes, std::span<std::byte> recv,
                        std::span<const int64_t> recv_bytes) {
    if (comm_ == nullptr || aborted_) return absl::UnavailableError("the epoch has ended");
    LRMOE_NCCL_RETURN_IF_ERROR(cudaSetDevice(options_.device));
    const bool stage_in = !send.empty() && !OnDevice(send.data());
    const bool stage_out = !recv.empty() && !OnDevice(recv.data());
    const std::byte* from = send.data();
    std::byte* to = recv.data();
    if (stage_in) {
      LRMOE_RETURN_IF_ERROR(in_.Grow(send.size()));
      LRMOE_NCCL_RETURN_IF_ERROR(
          cudaMemcpyAsync(in_.data(), send.data(), send.size(), cudaMemcpyHostToDevice, stream_));
      from = in_.data();
    }
    if (stage_out) {
      LRMOE_RETURN_IF_ERROR(out_.Grow(recv.size()));
      to = out_.data();
    }
    LRMOE_RETURN_IF_ERROR(Enqueue(from, send_bytes, to, recv_bytes, call.deadline));
    if (stage_out)
      LRMOE_NCCL_RETURN_IF_ERROR(
          cudaMemcpyAsync(recv.data(), out_.data(), recv.size(), cudaMemcpyDeviceToHost, stream_));
    return WaitForStream(call.deadline);
  }

  // One group: all messages progress independently. Nothing is sent for nothing, as both sides know.
  absl::Status Enqueue(const std::byte* from, std::span<const int64_t> send_bytes, std::byte* to,
                       std::span<const int64_t> recv_bytes, Deadline deadline) {
    LRMOE_NCCL_RETURN_IF_ERROR(ncclGroupStart());
    ncclResult_t result = ncclSuccess;
    const auto keep = [&result](ncclResult_t next) {
      if (result == ncclSuccess || result == ncclInProgress) result = next;
    };
    for (int32_t peer = 0; peer < size_; ++peer) {
      if (peer != rank_ && send_bytes[peer] > 0)
        keep(ncclSend(from, static_cast<size_t>(send_bytes[peer]), ncclUint8, peer, comm_, stream_));
      if (peer != rank_ && recv_bytes[peer] > 0)
        keep(ncclRecv(to, static_cast<size_t>(recv_bytes[peer]), ncclUint8, peer, comm_, stream_));
      if (peer == rank_ && send_bytes[peer] > 0 &&
          cudaMemcpyAsync(to, from, send_bytes[peer], cudaMemcpyDeviceToDevice, stream_) != cudaSuccess)
        keep(ncclUnhandledCudaError);
      from += send_bytes[peer];
      to += recv_bytes[peer];
    }
    keep(ncclGroupEnd());
    LRMOE_RETURN_IF_ERROR(ToStatus(result, "NCCL send and receive"));
    return Settle("NCCL send and receive", deadline);
  }

  // Until the communicator has done what it was told, with our deadline.
  absl::Status Settle(absl::string_view what, Deadline deadline) {
    while (true) {
      ncclResult_t state = ncclSuccess;
      LRMOE_NCCL_RETURN_IF_ERROR(ncclCommGetAsyncError(comm_, &state));
      if (state == ncclSuccess) return absl::OkStatus();
      if (state != ncclInProgress)
        return absl::UnavailableError(
            absl::StrCat(what, ": ", ncclGetErrorString(state), ": ", ncclGetLastError(comm_)));
      LRMOE_RETURN_IF_ERROR(CheckTime(what, deadline));
    }
  }

  // Never blocks in CUDA: a collective whose peer is gone does not end.
  absl::Status WaitForStream(Deadline deadline) {
    while (true) {
      const cudaError_t stream = cudaStreamQuery(stream_);
      if (stream == cudaSuccess) return absl::OkStatus();
      if (stream != cudaErrorNotReady) return ToStatus(stream, "NCCL exchange");
      ncclResult_t state = ncclSuccess;
      LRMOE_NCCL_RETURN_IF_ERROR(ncclCommGetAsyncError(comm_, &state));
      if (state != ncclSuccess && state != ncclInProgress)
        return absl::UnavailableError(
            absl::StrCat("NCCL exchange: ", ncclGetErrorString(state), ": ", ncclGetLastError(comm_)));
      LRMOE_RETURN_IF_ERROR(CheckTime("NCCL exchange", deadline));
    }
  }

  absl::Status CheckTime(absl::string_view what, Deadline deadline) const {
    if (aborted_) return absl::UnavailableError(absl::StrCat(what, ": the epoch was ended meanwhile"));
    if (std::chrono::steady_clock::now() >= deadline)
      return absl::DeadlineExceededError(absl::StrCat(what, ": not all peers came before the deadline"));
    sched_yield();
    return absl::OkStatus();
  }

  const int32_t rank_, size_;
  const NcclOptions options_;
  ncclComm_t comm_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::atomic<bool> aborted_{false};
  Staged in_, out_;
};

absl::Status CheckVersion() {
  int version = 0;
  LRMOE_NCCL_RETURN_IF_ERROR(ncclGetVersion(&version));
  if (version >= kOldestNccl) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("NCCL has version code ", version, "; allowed: ", kOldestNccl, " and newer"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Transport>> CreateNcclTransport(std::unique_ptr<Transport> control,
                                                               const NcclOptions& options) {
  const Deadline deadline = After(options.start_timeout);
  const Call call{"start of NCCL", {}, deadline};
  ncclUniqueId id{};
  absl::Status status = CheckVersion();
  if (status.ok() && control->rank() == 0) status = ToStatus(ncclGetUniqueId(&id), "ncclGetUniqueId");
  // Every rank takes part in what follows, so that none waits for one that failed.
  int64_t failed = status.ok() ? 0 : 1;
  LRMOE_RETURN_IF_ERROR(control->AllReduce(call, std::span(&failed, 1), Reduction::kMax));
  LRMOE_RETURN_IF_ERROR(status);
  if (failed != 0)
    return absl::FailedPreconditionError(
        absl::StrCat(Where(call, control->rank()), ": another rank has no NCCL"));
  LRMOE_RETURN_IF_ERROR(control->Broadcast(call, 0, std::as_writable_bytes(std::span(&id, 1))));
  auto link = std::make_unique<NcclLink>(control->rank(), control->size(), options);
  status = link->Start(id, deadline);
  if (!status.ok()) {
    control->Abort(status.message());
    if (absl::IsDeadlineExceeded(status)) return status;
    return absl::FailedPreconditionError(status.message());
  }
  return CreateLinkedTransport(std::move(control), std::move(link));
}

}  // namespace lrmoe::transport
