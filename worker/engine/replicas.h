// Replica weights in, replica gradients out. Every rank sees every plan, so every rank knows which rank holds
// which version of which replica without asking.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "common/ids.h"
#include "common/plan.h"
#include "kernels/kernels.h"
#include "worker/engine/exchange.h"
#include "worker/engine/expert_store.h"

namespace lrmoe::engine {

// An expert's parameters or gradient on their way between its owner and a replica.
struct ExpertTransfer {
  int32_t expert_idx = 0;
  int32_t from = 0;
  int32_t to = 0;
  bool operator==(const ExpertTransfer&) const = default;
};

// Who holds which replica at which version, over all ranks. Pure.
class ReplicaDirectory {
 public:
  explicit ReplicaDirectory(int32_t num_layers) : layers_(num_layers) {}

  // Replicas of the plan that their rank does not hold at `version`: by (expert, rank).
  std::vector<ExpertTransfer> Missing(const LayerPlan& plan, std::span<const int32_t> owner,
                                      ParameterVersion version) const;
  // Replicas of the layer's latest plan that are held at another version than `version`: by (expert, rank).
  std::vector<ExpertTransfer> Stale(int32_t layer, std::span<const int32_t> owner,
                                    ParameterVersion version) const;
  // What Stale returned is now held at `version`.
  void SetRefreshed(int32_t layer, ParameterVersion version);
  // The plan is the layer's latest: only its replicas, and those of open contexts, are worth holding.
  void SetLatest(const LayerPlan& plan);
  // The plan's replicas are now held at `version`.
  void SetHeld(const LayerPlan& plan, ParameterVersion version);
  // Forgets and returns the replicas of a layer, as (expert, to), that neither the latest plan nor any of
  // `plans` uses.
  std::vector<ExpertTransfer> DropUnused(int32_t layer, std::span<const LayerPlan* const> plans);
  void Clear();

 private:
  struct Held {
    int32_t expert_idx, rank_idx;
    ParameterVersion version;
    bool latest;
  };
  std::vector<std::vector<Held>> layers_;  // by (expert, rank)
};

// `arena`: staging, in the memory of the store's device.
// Collective over the ranks of the transfers. Brings weights from owners to replicas; they have `version`
// then.
absl::Status BringWeights(Exchange& exchange, Arena& arena, ExpertStore& store, int32_t layer,
                          std::span<const ExpertTransfer> transfers, ParameterVersion version);

// Collective. Adds the gradients of the plan's replicas that ran backward rows to their owners', in a fixed
// order, and zeroes them at the replicas.
absl::Status SumGradients(Exchange& exchange, Arena& arena, ExpertStore& store, const LayerPlan& plan);

}  // namespace lrmoe::engine
