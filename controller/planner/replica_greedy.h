// Adds replicas one at a time across the bottleneck that the allocation reports.
#pragma once

#include <cstdint>
#include <vector>

#include "common/random.h"
#include "controller/planner/owned_experts.h"
#include "controller/planner/search_state.h"

namespace lrmoe::planner {

enum class ReceiverRule : uint8_t {
  kLargest,  // the rank with the most room: few copies when one sender overflows many ranks
  kBestFit,  // the rank whose room is just enough, else the one with the most: keeps large rooms for large
             // overflows
  kRandom,   // one of the best few of either kind
};

struct ReplicaChoice {
  int32_t expert = -1;
  int32_t rank = -1;
  int64_t gain = 0;  // rows it can take off the cut, at most
};

class ReplicaGreedy {
 public:
  ReplicaGreedy(const Workload& work, const OwnedExperts& owned) : work_(work), owned_(owned) {}

  // Adds replicas until the state fits its target (true), has `max_new` new replicas and still does not fit,
  // or no replica can help (false).
  bool Complete(SearchState& state, ReceiverRule rule, int32_t max_new, Random* random);

  // Every replica across the cut of the state's last failed Fit: experts confined to it, on ranks outside
  // with a free slot; the largest gain first. Valid until the next call.
  const std::vector<ReplicaChoice>& Choices(const SearchState& state);

 private:
  struct Receiver {
    int32_t rank;
    int64_t room;
  };
  void FindExperts(const SearchState& state, int32_t experts_per_rank);
  void FindReceivers(const SearchState& state, bool with_full_ranks);
  ReplicaChoice Choose(const SearchState& state, ReceiverRule rule, Random* random);

  const Workload& work_;
  const OwnedExperts& owned_;
  std::vector<int32_t> experts_;  // confined to the cut, rows descending
  std::vector<Receiver> receivers_;
  std::vector<int64_t> free_;  // [E] rows that the ranks of an expert's instances can still take together
  std::vector<int32_t> seen_;  // [E] valid where the stamp is current
  int32_t stamp_ = 0;
  std::vector<ReplicaChoice> choices_;
};

}  // namespace lrmoe::planner
