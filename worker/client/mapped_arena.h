// The client's end of an arena, and finding the arena a span lies in.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "lrmoe/v1/worker.pb.h"
#include "worker/client/session.h"

namespace lrmoe::client {

class MappedArena final : public Arena {
 public:
  // Maps a file that the worker exports. `on_release` is called when it goes, with its id.
  static absl::StatusOr<std::unique_ptr<MappedArena>> Map(const v1::Arena& arena,
                                                          std::function<void(uint64_t)> on_release);
  ~MappedArena() override;

 private:
  MappedArena() = default;
  uint64_t id_ = 0;
  std::function<void(uint64_t)> on_release_;
};

// Arenas by address.
class ArenaIndex {
 public:
  void Add(uint64_t id, std::span<std::byte> memory) {
    ends_[memory.data() + memory.size()] = {id, memory.data()};
  }
  void Remove(uint64_t id) {
    std::erase_if(ends_, [id](const auto& entry) { return entry.second.id == id; });
  }
  // Sets arena and offset of `tensor`. InvalidArgument naming `field` when the span is in no arena. An empty
  // span needs none.
  absl::Status Describe(absl::string_view field, const void* begin, size_t bytes, v1::Tensor* tensor) const;

 private:
  struct Entry {
    uint64_t id;
    const std::byte* begin;
  };
  std::map<const std::byte*, Entry, std::less<>> ends_;
};

}  // namespace lrmoe::client
