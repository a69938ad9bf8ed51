// What the planner knows of the machines: ranks, nodes, bandwidths.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace lrmoe {

struct RankResources {
  int32_t node = 0;
  int32_t replica_slots = 1;  // replicas of one layer this rank may hold; 0: none
  // Available to one layer's experts, replicas and token buffers. Default: unlimited.
  int64_t memory_bytes = std::numeric_limits<int64_t>::max();
  double rows_per_ms = 1000.0;  // service rate of one expert row, forward and backward; > 0
  bool operator==(const RankResources&) const = default;
};

struct Bandwidth {
  double intra_node_gb_per_s = 200.0;  // 10^9 bytes per second between two ranks of one node; > 0
  double inter_node_gb_per_s = 25.0;   // between two ranks of different nodes; > 0
  bool operator==(const Bandwidth&) const = default;
};

struct Cluster {
  std::vector<RankResources> ranks;  // one per source rank
  Bandwidth bandwidth;
  bool operator==(const Cluster&) const = default;
};

// Contiguous ownership used by workers and controller alike: expert_idx * num_ranks / num_experts.
// Works for any num_experts >= 1, also when it is not divisible by num_ranks or smaller than it.
std::vector<int32_t> ContiguousOwners(int32_t num_experts, int32_t num_ranks);

}  // namespace lrmoe
