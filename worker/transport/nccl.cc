#include "worker/transport/nccl.h"

#include <cuda_runtime.h>
#include <nccl.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status_macros.h"
#include "worker/transport/contract.h"
#include "worker/transport/device_link.h"

namespace lrmoe::transport {
namespace {

// Non-blocking communicators with abort: what this file uses.
constexpr int kOldestNccl = 21800;

absl::Status ToStatus(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();  // else this thread's next launch would report it
  return absl::UnavailableError(absl::StrCat(what, ": ", cudaGetErrorName(error)));
}
absl::Status ToStatus(ncclResult_t result, absl::string_view what) {
  if (result == ncclSuccess || result == ncclInProgress) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(what, ": ", ncclGetErrorString(result)));
}

#define LRMOE_NCCL_RETURN_IF_ERROR(call) LRMOE_RETURN_IF_ERROR(ToStatus((call), #call))

// Device memory for host buffers that are staged. Kept to the end, also what became too small: giving it back
// waits for the device, which may be busy with an exchange that never ends.
class Staged {
 public:
  ~Staged() {
    for (void* one : all_) (void)cudaFree(one);
  }
  absl::Status Grow(size_t bytes) {
    if (bytes <= bytes_) return absl::OkStatus();
    bytes = std::max(bytes, 2 * bytes_);
    void* data = nullptr;
    LRMOE_RETURN_IF_ERROR(ToStatus(cudaMalloc(&data, bytes), "staging memory"));
    all_.push_back(data);
    bytes_ = bytes;
    return absl::OkStatus();
  }
  std::byte* data() const { return all_.empty() ? nullptr : static_cast<std::byte*>(all_.back()); }

 private:
  std::vector<void*> all_;
  size_t bytes_ = 0;  // of the last
};

class NcclLink : public DeviceLink {
 public:
  NcclLink(int32_t rank, int32_t size, const NcclOptions& options)
      : rank_(rank), size_(size), options_(options) {}
  ~NcclLink() override {
    // Not ncclCommDestroy: it waits for peers, which may be gone. All exchanges were waited for.
    if (comm_ != nullptr) (void)ncclCommAbort(comm_);
    for (const Started& one : started_)
      if (one.end != nullptr) (void)cudaEventDestroy(one.end);
    for (cudaStream_t stream : {stream_, staging_})
      if (stream != nullptr) (void)cudaStreamDestroy(stream);
  }

  absl::Status Connect(const ncclUniqueId& id, Deadline deadline) {
    LRMOE_NCCL_RETURN_IF_ERROR(cudaSetDevice(options_.device));
    LRMOE_NCCL_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    LRMOE_NCCL_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&staging_, cudaStreamNonBlocking));
    for (Started& one : started_)
      LRMOE_NCCL_RETURN_IF_ERROR(cudaEventCreateWithFlags(&one.end, cudaEventDisableTiming));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    LRMOE_NCCL_RETURN_IF_ERROR(ncclCommInitRankConfig(&comm_, size_, id, rank_, &config));
    return Settle("start of NCCL", deadline);
  }

  bool Holds(const void* pointer) const override { return options_.stage_host_buffers || OnDevice(pointer); }

  absl::StatusOr<Ticket> Start(const Call& call, SendParts send, RecvParts recv) override {
    Started& one =
        *std::find_if(started_.begin(), started_.end(), [](const Started& s) { return s.ticket == 0; });
    one.call = call;
    if (absl::Status status = Begin(one, send, recv); !status.ok()) return End(one, status);
    one.ticket = ++last_ticket_;
    return Ticket{one.ticket};
  }

  absl::StatusOr<std::chrono::steady_clock::time_point> Finish(Ticket ticket, Deadline deadline) override {
    const auto found = std::find_if(started_.begin(), started_.end(), [&](const Started& s) {
      return s.ticket == static_cast<int64_t>(ticket);
    });
    LRMOE_CHECK(found != started_.end());
    Started& one = *found;
    one.ticket = 0;
    absl::Status status =
        comm_ == nullptr ? absl::UnavailableError("the epoch has ended") : WaitFor(one.end, deadline);
    if (status.ok()) status = one.FetchStaged(staging_);
    if (!status.ok()) return End(one, status);
    return std::chrono::steady_clock::now();
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

  // An exchange under way: on the link's own stream, so that the device computes meanwhile.
  struct Started {
    int64_t ticket = 0;  // 0: free
    Call call;
    cudaEvent_t end = nullptr;
    Staged in, out;
    std::vector<std::span<std::byte>> staged;  // host parts that wait in `out`

    absl::Status FetchStaged(cudaStream_t stream) {
      if (staged.empty()) return absl::OkStatus();
      const std::byte* from = out.data();
      for (const std::span<std::byte> part : std::exchange(staged, {})) {
        LRMOE_NCCL_RETURN_IF_ERROR(
            cudaMemcpyAsync(part.data(), from, part.size(), cudaMemcpyDeviceToHost, stream));
        from += part.size();
      }
      return ToStatus(cudaStreamSynchronize(stream), "copy to the host");
    }
  };

  // Kernels of a dead communicator stop only when it is aborted.
  absl::Status End(const Started& one, const absl::Status& status) {
    if (comm_ != nullptr) (void)ncclCommAbort(std::exchange(comm_, nullptr));
    return absl::Status(status.code(),
                        absl::StrCat(Where(one.call, rank_), ": ", std::string(status.message())));
  }

  absl::Status Begin(Started& one, SendParts send, RecvParts recv) {
    if (comm_ == nullptr || aborted_) return absl::UnavailableError("the epoch has ended");
    LRMOE_NCCL_RETURN_IF_ERROR(cudaSetDevice(options_.device));
    std::vector<std::span<const std::byte>> from(send.begin(), send.end());
    std::vector<std::span<std::byte>> to(recv.begin(), recv.end());
    one.staged.clear();
    LRMOE_RETURN_IF_ERROR(Stage(one.in, from));
    bool copied = false;
    for (size_t peer = 0; peer < send.size(); ++peer) {
      if (from[peer].data() == send[peer].data()) continue;
      copied = true;
      LRMOE_NCCL_RETURN_IF_ERROR(cudaMemcpyAsync(const_cast<std::byte*>(from[peer].data()), send[peer].data(),
                                                 send[peer].size(), cudaMemcpyHostToDevice, staging_));
    }
    if (copied) LRMOE_NCCL_RETURN_IF_ERROR(cudaStreamSynchronize(staging_));
    LRMOE_RETURN_IF_ERROR(Stage(one.out, to));
    for (size_t peer = 0; peer < recv.size(); ++peer)
      if (to[peer].data() != recv[peer].data()) one.staged.push_back(recv[peer]);
    LRMOE_RETURN_IF_ERROR(Enqueue(from, to, one.call.deadline));
    return ToStatus(cudaEventRecord(one.end, stream_), "cudaEventRecord");
  }

  // Gives the parts that lie in host memory places one after another on the device.
  template <typename Byte>
  absl::Status Stage(Staged& staged, std::vector<std::span<Byte>>& parts) {
    const auto on_host = [&](std::span<Byte> part) { return !part.empty() && !OnDevice(part.data()); };
    size_t bytes = 0;
    for (const std::span<Byte> part : parts) bytes += on_host(part) ? part.size() : 0;
    LRMOE_RETURN_IF_ERROR(staged.Grow(bytes));
    std::byte* next = staged.data();
    for (std::span<Byte>& part : parts) {
      if (!on_host(part)) continue;
      part = {next, part.size()};
      next += part.size();
    }
    return absl::OkStatus();
  }

  // One group: all messages progress independently. Nothing is sent for nothing, as both sides know.
  absl::Status Enqueue(SendParts send, RecvParts recv, Deadline deadline) {
    LRMOE_NCCL_RETURN_IF_ERROR(ncclGroupStart());
    ncclResult_t result = ncclSuccess;
    const auto keep = [&result](ncclResult_t next) {
      if (result == ncclSuccess || result == ncclInProgress) result = next;
    };
    for (int32_t peer = 0; peer < size_; ++peer) {
      const std::span<const std::byte> from = send[peer];
      const std::span<std::byte> to = recv[peer];
      if (peer != rank_ && !from.empty())
        keep(ncclSend(from.data(), from.size(), ncclUint8, peer, comm_, stream_));
      if (peer != rank_ && !to.empty()) keep(ncclRecv(to.data(), to.size(), ncclUint8, peer, comm_, stream_));
      if (peer == rank_ && !from.empty() &&
          cudaMemcpyAsync(to.data(), from.data(), from.size(), cudaMemcpyDeviceToDevice, stream_) !=
              cudaSuccess)
        keep(ncclUnhandledCudaError);
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
  absl::Status WaitFor(cudaEvent_t end, Deadline deadline) const {
    while (true) {
      const cudaError_t state_of_stream = cudaEventQuery(end);
      if (state_of_stream == cudaSuccess) return absl::OkStatus();
      (void)cudaGetLastError();  // not ready is an error, too, which this thread's next launch would report
      if (state_of_stream != cudaErrorNotReady) return ToStatus(state_of_stream, "NCCL exchange");
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
  cudaStream_t stream_ = nullptr;   // of exchanges
  cudaStream_t staging_ = nullptr;  // of copies that the host waits for, which no exchange may hold up
  std::atomic<bool> aborted_{false};
  int64_t last_ticket_ = 0;
  std::array<Started, kMaxStarted> started_;
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
  status = link->Connect(id, deadline);
  if (!status.ok()) {
    control->Abort(status.message());
    if (absl::IsDeadlineExceeded(status)) return status;
    return absl::FailedPreconditionError(status.message());
  }
  return CreateLinkedTransport(std::move(control), std::move(link));
}

}  // namespace lrmoe::transport
