#include "controller/planner/replica_greedy.h"

#include <algorithm>

namespace lrmoe::planner {

void ReplicaGreedy::FindExperts(const SearchState& state, int32_t experts_per_rank) {
  experts_.clear();
  for (int32_t g : state.flow().cut()) {
    int32_t found = 0;
    for (int32_t e : owned_.of(g)) {
      if (work_.rows[e] == 0 || (experts_per_rank > 0 && found == experts_per_rank)) break;
      if (!state.Confined(e)) continue;
      experts_.push_back(e);
      ++found;
    }
  }
  std::sort(experts_.begin(), experts_.end(), [&](int32_t a, int32_t b) {
    return work_.rows[a] != work_.rows[b] ? work_.rows[a] > work_.rows[b] : a < b;
  });
}

void ReplicaGreedy::FindReceivers(const SearchState& state, bool with_full_ranks) {
  receivers_.clear();
  const RowFlow& flow = state.flow();
  // Rows that a rank's replicated experts can pass on make room too: what their instances have free together.
  if (++stamp_ == 1) seen_.resize(work_.num_experts, 0), free_.resize(work_.num_experts, 0);
  // No more than all rows there are: without limits a room is as large as an integer can be.
  const auto free_at = [&](int32_t g) {
    return std::clamp<int64_t>(flow.room(g) - flow.load(g), 0, work_.total);
  };
  const auto free_of = [&](int32_t e) {
    if (seen_[e] == stamp_) return free_[e];
    seen_[e] = stamp_;
    free_[e] = 0;
    for (int32_t j = e; j >= 0; j = flow.instance(j).next_of_expert)
      free_[e] += free_at(flow.instance(j).rank);
    return free_[e];
  };
  for (int32_t g = 0; g < work_.num_ranks; ++g) {
    if (flow.InCut(g) || !state.HasSlot(g)) continue;
    int64_t room = std::min(state.Room(g, true), work_.total);
    for (int32_t i = flow.first_on_rank(g); i >= 0; i = flow.instance(i).next_on_rank) {
      const int64_t rows = flow.instance(i).rows;
      if (rows > 0) room += std::min(rows, free_of(flow.instance(i).expert) - free_at(g));
    }
    if (room > 0 || with_full_ranks) receivers_.push_back({g, std::max<int64_t>(room, 0)});
  }
}

const std::vector<ReplicaChoice>& ReplicaGreedy::Choices(const SearchState& state) {
  FindExperts(state, 0);
  FindReceivers(state, true);
  choices_.clear();
  for (int32_t e : experts_)
    for (const Receiver& receiver : receivers_)
      choices_.push_back({e, receiver.rank, std::min(work_.rows[e], receiver.room)});
  std::stable_sort(choices_.begin(), choices_.end(),
                   [](const ReplicaChoice& a, const ReplicaChoice& b) { return a.gain > b.gain; });
  return choices_;
}

ReplicaChoice ReplicaGreedy::Choose(const SearchState& state, ReceiverRule rule, Random* random) {
  FindExperts(state, 4);
  FindReceivers(state, false);
  if (experts_.empty() || receivers_.empty()) return {};
  const int64_t wanted = std::min(state.CutExcess(), work_.rows[experts_[0]]);
  const Receiver* best = nullptr;
  if (rule == ReceiverRule::kRandom) {
    rule = random->Below(2) == 0 ? ReceiverRule::kLargest : ReceiverRule::kBestFit;
    // Half of the time out of a random part of the receivers.
    if (receivers_.size() > 1 && random->Below(2) == 0) {
      const size_t skip = random->Below(receivers_.size());
      receivers_.erase(receivers_.begin() + static_cast<int64_t>(skip));
    }
  }
  for (const Receiver& receiver : receivers_) {
    bool better = best == nullptr || receiver.room > best->room;
    if (rule == ReceiverRule::kBestFit && best != nullptr && best->room >= wanted)
      better = receiver.room >= wanted && receiver.room < best->room;
    if (better) best = &receiver;
  }
  // Of the experts that are large enough, the one with the most pairs of the receiver's own.
  const int64_t enough = std::min(wanted, best->room);
  int32_t expert = experts_[0];
  for (int32_t e : experts_) {
    if (work_.rows[e] < enough) break;
    if (work_.sources_of(e)[best->rank] > work_.sources_of(expert)[best->rank]) expert = e;
  }
  return {expert, best->rank, std::min(work_.rows[expert], best->room)};
}

bool ReplicaGreedy::Complete(SearchState& state, ReceiverRule rule, int32_t max_new, Random* random) {
  while (!state.Fit()) {
    if (state.num_new() >= max_new) return false;
    const ReplicaChoice choice = Choose(state, rule, random);
    state.flow().SpendWork(work_.num_ranks);
    if (choice.expert < 0) return false;
    state.Add(choice.expert, choice.rank);
  }
  return true;
}

}  // namespace lrmoe::planner
