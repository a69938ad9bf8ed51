// Memory and events that processes on one device share instead of copies: what a training process hands to
// its worker. Handles are CUDA's: opaque bytes that mean something to processes of the same machine.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/memory.h"

namespace lrmoe::kernels {

inline constexpr size_t kSharedHandleBytes = 64;  // of memory and of events
inline constexpr size_t kDeviceUuidBytes = 16;

// Orders what two processes give to the device, without either waiting for it. Not thread-safe, like Device.
class SharedEvent {
 public:
  virtual ~SharedEvent() = default;
  SharedEvent(const SharedEvent&) = delete;
  SharedEvent& operator=(const SharedEvent&) = delete;

  const std::string& handle() const { return handle_; }  // for other processes to open
  // It fires when everything that this process told the device so far is done.
  virtual absl::Status Record() = 0;
  // What this process tells the device from now on comes after the event as it was last recorded, by
  // whichever process; never recorded: nothing to wait for. Returns at once. When it has not fired within
  // `limit`, Device::Wait returns DeadlineExceeded: the other process died, or its own work hangs.
  virtual absl::Status Await(std::chrono::milliseconds limit) = 0;

 protected:
  explicit SharedEvent(std::string handle) : handle_(std::move(handle)) {}

 private:
  const std::string handle_;
};

// One device's side of it. Not thread-safe, like Device. What it gives out is destroyed before the device is.
// Errors: InvalidArgument when a handle is not one, FailedPrecondition with CUDA's name of the error when
// what it names cannot be opened (its process is gone, say).
class Interprocess {
 public:
  virtual ~Interprocess() = default;

  // kDeviceUuidBytes; the same in every process, whatever the device's ordinal there.
  virtual const std::string& uuid() const = 0;

  // An allocation of `bytes` bytes of another process, from its start. The other process keeps it until this
  // is destroyed; destroying waits for the device. An allocation is open once at a time: CUDA promises
  // nothing for a second opening. InvalidArgument when it has fewer bytes.
  virtual absl::StatusOr<std::unique_ptr<Memory>> OpenMemory(absl::string_view handle, int64_t bytes) = 0;

  // An event of another process, which keeps it until this is destroyed.
  virtual absl::StatusOr<std::unique_ptr<SharedEvent>> OpenEvent(absl::string_view handle) = 0;
  // An event for other processes to open.
  virtual absl::StatusOr<std::unique_ptr<SharedEvent>> MakeEvent() = 0;
};

// "GPU-01234567-89ab-cdef-0123-456789abcdef", as CUDA's tools write it; whatever has another length in hex.
std::string DeviceUuidText(absl::string_view uuid);
// InvalidArgument naming the number of bytes when it is not kSharedHandleBytes.
absl::Status CheckSharedHandle(absl::string_view handle);

}  // namespace lrmoe::kernels
