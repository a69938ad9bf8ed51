// CUDA's runtime and driver, cuBLAS and NCCL, as far as this repository calls them, without a device: the
// files that call them are compiled as they are, against NVIDIA's headers, and linked with this instead.
// Kernels are those of the emulator.
//
// What it checks (the program aborts and says what was wrong, or the call gives the error a device gives):
// work happens when somebody waits, never before, and streams are ordered by nothing but events; memory of
// a device is closed to the host, starts as NaN patterns and ends where its mapping ends; copies have their
// ends where they say; a kernel is launched with its stream's device current and no older error pending;
// handles are not used after their end; matrices given to cuBLAS lie in the device's memory, and a grouped
// call's 16-bit operands are aligned as it wants; NCCL gets nothing to do while it is busy. What it cannot
// show: that NVIDIA's libraries do as their documentation says, real memory order, speed.
//
// Here: what tests arrange and ask. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace lrmoe::fake_cuda {

// Everything as in a new process: 8 devices of 8 GiB, a driver, no failures to come. Nothing may be alive.
void Reset();
// The end of the process, and a new one: what is alive is gone.
void EndProcess();
void SetDeviceCount(int count);
void RemoveDriver();
void SetMemory(int64_t bytes_per_device);

// The `nth` call of `function` from now on, "cudaHostAlloc" say, fails with this cudaError_t, CUresult,
// cublasStatus_t or ncclResult_t. A driver function that is to be missing: "cuMemMap", kMissing.
inline constexpr int kMissing = -1;
void Fail(const std::string& function, int error, int nth = 1);

// What exists now.
struct Live {
  int64_t streams = 0, events = 0, device_allocations = 0, pinned = 0, reservations = 0, blas_handles = 0,
          communicators = 0, opened = 0;
  bool operator==(const Live&) const = default;
};
Live CountLive();
// GEMMs computed since Reset, by call, and those on a handle without a workspace of its own.
struct Gemms {
  int64_t single = 0, grouped = 0, without_workspace = 0;
};
Gemms CountGemms();

// Memory of another process on a device, by its handle; closed when this goes.
class ForeignMemory {
 public:
  ForeignMemory(int device, int64_t bytes);
  ~ForeignMemory();
  ForeignMemory(const ForeignMemory&) = delete;
  ForeignMemory& operator=(const ForeignMemory&) = delete;
  const std::string& handle() const { return handle_; }
  std::span<std::byte> bytes() const { return bytes_; }  // as the other process sees it

 private:
  std::string handle_;
  std::span<std::byte> bytes_;
};

// Another process's event, or its view of one of ours.
class ForeignEvent {
 public:
  ForeignEvent();
  explicit ForeignEvent(const std::string& ours);
  const std::string& handle() const { return handle_; }
  void Record();  // the other process's stream will get there
  void Fire();    // it is there
  bool Fired() const;

 private:
  std::string handle_;
};

// NCCL. Settle: how often a communicator says it is busy after each thing it is told, 3 by default.
void SetNcclPolls(int polls);
void SetNcclVersion(int version);
// The communicator of `rank` fails once it was told to exchange something after `exchanges` more exchanges.
void FailNccl(int rank, int exchanges, int error);

}  // namespace lrmoe::fake_cuda
