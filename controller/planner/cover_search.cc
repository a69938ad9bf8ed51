#include "controller/planner/cover_search.h"

#include <algorithm>

namespace lrmoe::planner {

const std::vector<CoverSearch::Copy>& CoverSearch::Run(const SearchState& state, SenderOrder order,
                                                       int32_t least, int64_t budget) {
  spent_ = 0;
  Collect(state);
  Fill(order);
  if (Repair(budget)) Shrink(least, budget);
  Emit(state);
  return copies_;
}

void CoverSearch::Collect(const SearchState& state) {
  num_senders_ = num_given_ = 0;
  receivers_.clear();
  experts_.clear();
  const RowFlow& flow = state.flow();
  for (int32_t g = 0; g < work_.num_ranks; ++g) {
    const int64_t excess = flow.load(g) - flow.room(g);
    if (excess > 0) {
      if (num_senders_ == static_cast<int32_t>(senders_.size())) senders_.emplace_back();
      Sender& sender = senders_[num_senders_++];
      sender.rank = g;
      sender.need = excess;
      sender.covered = 0;
      sender.receivers.clear();
      sender.first_expert = static_cast<int32_t>(experts_.size());
      for (int32_t e : owned_.of(g))
        if (flow.instance(e).rows > 0) experts_.push_back({e, flow.instance(e).rows});
      sender.end_expert = static_cast<int32_t>(experts_.size());
      if (work_.any_resident)
        std::stable_sort(experts_.begin() + sender.first_expert, experts_.end(),
                         [](const Expert& a, const Expert& b) { return a.rows > b.rows; });
    } else if (state.HasSlot(g)) {
      const int64_t room = std::min(state.Room(g, true), work_.total);
      if (room > 0) receivers_.push_back({g, room, -1});
    }
  }
  left_.resize(experts_.size());
  std::sort(senders_.begin(), senders_.begin() + num_senders_, [](const Sender& a, const Sender& b) {
    return a.need != b.need ? a.need > b.need : a.rank < b.rank;
  });
  std::sort(receivers_.begin(), receivers_.end(), [](const Receiver& a, const Receiver& b) {
    return a.room != b.room ? a.room > b.room : a.rank < b.rank;
  });
  spent_ += work_.num_ranks;
}

int32_t CoverSearch::LargestLeft(const Sender& sender) const {
  int32_t best = untouched_ < sender.end_expert ? untouched_ : -1;
  int64_t most = best >= 0 ? experts_[best].rows : 0;
  for (int32_t i = sender.first_expert; i < untouched_; ++i)
    if (left_[i] > most) best = i, most = left_[i];
  return best;
}

void CoverSearch::Cover(Sender& sender) {
  untouched_ = sender.first_expert;
  sender.covered = 0;
  spent_ += 2;
  for (int32_t r : sender.receivers) {
    const int32_t i = LargestLeft(sender);
    if (i < 0) break;
    if (i == untouched_) left_[untouched_++] = experts_[i].rows;
    const int64_t rows = std::min(left_[i], receivers_[r].room);
    left_[i] -= rows;
    sender.covered += rows;
    ++spent_;
  }
}

void CoverSearch::Give(int32_t receiver, int32_t sender) {
  receivers_[receiver].sender = sender;
  auto& list = senders_[sender].receivers;
  list.insert(std::lower_bound(list.begin(), list.end(), receiver), receiver);
  ++num_given_;
}

void CoverSearch::Take(int32_t receiver) {
  auto& list = senders_[receivers_[receiver].sender].receivers;
  list.erase(std::lower_bound(list.begin(), list.end(), receiver));
  receivers_[receiver].sender = -1;
  --num_given_;
}

// The smallest free room that suffices, else the largest free one. There is a free one.
int32_t CoverSearch::ChooseReceiver(int64_t wanted) {
  const auto end = std::partition_point(receivers_.begin(), receivers_.end(),
                                        [&](const Receiver& receiver) { return receiver.room >= wanted; });
  int32_t r = static_cast<int32_t>(end - receivers_.begin()) - 1;
  while (r >= first_free_ && receivers_[r].sender >= 0) --r;
  if (r >= first_free_) return r;
  while (receivers_[first_free_].sender >= 0) ++first_free_;
  return first_free_;
}

void CoverSearch::Fill(SenderOrder order) {
  const int32_t num_receivers = static_cast<int32_t>(receivers_.size());
  first_free_ = 0;
  while (num_given_ < num_receivers) {
    int32_t worst = -1;
    for (int32_t s = 0; s < num_senders_; ++s) {
      if (senders_[s].shortage() == 0 || senders_[s].first_expert == senders_[s].end_expert) continue;
      if (worst < 0 ||
          (order == SenderOrder::kInterleaved && senders_[s].shortage() > senders_[worst].shortage()))
        worst = s;
    }
    if (worst < 0) return;
    Sender& sender = senders_[worst];
    Cover(sender);  // leaves what is left of each expert
    const int32_t i = LargestLeft(sender);
    const int64_t largest = i < 0 ? 0 : i == untouched_ ? experts_[i].rows : left_[i];
    if (largest == 0) return;
    Give(ChooseReceiver(std::min(sender.shortage(), largest)), worst);
    Cover(sender);
    spent_ += num_senders_ / 2;
  }
}

CoverSearch::Swap CoverSearch::BestSwap(const Sender& sender) const {
  Swap best;
  const int64_t shortage = sender.shortage();
  const int32_t self = static_cast<int32_t>(&sender - senders_.data());
  for (int32_t in = 0; in < static_cast<int32_t>(receivers_.size()); ++in) {
    const Receiver& candidate = receivers_[in];
    if (candidate.sender == self) continue;
    const Sender* loser = candidate.sender < 0 ? nullptr : &senders_[candidate.sender];
    for (int32_t out : sender.receivers) {
      const int64_t more = candidate.room - receivers_[out].room;
      if (more <= 0) continue;
      int64_t gain = std::min(shortage, more);
      if (loser != nullptr)
        gain -= std::max<int64_t>(0, loser->need - loser->covered + more) - loser->shortage();
      if (gain > best.gain) best = {out, in, gain};
    }
  }
  return best;
}

void CoverSearch::Apply(int32_t self, const Swap& swap) {
  const int32_t loser = receivers_[swap.in].sender;
  Take(swap.out);
  if (loser >= 0) {
    Take(swap.in);
    Give(swap.out, loser);
    Cover(senders_[loser]);
  }
  Give(swap.in, self);
  Cover(senders_[self]);
}

// Exchanges receivers until every sender is covered (true), nothing helps or the budget is spent.
bool CoverSearch::Repair(int64_t budget) {
  for (;;) {
    Swap best;
    int32_t self = -1;
    bool covered = true;
    int64_t shortage = 0;
    for (int32_t s = 0; s < num_senders_; ++s) {
      if (senders_[s].shortage() == 0) continue;
      covered = false;
      shortage += senders_[s].shortage();
      if (spent_ > budget) return false;
      const Swap swap = BestSwap(senders_[s]);
      spent_ += static_cast<int64_t>(receivers_.size() * senders_[s].receivers.size()) / 2;
      if (swap.gain > best.gain) best = swap, self = s;
    }
    if (covered) return true;
    if (self < 0) return false;
    Apply(self, best);
    int64_t after = 0;
    for (int32_t s = 0; s < num_senders_; ++s) after += senders_[s].shortage();
    if (after >= shortage) {  // the experts do not divide as the estimate took for granted
      const int32_t loser = receivers_[best.out].sender;
      Take(best.in);
      if (loser >= 0) {
        Take(best.out);
        Give(best.in, loser);
        Cover(senders_[loser]);
      }
      Give(best.out, self);
      Cover(senders_[self]);
      return false;
    }
  }
}

// Gives up the smallest receiver there is, if the others can be shared so that they suffice.
bool CoverSearch::DropOne(int64_t budget) {
  saved_.clear();
  for (const Receiver& receiver : receivers_) saved_.push_back(receiver.sender);
  int32_t smallest = static_cast<int32_t>(receivers_.size()) - 1;
  while (smallest >= 0 && receivers_[smallest].sender < 0) --smallest;
  if (smallest < 0) return false;
  const int32_t loser = receivers_[smallest].sender;
  Take(smallest);
  Cover(senders_[loser]);
  if (Repair(budget)) return true;
  for (int32_t s = 0; s < num_senders_; ++s) senders_[s].receivers.clear();
  num_given_ = 0;
  for (int32_t r = 0; r < static_cast<int32_t>(saved_.size()); ++r) {
    receivers_[r].sender = -1;
    if (saved_[r] >= 0) Give(r, saved_[r]);
  }
  for (int32_t s = 0; s < num_senders_; ++s) Cover(senders_[s]);
  return false;
}

void CoverSearch::Shrink(int32_t least, int64_t budget) {
  while (num_given_ > least && spent_ < budget && DropOne(budget)) {
  }
}

void CoverSearch::Emit(const SearchState& state) {
  copies_.clear();
  for (int32_t s = 0; s < num_senders_; ++s) {
    const Sender& sender = senders_[s];
    untouched_ = sender.first_expert;
    for (int32_t r : sender.receivers) {
      const Receiver& receiver = receivers_[r];
      const int32_t largest = LargestLeft(sender);
      if (largest < 0) break;
      if (largest == untouched_) left_[untouched_++] = experts_[largest].rows;
      const int64_t enough = std::min({left_[largest], receiver.room});
      // Of the experts with enough rows, the one with the most pairs of the receiver's own.
      int32_t chosen = -1;
      int64_t local = -1;
      for (int32_t i = sender.first_expert; i < sender.end_expert; ++i) {
        const int64_t left = i < untouched_ ? left_[i] : experts_[i].rows;
        if (i >= untouched_ && left < enough) break;
        if (left < enough || work_.sources_of(experts_[i].expert)[receiver.rank] <= local) continue;
        if (state.flow().Find(experts_[i].expert, receiver.rank) >= 0) continue;
        chosen = i;
        local = work_.sources_of(experts_[i].expert)[receiver.rank];
      }
      if (chosen < 0) continue;
      while (untouched_ <= chosen) left_[untouched_] = experts_[untouched_].rows, ++untouched_;
      left_[chosen] -= enough;
      copies_.push_back({experts_[chosen].expert, receiver.rank});
    }
  }
}

}  // namespace lrmoe::planner
