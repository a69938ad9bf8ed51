// The client's own memory on the worker's device, and the events that order its use. What is open belongs to
// the engine thread, which alone may open and close it (Openings, in its slot); sessions and calls hold
// tokens, and what nobody holds a token of any more is closed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/interprocess.h"

namespace lrmoe::worker {

// A token of an opened allocation.
struct ImportedMemory {
  uint64_t id = 0;
  std::string handle;
  std::span<std::byte> memory;  // addresses of the device
};

// A token of the two events of a session. Only the engine thread follows the pointers.
struct SharedEvents {
  kernels::SharedEvent* client = nullptr;  // recorded by the client before a call
  kernels::SharedEvent* worker = nullptr;  // recorded by the worker behind its last write
};

// Engine thread only.
class Openings {
 public:
  // `opened` is destroyed by the first CloseUnused after the last `token` is gone.
  void Keep(std::weak_ptr<const void> token, std::shared_ptr<void> opened) {
    kept_.push_back({std::move(token), std::move(opened)});
  }
  void CloseUnused() {
    std::erase_if(kept_, [](const Kept& kept) { return kept.token.expired(); });
  }

 private:
  struct Kept {
    std::weak_ptr<const void> token;
    std::shared_ptr<void> opened;
  };
  std::vector<Kept> kept_;
};

// Of one session. Any thread.
class DeviceShares {
 public:
  explicit DeviceShares(size_t max_imports) : max_imports_(max_imports) {}

  absl::StatusOr<std::shared_ptr<const ImportedMemory>> Find(uint64_t id) const;  // NotFound
  // Null before ShareEvents.
  std::shared_ptr<const SharedEvents> events() const;

  // Engine thread. `handle` names an allocation of `bytes` bytes on `device`, which is opened unless it is
  // open. Returns its id. InvalidArgument naming both sizes when it was imported with another one,
  // ResourceExhausted naming the limit; else errors of the device.
  absl::StatusOr<uint64_t> Import(kernels::Interprocess& device, Openings& openings, absl::string_view handle,
                                  int64_t bytes);
  absl::Status Release(uint64_t id);  // one import of it; NotFound
  // Engine thread. Returns the handle of the worker's event. AlreadyExists the second time.
  absl::StatusOr<std::string> ShareEvents(kernels::Interprocess& device, Openings& openings,
                                          absl::string_view handle);
  void Clear();

 private:
  struct Counted {
    std::shared_ptr<const ImportedMemory> memory;
    int64_t references = 0;
  };
  const size_t max_imports_;
  mutable std::mutex mutex_;
  std::map<uint64_t, Counted> imports_;         // guarded by mutex_
  std::shared_ptr<const SharedEvents> events_;  // guarded by mutex_
  uint64_t last_id_ = 0;                        // guarded by mutex_; ids are never used twice
};

// The device of a worker, when the client's memory is on it. FailedPrecondition when the worker computes on
// the CPU (null), or on another device: both are named.
absl::Status CheckSameDevice(const kernels::Interprocess* device, absl::string_view uuid);

}  // namespace lrmoe::worker
