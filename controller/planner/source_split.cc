#include "controller/planner/source_split.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace lrmoe::planner {
namespace {

class Splitter {
 public:
  Splitter(const PlanningProblem& problem, const Workload& work, const PlacedRows& placed, SourceSplit& out)
      : work_(work), placed_(placed), out_(out), node_(work.num_ranks), order_(work.all_ranks) {
    for (int32_t g = 0; g < work.num_ranks; ++g) node_[g] = problem.cluster.ranks[g].node;
    std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) { return node_[a] < node_[b]; });
    // [first, last) of each rank's node within order_.
    node_begin_.resize(work.num_ranks);
    node_end_.resize(work.num_ranks);
    for (int32_t i = 0; i < work.num_ranks;) {
      int32_t end = i;
      while (end < work.num_ranks && node_[order_[end]] == node_[order_[i]]) ++end;
      for (int32_t j = i; j < end; ++j) node_begin_[order_[j]] = i, node_end_[order_[j]] = end;
      i = end;
    }
  }

  void SplitExpert(int32_t e, SplitRule rule) {
    const int32_t begin = placed_.first[e], end = placed_.first[e + 1];
    const auto sources = work_.sources_of(e);
    if (end - begin == 1) {
      out_.by_source[begin].assign(sources.begin(), sources.end());
      return;
    }
    left_.assign(sources.begin(), sources.end());
    room_.assign(placed_.forward.begin() + begin, placed_.forward.begin() + end);
    for (int32_t i = begin; i < end; ++i) {
      out_.by_source[i].assign(work_.num_ranks, 0);
      if (rule == SplitRule::kLocalFirst || rule == SplitRule::kLocalThenProportional)
        Take(i, i - begin, placed_.rank[i]);
    }
    if (rule == SplitRule::kLocalFirst) TakeOnNode(begin, end);
    if (rule == SplitRule::kLocalThenProportional || rule == SplitRule::kProportional)
      TakeInProportion(begin, end);
    TakeInOrder(begin, end, rule == SplitRule::kLocalFirst);
  }

  void CountLinks() {
    const int32_t num_ranks = work_.num_ranks;
    LinkRows& links = out_.links;
    links.sent_on_node.assign(num_ranks, 0);
    links.sent_off_node.assign(num_ranks, 0);
    links.received_on_node.assign(num_ranks, 0);
    links.received_off_node.assign(num_ranks, 0);
    const bool one_node = node_begin_[0] == 0 && node_end_[0] == num_ranks;
    for (int32_t i = 0; i < placed_.size(); ++i) {
      const int32_t rank = placed_.rank[i];
      const auto& rows = out_.by_source[i];
      if (one_node) {
        int64_t sum = 0;
        for (int32_t s = 0; s < num_ranks; ++s) links.sent_on_node[s] += rows[s], sum += rows[s];
        links.sent_on_node[rank] -= rows[rank];
        links.received_on_node[rank] += sum - rows[rank];
        continue;
      }
      for (int32_t s = 0; s < num_ranks; ++s) {
        if (rows[s] == 0 || s == rank) continue;
        const bool on_node = node_[s] == node_[rank];
        (on_node ? links.sent_on_node : links.sent_off_node)[s] += rows[s];
        (on_node ? links.received_on_node : links.received_off_node)[rank] += rows[s];
      }
    }
  }

 private:
  void TakeOnNode(int32_t begin, int32_t end) {
    for (int32_t i = begin; i < end; ++i) {
      const int32_t rank = placed_.rank[i];
      for (int32_t j = node_begin_[rank]; j < node_end_[rank] && room_[i - begin] > 0; ++j)
        Take(i, i - begin, order_[j]);
    }
  }

  // What is left of every source, in proportion to the room of the instances; whole rows, rounded down.
  void TakeInProportion(int32_t begin, int32_t end) {
    const std::vector<int64_t> room = room_;
    const int64_t total = std::accumulate(room.begin(), room.end(), int64_t{0});
    if (total == 0) return;
    for (int32_t s = 0; s < work_.num_ranks; ++s) {
      const auto rows = static_cast<unsigned __int128>(left_[s]);
      for (int32_t i = begin; i < end && rows > 0; ++i)
        Take(i, i - begin, s,
             static_cast<int64_t>(rows * static_cast<uint64_t>(room[i - begin]) /
                                  static_cast<uint64_t>(total)));
    }
  }

  // Sources in ascending order; instances in the order of the plan, or by rank.
  void TakeInOrder(int32_t begin, int32_t end, bool plan_order) {
    std::vector<int32_t> order(end - begin);
    std::iota(order.begin(), order.end(), begin);
    if (!plan_order)
      std::sort(order.begin(), order.end(),
                [&](int32_t a, int32_t b) { return placed_.rank[a] < placed_.rank[b]; });
    int32_t source = 0;
    for (int32_t i : order) {
      while (room_[i - begin] > 0 && source < work_.num_ranks) {
        Take(i, i - begin, source);
        if (left_[source] == 0) ++source;
      }
    }
  }

  void Take(int32_t instance, int32_t position, int32_t source,
            int64_t most = std::numeric_limits<int64_t>::max()) {
    const int64_t rows = std::min({left_[source], room_[position], most});
    left_[source] -= rows;
    room_[position] -= rows;
    out_.by_source[instance][source] += rows;
  }

  const Workload& work_;
  const PlacedRows& placed_;
  SourceSplit& out_;
  std::vector<int32_t> node_, order_, node_begin_, node_end_;
  std::vector<int64_t> left_, room_;
};

}  // namespace

SourceSplit SplitBySource(const PlanningProblem& problem, const Workload& work, const PlacedRows& placed,
                          SplitRule rule) {
  SourceSplit out;
  out.by_source.resize(placed.size());
  Splitter splitter(problem, work, placed, out);
  for (int32_t e = 0; e < work.num_experts; ++e) splitter.SplitExpert(e, rule);
  splitter.CountLinks();
  return out;
}

}  // namespace lrmoe::planner
