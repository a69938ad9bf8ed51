// Fills whole deficits: the most overloaded rank hands the emptiest one all it can take.
#pragma once

#include <cstdint>
#include <vector>

#include "controller/planner/cover_search.h"
#include "controller/planner/owned_experts.h"
#include "controller/planner/search_state.h"

namespace lrmoe::planner {

// Where slots are scarce a receiver must not be left half empty: it takes its whole deficit, also when that
// brings the sender below the target, as long as the sender has a slot to be filled again. (The fill of
// MoonEP, with slots and a tolerance.)
class DeficitFill {
 public:
  DeficitFill(const Workload& work, const OwnedExperts& owned) : work_(work), owned_(owned) {}

  // Replicas to add to `state`, whose rows are as its instances allow at its target. Which rank is next is a
  // little random from the second of `tries` on; the one that leaves the fewest rows above the target counts.
  // Valid until the next call.
  const std::vector<CoverSearch::Copy>& Run(const SearchState& state, int64_t tries);
  // Steps of the last Run.
  int64_t spent() const { return spent_; }

 private:
  void Prepare(const SearchState& state);
  void Fill(const SearchState& state);
  // The expert of `sender` with the most rows left that `receiver` does not hold, or -1.
  int32_t Largest(const SearchState& state, int32_t sender, int32_t receiver) const;

  const Workload& work_;
  const OwnedExperts& owned_;
  std::vector<int64_t> above_;  // [G] rows above the target; negative: room
  std::vector<int64_t> left_;   // [E] rows at the owner
  std::vector<int32_t> slots_;  // [G] free ones
  std::vector<double> favour_;  // [G] times its rows above or below the target
  std::vector<CoverSearch::Copy> copies_, best_;
  int64_t spent_ = 0;
};

}  // namespace lrmoe::planner
