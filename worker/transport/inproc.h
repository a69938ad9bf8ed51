// Ranks as threads of one process: for tests, benchmarks and single-rank workers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "worker/transport/transport.h"

namespace lrmoe::transport {

// Copies between buffers of any two ranks, complete when it returns; called by the receiving rank's thread,
// several at a time. An error ends the epoch.
using CopyBytes = std::function<absl::Status(std::byte* to, const std::byte* from, int64_t bytes)>;

// One transport per rank of a group of `size` >= 1 ranks; each is used by one thread. They keep the group
// alive. `copy` moves what AllToAllV moves, whose buffers may lie where only it can reach; empty: host
// memory.
std::vector<std::unique_ptr<Transport>> CreateInprocGroup(int32_t size, CopyBytes copy = nullptr);

}  // namespace lrmoe::transport
