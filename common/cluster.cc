#include "common/cluster.h"

namespace lrmoe {

std::vector<int32_t> ContiguousOwners(int32_t num_experts, int32_t num_ranks) {
  std::vector<int32_t> owner(num_experts);
  for (int32_t e = 0; e < num_experts; ++e)
    owner[e] = static_cast<int32_t>(int64_t{e} * num_ranks / num_experts);
  return owner;
}

}  // namespace lrmoe
