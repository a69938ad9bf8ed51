#include "worker/rpc/device_memory.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace lrmoe::worker {
namespace {

absl::Status Unknown(uint64_t id) {
  return absl::NotFoundError(absl::StrCat("device memory ", id, " is not one of this session's"));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const ImportedMemory>> DeviceShares::Find(uint64_t id) const {
  std::lock_guard lock(mutex_);
  const auto it = imports_.find(id);
  if (it == imports_.end()) return Unknown(id);
  return it->second.memory;
}

std::shared_ptr<const SharedEvents> DeviceShares::events() const {
  std::lock_guard lock(mutex_);
  return events_;
}

absl::StatusOr<uint64_t> DeviceShares::Import(kernels::Interprocess& device, Openings& openings,
                                              absl::string_view handle, int64_t bytes) {
  std::lock_guard lock(mutex_);
  const auto known = std::find_if(imports_.begin(), imports_.end(), [handle](const auto& entry) {
    return entry.second.memory->handle == handle;
  });
  if (known != imports_.end()) {
    const auto open_bytes = static_cast<int64_t>(known->second.memory->memory.size());
    if (bytes != open_bytes) {
      return absl::InvalidArgumentError(absl::StrCat("bytes: ", bytes, ", but device memory ", known->first,
                                                     " is this allocation with ", open_bytes, " bytes"));
    }
    ++known->second.references;
    return known->first;
  }
  if (imports_.size() >= max_imports_) {
    return absl::ResourceExhaustedError(absl::StrCat("this session has imported ", imports_.size(),
                                                     " allocations, allowed are ", max_imports_));
  }
  LRMOE_ASSIGN_OR_RETURN(std::shared_ptr<kernels::Memory> opened, device.OpenMemory(handle, bytes));
  const auto token = std::make_shared<const ImportedMemory>(
      ImportedMemory{++last_id_, std::string(handle), {opened->base(), static_cast<size_t>(bytes)}});
  openings.Keep(token, std::move(opened));
  imports_[token->id] = {token, 1};
  return token->id;
}

absl::Status DeviceShares::Release(uint64_t id) {
  std::lock_guard lock(mutex_);
  const auto it = imports_.find(id);
  if (it == imports_.end()) return Unknown(id);
  if (--it->second.references == 0) imports_.erase(it);
  return absl::OkStatus();
}

absl::StatusOr<std::string> DeviceShares::ShareEvents(kernels::Interprocess& device, Openings& openings,
                                                      absl::string_view handle) {
  std::lock_guard lock(mutex_);
  if (events_ != nullptr) return absl::AlreadyExistsError("this session shares its events already");
  LRMOE_ASSIGN_OR_RETURN(std::shared_ptr<kernels::SharedEvent> theirs, device.OpenEvent(handle));
  LRMOE_ASSIGN_OR_RETURN(std::shared_ptr<kernels::SharedEvent> ours, device.MakeEvent());
  events_ = std::make_shared<const SharedEvents>(SharedEvents{theirs.get(), ours.get()});
  openings.Keep(events_, std::move(theirs));
  openings.Keep(events_, ours);
  return ours->handle();
}

void DeviceShares::Clear() {
  std::lock_guard lock(mutex_);
  imports_.clear();
  events_.reset();
}

absl::Status CheckSameDevice(const kernels::Interprocess* device, absl::string_view uuid) {
  if (device == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("device_uuid: ", kernels::DeviceUuidText(uuid),
                     ", but this worker computes on the CPU and takes tensors from its arenas only"));
  }
  if (device->uuid() == uuid) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("device_uuid: ", kernels::DeviceUuidText(uuid),
                                                    ", but this worker computes on ",
                                                    kernels::DeviceUuidText(device->uuid())));
}

}  // namespace lrmoe::worker
