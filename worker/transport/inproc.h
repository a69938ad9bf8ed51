// Ranks as threads of one process: for tests, benchmarks and single-rank workers.
#pragma once

#include <memory>
#include <vector>

#include "worker/transport/transport.h"

namespace lrmoe::transport {

// One transport per rank of a group of `size` >= 1 ranks; each is used by one thread. They keep the group
// alive.
std::vector<std::unique_ptr<Transport>> CreateInprocGroup(int32_t size);

}  // namespace lrmoe::transport
