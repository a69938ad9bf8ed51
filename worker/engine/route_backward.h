// Pure: which instance runs the backward of each kept pair, and where its row lies on the wire and at the
// executor (design "Route", "Compact and exchange"; paper, Algorithm 1, lines 18-20).
//
// kept(i, s) is how many pairs that source s keeps were forwarded by instance i. An instance keeps up to its
// backward_rows of them; the last ones in (source, token, slot) order beyond that move to the expert's
// instances with room: on the same node first, then by lowest rank. Kept pairs of (i, s) are numbered 0.. in
// (token, slot) order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/plan.h"

namespace lrmoe::engine {

// How many kept pairs each source has at each instance.
class KeptCounts {
 public:
  KeptCounts() = default;
  KeptCounts(size_t num_instances, int32_t num_sources)
      : num_instances_(num_instances), counts_(num_instances * num_sources, 0) {}
  // Laid out by source, so that one AllGather of each source's row fills it.
  int32_t& at(size_t instance_idx, int32_t source_idx) {
    return counts_[source_idx * num_instances_ + instance_idx];
  }
  int32_t at(size_t instance_idx, int32_t source_idx) const {
    return counts_[source_idx * num_instances_ + instance_idx];
  }
  std::span<int32_t> source(int32_t source_idx) {
    return std::span(counts_).subspan(source_idx * num_instances_, num_instances_);
  }
  std::span<int32_t> all() { return counts_; }

 private:
  size_t num_instances_ = 0;
  std::vector<int32_t> counts_;
};

// Kept pairs [first_kept, first_kept + count) of (from_instance, source) run at to_instance. The saved rows
// travel from the forward executor; the gradient goes straight from the source.
struct Move {
  int32_t from_instance = 0;
  int32_t to_instance = 0;
  int32_t source_idx = 0;
  int64_t first_kept = 0;
  int64_t count = 0;  // > 0
  bool operator==(const Move&) const = default;
};

// All moves of an invocation, equal on all ranks, ordered by (from_instance, source, first_kept). Every
// instance then has exactly backward_rows pairs. `node` of each rank.
std::vector<Move> PlanMoves(const LayerPlan& plan, const KeptCounts& kept, std::span<const int32_t> node);

// One stretch of kept pairs that stay together: (from_instance, source) pairs that run at to_instance.
struct Segment {
  int32_t to_instance = 0;
  int32_t from_instance = 0;
  int32_t source_idx = 0;
  int64_t first_kept = 0;
  int64_t count = 0;     // > 0
  int64_t row = 0;       // first, in the compact row order at the executor
  int64_t position = 0;  // first, in the send order of the source (receive order of the executor, see below)
};

// As a source: the segments of source `rank`, in its send order: by (executor rank, to_instance, pairs that
// stayed, then moves in order). position counts over all destinations; row is not set. send_rows [G].
struct SourceSegments {
  std::vector<Segment> segments;
  std::vector<int64_t> send_rows;
};
SourceSegments SegmentsFrom(const LayerPlan& plan, const KeptCounts& kept, std::span<const Move> moves,
                            int32_t rank);

// As an executor: the segments that run on `rank`, in compact row order: by (to_instance, pairs that stayed
// by source, then moves in order). position is in receive order (send orders of all sources one after
// another).
struct ExecutorSegments {
  std::vector<Segment> segments;
  std::vector<int64_t> recv_rows;      // [G]
  std::vector<int64_t> instance_rows;  // rows of each instance on this rank, in plan order; first rows follow
  int64_t rows = 0;
};
ExecutorSegments SegmentsAt(const LayerPlan& plan, const KeptCounts& kept, std::span<const Move> moves,
                            int32_t rank);

}  // namespace lrmoe::engine
