// What emulated CUDA processes share: memory and events in memory files, and handles that name such a file
// and its process. Memory opened twice, as CUDA forbids, or freed while it is open: the program aborts and
// says so.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lrmoe::emulator {

// A memory file, mapped: a header page that all processes see, then `bytes` bytes. Any thread, any process.
class SharedFile {
 public:
  static std::unique_ptr<SharedFile> Create(int64_t bytes);
  // At another address. InvalidArgument when it is no handle, FailedPrecondition when its process is gone.
  static absl::StatusOr<std::unique_ptr<SharedFile>> Open(absl::string_view handle);
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  const std::string& handle() const { return handle_; }
  std::span<std::byte> memory() const { return memory_; }
  // Openings there are now, of all processes; at most one of memory.
  uint32_t openings() const;

  // As an event: Record notes that the stream will get there, Fire that it is there.
  void Record();
  void Fire();
  uint32_t recorded() const;
  uint32_t fired() const;
  // Whether it fires for the `number`th time within the limit.
  bool WaitUntilFired(uint32_t number, std::chrono::milliseconds limit);
  // Whether somebody waits in WaitUntilFired within the limit.
  bool WaitForWaiter(std::chrono::milliseconds limit);

 private:
  struct Header;
  SharedFile(int fd, bool owner, std::string handle, Header* header, int64_t bytes);

  const int fd_;
  const bool owner_;
  const std::string handle_;
  Header* const header_;
  const std::span<std::byte> memory_;
};

}  // namespace lrmoe::emulator
