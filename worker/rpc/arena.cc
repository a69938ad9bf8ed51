#include "worker/rpc/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"

namespace lrmoe::worker {

absl::StatusOr<std::shared_ptr<Arena>> Arena::Create(uint64_t id, int64_t bytes) {
  LRMOE_CHECK_GE(bytes, 1);
  const auto failed = [bytes](const char* call) {
    return absl::ResourceExhaustedError(
        absl::StrCat("an arena of ", bytes, " bytes: ", call, ": ", std::strerror(errno)));
  };
  const std::string name = absl::StrCat("lrmoe-arena-", id);  // shows in /proc/<pid>/maps, nowhere else
  const int fd = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return failed("memfd_create");
  if (ftruncate(fd, bytes) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const absl::Status status = failed("ftruncate");
    close(fd);
    return status;
  }
  void* memory = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) {
    const absl::Status status = failed("mmap");
    close(fd);
    return status;
  }
  return std::shared_ptr<Arena>(
      new Arena(id, fd, {static_cast<std::byte*>(memory), static_cast<size_t>(bytes)}));
}

Arena::~Arena() {
  munmap(memory_.data(), memory_.size());
  close(fd_);
}

std::string Arena::path() const {
  return absl::StrCat("/proc/", getpid(), "/fd/", fd_);
}

int64_t PhysicalMemoryBytes() {
  return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<int64_t>(sysconf(_SC_PAGESIZE));
}

absl::StatusOr<std::shared_ptr<Arena>> ArenaSet::Create(int64_t bytes) {
  if (bytes < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("bytes: ", bytes, ", allowed is 1..", limits_.max_total_bytes));
  }
  std::lock_guard lock(mutex_);
  if (static_cast<int64_t>(arenas_.size()) >= limits_.max_arenas) {
    return absl::ResourceExhaustedError(
        absl::StrCat("this session has ", arenas_.size(), " arenas, allowed are ", limits_.max_arenas));
  }
  if (bytes > limits_.max_total_bytes - total_bytes_) {
    return absl::ResourceExhaustedError(absl::StrCat("bytes: ", bytes, ", this session's arenas hold ",
                                                     total_bytes_, " bytes, allowed are ",
                                                     limits_.max_total_bytes));
  }
  auto arena = Arena::Create(last_id_ + 1, bytes);
  if (!arena.ok()) return arena.status();
  arenas_[++last_id_] = *arena;
  total_bytes_ += bytes;
  return arena;
}

absl::Status ArenaSet::Release(uint64_t id) {
  std::shared_ptr<Arena> released;  // unmapped outside the lock
  std::lock_guard lock(mutex_);
  const auto it = arenas_.find(id);
  if (it == arenas_.end())
    return absl::NotFoundError(absl::StrCat("arena ", id, " is not one of this session's"));
  released = std::move(it->second);
  arenas_.erase(it);
  total_bytes_ -= static_cast<int64_t>(released->memory().size());
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Arena>> ArenaSet::Find(uint64_t id) const {
  std::lock_guard lock(mutex_);
  const auto it = arenas_.find(id);
  if (it == arenas_.end())
    return absl::NotFoundError(absl::StrCat("arena ", id, " is not one of this session's"));
  return it->second;
}

void ArenaSet::Clear() {
  std::map<uint64_t, std::shared_ptr<Arena>> released;
  std::lock_guard lock(mutex_);
  released.swap(arenas_);
  total_bytes_ = 0;
}

}  // namespace lrmoe::worker
