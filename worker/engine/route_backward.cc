#include "worker/engine/route_backward.h"

#include <algorithm>

#include "common/check.h"

namespace lrmoe::engine {
namespace {

// Instances of one expert: [first, last) in plan.instances.
template <typename Visit>
void ForEachExpert(const LayerPlan& plan, Visit visit) {
  for (size_t first = 0; first < plan.instances.size();) {
    size_t last = first;
    while (last < plan.instances.size() &&
           plan.instances[last].expert_idx == plan.instances[first].expert_idx)
      ++last;
    visit(first, last);
    first = last;
  }
}

int64_t KeptAt(const LayerPlan& plan, const KeptCounts& kept, size_t i) {
  int64_t sum = 0;
  for (size_t s = 0; s < plan.ranks.size(); ++s) sum += kept.at(i, static_cast<int32_t>(s));
  return sum;
}

// Kept pairs of (instance, source) that stay: all but the moved ones, which are always the last.
std::vector<int64_t> Moved(std::span<const Move> moves, size_t num_instances, int32_t source_idx) {
  std::vector<int64_t> moved(num_instances, 0);
  for (const Move& move : moves)
    if (move.source_idx == source_idx) moved[move.from_instance] += move.count;
  return moved;
}

// Instances of an expert other than `from` with room, nearest first.
std::vector<size_t> Nearest(const LayerPlan& plan, size_t first, size_t last, size_t from,
                            std::span<const int32_t> node) {
  std::vector<size_t> out;
  for (size_t j = first; j < last; ++j)
    if (j != from) out.push_back(j);
  const int32_t home = node[plan.instances[from].rank_idx];
  std::sort(out.begin(), out.end(), [&](size_t a, size_t b) {
    const int32_t rank_a = plan.instances[a].rank_idx, rank_b = plan.instances[b].rank_idx;
    const bool far_a = node[rank_a] != home, far_b = node[rank_b] != home;
    return far_a != far_b ? far_b : rank_a < rank_b;
  });
  return out;
}

// Sends the last `overflow` kept pairs of instance `from` away, in (source, kept number) order.
void MoveOverflow(const LayerPlan& plan, const KeptCounts& kept, size_t from, int64_t overflow,
                  std::span<const size_t> targets, std::vector<int64_t>& room, std::vector<Move>& moves) {
  const auto num_sources = static_cast<int32_t>(plan.ranks.size());
  // Where the moved pairs begin: stepping back over whole sources.
  int32_t source = num_sources;
  int64_t left = overflow;
  int64_t first_kept = 0;
  while (left > 0) {
    --source;
    const int64_t here = kept.at(from, source);
    first_kept = std::max<int64_t>(0, here - left);
    left -= std::min(left, here);
  }
  size_t t = 0;
  for (; source < num_sources; ++source, first_kept = 0) {
    while (first_kept < kept.at(from, source)) {
      while (room[targets[t]] == 0) ++t;
      const int64_t count = std::min(kept.at(from, source) - first_kept, room[targets[t]]);
      moves.push_back(
          {static_cast<int32_t>(from), static_cast<int32_t>(targets[t]), source, first_kept, count});
      room[targets[t]] -= count;
      first_kept += count;
    }
  }
}

}  // namespace

std::vector<Move> PlanMoves(const LayerPlan& plan, const KeptCounts& kept, std::span<const int32_t> node) {
  std::vector<Move> moves;
  std::vector<int64_t> room(plan.instances.size(), 0);
  ForEachExpert(plan, [&](size_t first, size_t last) {
    if (last - first == 1) return;  // everything stays: backward_rows is the quota
    std::vector<int64_t> overflow(last - first, 0);
    for (size_t i = first; i < last; ++i) {
      const int64_t excess = KeptAt(plan, kept, i) - plan.instances[i].backward_rows;
      overflow[i - first] = std::max<int64_t>(0, excess);
      room[i] = std::max<int64_t>(0, -excess);
    }
    for (size_t i = first; i < last; ++i) {
      if (overflow[i - first] == 0) continue;
      const std::vector<size_t> targets = Nearest(plan, first, last, i, node);
      MoveOverflow(plan, kept, i, overflow[i - first], targets, room, moves);
    }
  });
  return moves;
}

SourceSegments SegmentsFrom(const LayerPlan& plan, const KeptCounts& kept, std::span<const Move> moves,
                            int32_t rank) {
  const size_t num_instances = plan.instances.size();
  const std::vector<int64_t> moved = Moved(moves, num_instances, rank);
  std::vector<std::vector<size_t>> moves_to(num_instances), on_rank(plan.ranks.size());
  for (size_t m = 0; m < moves.size(); ++m)
    if (moves[m].source_idx == rank) moves_to[moves[m].to_instance].push_back(m);
  for (size_t i = 0; i < num_instances; ++i) on_rank[plan.instances[i].rank_idx].push_back(i);

  SourceSegments out;
  out.send_rows.assign(plan.ranks.size(), 0);
  int64_t position = 0;
  const auto add = [&](size_t d, int32_t to, int32_t from, int64_t first_kept, int64_t count) {
    if (count == 0) return;
    out.segments.push_back({to, from, rank, first_kept, count, 0, position});
    position += count;
    out.send_rows[d] += count;
  };
  for (size_t d = 0; d < on_rank.size(); ++d) {
    for (size_t i : on_rank[d]) {
      const auto to = static_cast<int32_t>(i);
      add(d, to, to, 0, kept.at(i, rank) - moved[i]);
      for (size_t m : moves_to[i]) add(d, to, moves[m].from_instance, moves[m].first_kept, moves[m].count);
    }
  }
  return out;
}

ExecutorSegments SegmentsAt(const LayerPlan& plan, const KeptCounts& kept, std::span<const Move> moves,
                            int32_t rank) {
  const auto num_sources = static_cast<int32_t>(plan.ranks.size());
  const size_t num_instances = plan.instances.size();
  std::vector<std::vector<size_t>> moves_to(num_instances);
  std::vector<std::vector<int64_t>> moved(num_instances);  // by source, of instances here that lose pairs
  for (size_t m = 0; m < moves.size(); ++m) {
    if (plan.instances[moves[m].to_instance].rank_idx == rank) moves_to[moves[m].to_instance].push_back(m);
    if (plan.instances[moves[m].from_instance].rank_idx != rank) continue;
    moved[moves[m].from_instance].resize(num_sources, 0);
    moved[moves[m].from_instance][moves[m].source_idx] += moves[m].count;
  }

  ExecutorSegments out;
  out.recv_rows.assign(num_sources, 0);
  const auto add = [&](int32_t to, int32_t from, int32_t source, int64_t first_kept, int64_t count) {
    if (count == 0) return;
    // position counts from the start of the source's part; its base is added below.
    out.segments.push_back({to, from, source, first_kept, count, out.rows, out.recv_rows[source]});
    out.rows += count;
    out.recv_rows[source] += count;
  };
  for (size_t i = 0; i < num_instances; ++i) {
    if (plan.instances[i].rank_idx != rank) continue;
    const auto to = static_cast<int32_t>(i);
    const int64_t rows_before = out.rows;
    for (int32_t s = 0; s < num_sources; ++s)
      add(to, to, s, 0, kept.at(i, s) - (moved[i].empty() ? 0 : moved[i][s]));
    for (size_t m : moves_to[i])
      add(to, moves[m].from_instance, moves[m].source_idx, moves[m].first_kept, moves[m].count);
    out.instance_rows.push_back(out.rows - rows_before);
  }
  std::vector<int64_t> base(num_sources + 1, 0);
  for (int32_t s = 0; s < num_sources; ++s) base[s + 1] = base[s] + out.recv_rows[s];
  for (Segment& segment : out.segments) segment.position += base[segment.source_idx];
  return out;
}

}  // namespace lrmoe::engine
