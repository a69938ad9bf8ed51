// Shares the ranks with room among the overloaded ones, on plain arrays: fast, near the fewest replicas.
#pragma once

#include <cstdint>
#include <vector>

#include "controller/planner/owned_experts.h"
#include "controller/planner/search_state.h"

namespace lrmoe::planner {

enum class SenderOrder : uint8_t {
  kInterleaved,  // whoever is overloaded most takes the next receiver
  kOneByOne,     // the most overloaded takes receivers until it is covered, then the next
};

// A covering problem: every overloaded rank (sender) needs receivers whose rooms together hold its excess, as
// far as its experts can be divided among them; a receiver serves one sender. Receivers serving several, and
// senders that receive, are left to the flow, which sees what this misses.
class CoverSearch {
 public:
  struct Copy {
    int32_t expert, rank;
  };

  CoverSearch(const Workload& work, const OwnedExperts& owned) : work_(work), owned_(owned) {}

  // Replicas to add to `state`, whose rows are as its instances allow at its target. Aims at `least` of them
  // and spends at most `budget` steps on getting there; fewer may be missing than the senders need. Valid
  // until the next call.
  const std::vector<Copy>& Run(const SearchState& state, SenderOrder order, int32_t least, int64_t budget);
  // Steps of the last Run.
  int64_t spent() const { return spent_; }

 private:
  struct Expert {
    int32_t expert;
    int64_t rows;  // at the owner
  };
  struct Sender {
    int32_t rank;
    int64_t need;     // rows above the target
    int64_t covered;  // of them and beyond, what the receivers can take
    int32_t first_expert, end_expert;
    std::vector<int32_t> receivers;  // ascending: the largest room first
    int64_t shortage() const { return need > covered ? need - covered : 0; }
  };
  struct Receiver {
    int32_t rank;
    int64_t room;
    int32_t sender;  // index, or -1
  };
  // Gives `receiver` to a sender in place of another; a free receiver has no sender to lose it.
  struct Swap {
    int32_t out = -1, in = -1;
    int64_t gain = 0;
  };

  void Collect(const SearchState& state);
  void Fill(SenderOrder order);
  int32_t ChooseReceiver(int64_t wanted);
  bool Repair(int64_t budget);
  Swap BestSwap(const Sender& sender) const;
  void Apply(int32_t sender, const Swap& swap);
  void Shrink(int32_t least, int64_t budget);
  bool DropOne(int64_t budget);
  void Emit(const SearchState& state);

  void Give(int32_t receiver, int32_t sender);
  void Take(int32_t receiver);
  // Recomputes what the sender's receivers can take.
  void Cover(Sender& sender);
  // The expert with the most rows left: position in experts_, or -1.
  int32_t LargestLeft(const Sender& sender) const;

  const Workload& work_;
  const OwnedExperts& owned_;
  std::vector<Sender> senders_;
  std::vector<Receiver> receivers_;  // the largest room first
  std::vector<Expert> experts_;      // by sender, the most rows first
  std::vector<int64_t> left_;        // of experts_, while sharing them
  int32_t untouched_ = 0;            // experts of the sender from here on are whole
  int32_t num_senders_ = 0, num_given_ = 0;
  int32_t first_free_ = 0;  // while filling: every receiver before it has a sender
  std::vector<int32_t> saved_;
  std::vector<Copy> copies_;
  int64_t spent_ = 0;
};

}  // namespace lrmoe::planner
