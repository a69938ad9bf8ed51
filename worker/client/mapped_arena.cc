#include "worker/client/mapped_arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace lrmoe::client {

absl::StatusOr<std::unique_ptr<MappedArena>> MappedArena::Map(const v1::Arena& arena,
                                                              std::function<void(uint64_t)> on_release) {
  const int fd = open(arena.path().c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("arena ", arena.path(), ": ", std::strerror(errno),
                     "; client and worker must run as the same user in the same pid namespace"));
  }
  void* memory = mmap(nullptr, static_cast<size_t>(arena.bytes()), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const int error = errno;
  close(fd);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError(absl::StrCat("mapping arena ", arena.path(), " of ", arena.bytes(),
                                                     " bytes: ", std::strerror(error)));
  }
  std::unique_ptr<MappedArena> mapped(new MappedArena());
  mapped->memory_ = {static_cast<std::byte*>(memory), static_cast<size_t>(arena.bytes())};
  mapped->id_ = arena.arena();
  mapped->on_release_ = std::move(on_release);
  return mapped;
}

MappedArena::~MappedArena() {
  munmap(memory_.data(), memory_.size());
  on_release_(id_);
}

absl::Status ArenaIndex::Describe(absl::string_view field, const void* begin, size_t bytes,
                                  v1::Tensor* tensor) const {
  if (bytes == 0) return absl::OkStatus();
  const auto* first = static_cast<const std::byte*>(begin);
  const auto it = ends_.upper_bound(first);
  if (it == ends_.end() || first < it->second.begin || bytes > static_cast<size_t>(it->first - first)) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": does not lie in an arena of this session"));
  }
  tensor->set_arena(it->second.id);
  tensor->set_offset_bytes(first - it->second.begin);
  return absl::OkStatus();
}

}  // namespace lrmoe::client
