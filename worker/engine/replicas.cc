#include "worker/engine/replicas.h"

#include <algorithm>
#include <map>

#include "common/check.h"
#include "common/memory_model.h"
#include "common/status_macros.h"

namespace lrmoe::engine {
namespace {

// Experts between each pair of ranks, laid one after another in the order of the transfers. Units are blocks
// of parameters, so that a large expert passes through a small staging buffer.
constexpr int64_t kBlockElements = kExchangeBlockElements;

struct Route {
  StagedTransfer staged;
  std::vector<std::vector<int32_t>> send, recv;  // [G] experts, in order
  int64_t blocks = 0;                            // per expert
};

Route MakeRoute(std::span<const ExpertTransfer> transfers, int32_t rank, int32_t num_ranks,
                int64_t parameters, int64_t element_bytes) {
  Route route;
  route.blocks = (parameters + kBlockElements - 1) / kBlockElements;
  route.staged.unit_bytes = kBlockElements * element_bytes;
  route.staged.send_units.assign(num_ranks, 0);
  route.staged.recv_units.assign(num_ranks, 0);
  route.send.resize(num_ranks);
  route.recv.resize(num_ranks);
  std::map<std::pair<int32_t, int32_t>, int64_t> links;
  std::vector<int64_t> sends(num_ranks, 0), recvs(num_ranks, 0);
  for (const ExpertTransfer& transfer : transfers) {
    int64_t& units = links[{transfer.from, transfer.to}];
    if (units == 0) {
      ++sends[transfer.from];
      ++recvs[transfer.to];
    }
    units += route.blocks;
    route.staged.max_units = std::max(route.staged.max_units, units);
    if (transfer.from == rank) {
      route.send[transfer.to].push_back(transfer.expert_idx);
      route.staged.send_units[transfer.to] += route.blocks;
    }
    if (transfer.to == rank) {
      route.recv[transfer.from].push_back(transfer.expert_idx);
      route.staged.recv_units[transfer.from] += route.blocks;
    }
  }
  for (int32_t r = 0; r < num_ranks; ++r)
    route.staged.max_peers = std::max({route.staged.max_peers, sends[r], recvs[r]});
  return route;
}

// Calls visit(expert, first element, elements) for each block of [first, first + count) of a rank's experts.
template <typename Visit>
void ForEachBlock(const Route& route, const std::vector<int32_t>& experts, int64_t parameters, int64_t first,
                  int64_t count, Visit visit) {
  for (int64_t unit = first; unit < first + count; ++unit) {
    const int64_t element = unit % route.blocks * kBlockElements;
    visit(experts[unit / route.blocks], element, std::min(kBlockElements, parameters - element));
  }
}

}  // namespace

std::vector<ExpertTransfer> ReplicaDirectory::Missing(const LayerPlan& plan, std::span<const int32_t> owner,
                                                      ParameterVersion version) const {
  std::vector<ExpertTransfer> out;
  const std::vector<Held>& held = layers_[plan.invocation.layer];
  for (const InstancePlan& instance : plan.instances) {
    if (instance.owner) continue;
    const bool current = std::any_of(held.begin(), held.end(), [&](const Held& h) {
      return h.expert_idx == instance.expert_idx && h.rank_idx == instance.rank_idx && h.version == version;
    });
    if (!current) out.push_back({instance.expert_idx, owner[instance.expert_idx], instance.rank_idx});
  }
  return out;
}

std::vector<ExpertTransfer> ReplicaDirectory::Stale(int32_t layer, std::span<const int32_t> owner,
                                                    ParameterVersion version) const {
  std::vector<ExpertTransfer> out;
  for (const Held& held : layers_[layer])
    if (held.latest && held.version != version)
      out.push_back({held.expert_idx, owner[held.expert_idx], held.rank_idx});
  const auto by_expert_and_rank = [](const ExpertTransfer& a, const ExpertTransfer& b) {
    return std::pair(a.expert_idx, a.to) < std::pair(b.expert_idx, b.to);
  };
  std::sort(out.begin(), out.end(), by_expert_and_rank);
  return out;
}

void ReplicaDirectory::SetRefreshed(int32_t layer, ParameterVersion version) {
  for (Held& held : layers_[layer])
    if (held.latest) held.version = version;
}

void ReplicaDirectory::SetLatest(const LayerPlan& plan) {
  for (Held& held : layers_[plan.invocation.layer]) {
    held.latest =
        std::any_of(plan.instances.begin(), plan.instances.end(), [&](const InstancePlan& instance) {
          return instance.expert_idx == held.expert_idx && instance.rank_idx == held.rank_idx;
        });
  }
}

void ReplicaDirectory::SetHeld(const LayerPlan& plan, ParameterVersion version) {
  std::vector<Held>& held = layers_[plan.invocation.layer];
  for (const InstancePlan& instance : plan.instances) {
    if (instance.owner) continue;
    auto it = std::find_if(held.begin(), held.end(), [&](const Held& h) {
      return h.expert_idx == instance.expert_idx && h.rank_idx == instance.rank_idx;
    });
    if (it == held.end())
      held.push_back({instance.expert_idx, instance.rank_idx, version, true});
    else
      it->version = version;
  }
}

std::vector<ExpertTransfer> ReplicaDirectory::DropUnused(int32_t layer,
                                                         std::span<const LayerPlan* const> plans) {
  std::vector<ExpertTransfer> dropped;
  std::erase_if(layers_[layer], [&](const Held& held) {
    if (held.latest) return false;
    for (const LayerPlan* plan : plans)
      for (const InstancePlan& instance : plan->instances)
        if (instance.expert_idx == held.expert_idx && instance.rank_idx == held.rank_idx) return false;
    dropped.push_back({held.expert_idx, 0, held.rank_idx});
    return true;
  });
  return dropped;
}

void ReplicaDirectory::Clear() {
  for (auto& layer : layers_) layer.clear();
}

absl::Status BringWeights(Exchange& exchange, Arena& arena, ExpertStore& store, int32_t layer,
                          std::span<const ExpertTransfer> transfers, ParameterVersion version) {
  if (transfers.empty()) return absl::OkStatus();
  kernels::Device& device = store.device();
  const int64_t parameters = store.parameters();
  const int64_t element_bytes = SizeInBytes(store.model().shape.dtype);
  const Route route = MakeRoute(transfers, exchange.rank(), exchange.num_ranks(), parameters, element_bytes);
  const auto fill = [&](int32_t peer, int64_t first, int64_t count, std::byte* out) {
    ForEachBlock(
        route, route.send[peer], parameters, first, count, [&](int32_t e, int64_t element, int64_t n) {
          device.Copy(out, store.Find(layer, e)->weights + element * element_bytes, n * element_bytes);
          out += kBlockElements * element_bytes;
        });
  };
  const auto take = [&](int32_t peer, int64_t first, int64_t count, const std::byte* in) {
    ForEachBlock(
        route, route.recv[peer], parameters, first, count, [&](int32_t e, int64_t element, int64_t n) {
          device.Copy(store.AddReplica(layer, e).weights + element * element_bytes, in, n * element_bytes);
          in += kBlockElements * element_bytes;
        });
  };
  LRMOE_RETURN_IF_ERROR(exchange.Staged("replica weights", route.staged, arena, fill, take));
  for (const ExpertTransfer& transfer : transfers) {
    if (transfer.to != exchange.rank()) continue;
    store.RepackWeights(layer, transfer.expert_idx);
    store.AddReplica(layer, transfer.expert_idx).version = version;
  }
  return absl::OkStatus();
}

absl::Status SumGradients(Exchange& exchange, Arena& arena, ExpertStore& store, const LayerPlan& plan) {
  kernels::Device& device = store.device();
  const int32_t layer = plan.invocation.layer;
  const int64_t parameters = store.parameters();
  std::vector<ExpertTransfer> transfers;
  for (const InstancePlan& instance : plan.instances)
    if (!instance.owner && instance.backward_rows > 0)
      transfers.push_back({instance.expert_idx, instance.rank_idx, store.owner()[instance.expert_idx]});
  for (const ExpertTransfer& transfer : transfers)
    if (transfer.from == exchange.rank() || transfer.to == exchange.rank())
      store.Gradient(layer, transfer.expert_idx);  // zeros where they count
  const Route route = MakeRoute(transfers, exchange.rank(), exchange.num_ranks(), parameters, sizeof(float));
  const auto fill = [&](int32_t peer, int64_t first, int64_t count, std::byte* out) {
    ForEachBlock(route, route.send[peer], parameters, first, count,
                 [&](int32_t e, int64_t element, int64_t n) {
                   device.Copy(out, store.Find(layer, e)->gradient + element, n * sizeof(float));
                   out += kBlockElements * sizeof(float);
                 });
  };
  // Peers are taken by ascending rank within a round and every element of all peers' gradients of one expert
  // lies in the same order of rounds on every run, so the sum is repeatable.
  const auto take = [&](int32_t peer, int64_t first, int64_t count, const std::byte* in) {
    ForEachBlock(
        route, route.recv[peer], parameters, first, count, [&](int32_t e, int64_t element, int64_t n) {
          device.AddInPlace(n, store.Find(layer, e)->gradient + element, reinterpret_cast<const float*>(in));
          in += kBlockElements * sizeof(float);
        });
  };
  LRMOE_RETURN_IF_ERROR(exchange.Staged("replica gradients", route.staged, arena, fill, take));
  for (const ExpertTransfer& transfer : transfers)
    if (transfer.from == exchange.rank()) store.Find(layer, transfer.expert_idx)->gradient_is_zero = true;
  return absl::OkStatus();
}

}  // namespace lrmoe::engine
