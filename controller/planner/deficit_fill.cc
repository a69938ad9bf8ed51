#include "controller/planner/deficit_fill.h"

#include <algorithm>
#include <limits>

#include "common/random.h"

namespace lrmoe::planner {

namespace {
constexpr double kMostFavour = 0.5;  // how much a rank may count beyond its rows, from the second try on
}  // namespace

const std::vector<CoverSearch::Copy>& DeficitFill::Run(const SearchState& state, int64_t tries) {
  spent_ = 0;
  Random random(0x5fd1c2b7);
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int64_t n = 0; n < tries && least > 0; ++n) {
    favour_.assign(work_.num_ranks, 1);
    if (n > 0)
      for (double& favour : favour_) favour += kMostFavour * random.Uniform();
    Prepare(state);
    Fill(state);
    int64_t excess = 0;
    for (int64_t above : above_) excess += std::max<int64_t>(above, 0);
    if (excess >= least) continue;
    least = excess;
    std::swap(best_, copies_);
  }
  return best_;
}

void DeficitFill::Prepare(const SearchState& state) {
  const RowFlow& flow = state.flow();
  const int32_t num_ranks = work_.num_ranks;
  copies_.clear();
  above_.resize(num_ranks);
  slots_.resize(num_ranks);
  left_.resize(work_.num_experts);
  for (int32_t e = 0; e < work_.num_experts; ++e) left_[e] = flow.instance(e).rows;
  for (int32_t g = 0; g < num_ranks; ++g) {
    above_[g] = flow.load(g) - flow.room(g);
    slots_[g] = state.FreeSlots(g);
    // What memory leaves beside one more replica; ranks with several slots may turn out to hold less.
    if (above_[g] < 0 && slots_[g] > 0) above_[g] = -std::max<int64_t>(state.Room(g, true), 0);
  }
  spent_ += (work_.num_experts + num_ranks) / 4;
}

void DeficitFill::Fill(const SearchState& state) {
  const int32_t num_ranks = work_.num_ranks;
  const auto key = [&](int32_t g) { return static_cast<double>(above_[g]) * favour_[g]; };
  for (;;) {
    int32_t sender = 0, receiver = -1;
    for (int32_t g = 0; g < num_ranks; ++g) {
      if (key(g) > key(sender)) sender = g;
      if (above_[g] < 0 && slots_[g] > 0 && (receiver < 0 || key(g) < key(receiver))) receiver = g;
    }
    spent_ += num_ranks / 2;
    if (above_[sender] <= 0 || receiver < 0) return;
    const int32_t e = Largest(state, sender, receiver);
    if (e < 0) {
      slots_[receiver] = 0;  // of no use to the most overloaded rank: none to others while that stays
      continue;
    }
    const int64_t most = slots_[sender] > 0 ? left_[e] : std::min(left_[e], above_[sender]);
    const int64_t rows = std::min(-above_[receiver], most);
    left_[e] -= rows;
    above_[sender] -= rows;
    above_[receiver] += rows;
    --slots_[receiver];
    copies_.push_back({e, receiver});
  }
}

int32_t DeficitFill::Largest(const SearchState& state, int32_t sender, int32_t receiver) const {
  int32_t best = -1;
  for (int32_t e : owned_.of(sender)) {
    if (left_[e] == 0 || (best >= 0 && left_[e] <= left_[best])) continue;
    if (state.flow().Find(e, receiver) >= 0) continue;
    const bool twice = std::any_of(copies_.begin(), copies_.end(), [&](const CoverSearch::Copy& copy) {
      return copy.expert == e && copy.rank == receiver;
    });
    if (!twice) best = e;
  }
  return best;
}

}  // namespace lrmoe::planner
