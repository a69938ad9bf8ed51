#include "controller/core/planning_input.h"

#include <algorithm>
#include <limits>
#include <string>

namespace lrmoe::core {
namespace {

double LowestKnown(const std::vector<Hello>& hellos, double Hello::*field, double otherwise) {
  double lowest = std::numeric_limits<double>::infinity();
  for (const Hello& hello : hellos)
    if (hello.*field > 0) lowest = std::min(lowest, hello.*field);
  return lowest == std::numeric_limits<double>::infinity() ? otherwise : lowest;
}

double MeanServiceRate(const std::vector<Hello>& hellos) {
  double sum = 0;
  int known = 0;
  for (const Hello& hello : hellos) {
    if (hello.rows_per_ms <= 0) continue;
    sum += hello.rows_per_ms;
    ++known;
  }
  return known == 0 ? RankResources{}.rows_per_ms : sum / known;
}

}  // namespace

Cluster ClusterOf(const std::vector<Hello>& hellos, int32_t num_layers) {
  std::vector<std::string> nodes;
  for (const Hello& hello : hellos) nodes.push_back(hello.node);
  std::sort(nodes.begin(), nodes.end());
  nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());

  Cluster cluster;
  const double mean_rate = MeanServiceRate(hellos);
  for (const Hello& hello : hellos) {
    RankResources rank;
    rank.node =
        static_cast<int32_t>(std::lower_bound(nodes.begin(), nodes.end(), hello.node) - nodes.begin());
    rank.replica_slots = hello.replica_slots;
    if (hello.memory_budget_bytes > 0) rank.memory_bytes = hello.memory_budget_bytes / num_layers;
    rank.rows_per_ms = hello.rows_per_ms > 0 ? hello.rows_per_ms : mean_rate;
    cluster.ranks.push_back(rank);
  }
  cluster.bandwidth.intra_node_gb_per_s =
      LowestKnown(hellos, &Hello::intra_node_gb_per_s, cluster.bandwidth.intra_node_gb_per_s);
  cluster.bandwidth.inter_node_gb_per_s =
      LowestKnown(hellos, &Hello::inter_node_gb_per_s, cluster.bandwidth.inter_node_gb_per_s);
  return cluster;
}

MemoryModelOptions MemoryModelOf(const LayerShape& shape, const Policy& policy, const Hello& hello) {
  MemoryModelOptions options = lrmoe::MemoryModelOf(shape);
  options.exact_router_gradient = policy.router_gradient == RouterGradient::kExact;
  options.recompute_activation = hello.recompute_activation;
  options.optimizer_on_device = hello.optimizer_on_device;
  options.packs_weights =
      shape.dtype == DataType::kBf16 ? hello.packs_bf16_weights : hello.packs_fp32_weights;
  return options;
}

}  // namespace lrmoe::core
