#include "worker/engine/compact.h"

#include <algorithm>
#include <utility>

#include "common/check.h"
#include "common/status_macros.h"

namespace lrmoe::engine {
namespace {

// A mask is only needed where some but not all rows of (instance, source) survive.
int64_t MaskSize(int64_t kept, int64_t routed) {
  return kept > 0 && kept < routed ? (routed + 7) / 8 : 0;
}

}  // namespace

// As a source to each executor, or as an executor from each source. Masks are padded so that what follows is
// aligned.
CompactPass::Description CompactPass::Describe(bool as_source) const {
  const LayerPlan& plan = context_.plan();
  const auto num_ranks = static_cast<size_t>(state_.num_ranks());
  std::vector<int64_t> masks(num_ranks, 0);
  for (size_t i = 0; i < plan.instances.size(); ++i) {
    const InstancePlan& instance = plan.instances[i];
    if (as_source) {
      masks[instance.rank_idx] +=
          MaskSize(route_.kept.at(i, state_.rank()), instance.forward_rows_by_source[state_.rank()]);
    } else if (instance.rank_idx == state_.rank()) {
      for (int32_t s = 0; s < state_.num_ranks(); ++s)
        masks[s] += MaskSize(route_.kept.at(i, s), instance.forward_rows_by_source[s]);
    }
  }
  Description out;
  for (size_t r = 0; r < num_ranks; ++r) {
    const int64_t rows = as_source ? route_.source.send_rows[r] : route_.executor.recv_rows[r];
    out.begin.push_back(out.total);
    out.rows.push_back(out.total + (masks[r] + 7) / 8 * 8);
    out.weights.push_back(out.rows[r] + rows * 4);
    out.bytes.push_back(out.weights[r] + rows * 4 - out.total);
    out.total += out.bytes[r];
  }
  return out;
}

absl::Status CompactPass::WriteDescriptions(const Description& layout, const Buffer& pair_row,
                                            const Buffer& out) const {
  const LayerPlan& plan = context_.plan();
  kernels::Device& device = *state_.device;
  std::vector<int64_t> next = layout.begin;
  std::vector<kernels::Stretch> stretches;
  stretches.reserve(plan.instances.size());
  const std::vector<int64_t>& first_position = context_.route.first_position;
  for (size_t i = 0; i < plan.instances.size(); ++i) {
    const InstancePlan& instance = plan.instances[i];
    const int64_t routed = instance.forward_rows_by_source[state_.rank()];
    const int64_t size = MaskSize(route_.kept.at(i, state_.rank()), routed);
    if (size == 0) continue;
    stretches.push_back({first_position[i], next[instance.rank_idx], routed});
    next[instance.rank_idx] += size;
  }
  device.PackBits(stretches, route_.selected.kept.as<uint8_t>().data(), out.as<uint8_t>().data());

  const int64_t rows = Sum(route_.source.send_rows);
  const int32_t* const sent = route_.sent_pair.as<int32_t>().data();
  LRMOE_ASSIGN_OR_RETURN(Buffer words, state_.rows().Take(rows * 4, "row descriptions"));
  const std::vector<int64_t> from = Offsets(route_.source.send_rows);
  const auto write = [&](const Buffer& of_pair, const std::vector<int64_t>& to) {
    device.GatherWords(rows, sent, of_pair.data(), words.data());
    stretches.clear();
    for (size_t r = 0; r < to.size(); ++r)
      stretches.push_back({from[r], to[r] / 4, route_.source.send_rows[r]});
    device.CopyStretches(stretches, words.data(), out.data());
  };
  write(pair_row, layout.rows);
  write(context_.alpha, layout.weights);
  return absl::OkStatus();
}

absl::Status CompactPass::ReadMasks(const Description& layout, const Buffer& in) {
  LRMOE_ASSIGN_OR_RETURN(kept_rows_, state_.rows().Take(context_.route.rows * 4, "kept rows"));
  std::vector<int64_t> next = layout.begin;
  std::vector<kernels::Stretch> some, all;
  some.reserve(context_.route.runs.size());
  int64_t filled = 0;
  for (const RowRun& run : context_.route.runs) {
    run_kept_base_.push_back(filled);
    const int64_t kept = route_.kept.at(context_.route.local[run.local_idx].instance_idx, run.source_idx);
    const int64_t size = MaskSize(kept, run.count);
    if (size > 0)
      some.push_back({next[run.source_idx], filled, run.count, static_cast<int32_t>(run.row)});
    else if (kept > 0)
      all.push_back({run.row, filled, run.count});
    next[run.source_idx] += size;
    filled += kept;
  }
  state_.device->UnpackBits(some, in.as<uint8_t>().data(), kept_rows_.as<int32_t>().data());
  state_.device->CountStretches(all, kept_rows_.as<int32_t>().data());
  return absl::OkStatus();
}

absl::Status CompactPass::ReadRows(const Description& layout, const Buffer& in) {
  kernels::Device& device = *state_.device;
  // Payload rows can be numbered only when all sources' counts are known.
  std::vector<kernels::Range> from_source;
  for (int32_t r = 0; r < state_.num_ranks(); ++r)
    from_source.push_back({layout.rows[r] / 4, route_.executor.recv_rows[r]});
  LRMOE_ASSIGN_OR_RETURN(payload_rows_, RowsFromSources(state_, payload_, from_source, in));
  LRMOE_ASSIGN_OR_RETURN(row_alpha_, state_.rows().Take(route_.executor.rows * 4, "row weights"));
  LRMOE_ASSIGN_OR_RETURN(row_payload_, state_.rows().Take(route_.executor.rows * 4, "payload rows"));
  const std::vector<int64_t> first_position = Offsets(route_.executor.recv_rows);
  const std::vector<int64_t> payload_base = Offsets(payload_rows_);
  std::vector<kernels::Stretch> rows, weights;
  rows.reserve(route_.executor.segments.size());
  weights.reserve(route_.executor.segments.size());
  for (const Segment& segment : route_.executor.segments) {
    const int32_t s = segment.source_idx;
    const int64_t at = segment.position - first_position[s];
    rows.push_back(
        {layout.rows[s] / 4 + at, segment.row, segment.count, static_cast<int32_t>(payload_base[s])});
    weights.push_back({layout.weights[s] / 4 + at, segment.row, segment.count});
  }
  device.CopyStretches(rows, in.data(), row_payload_.data());
  device.CopyStretches(weights, in.data(), row_alpha_.data());
  return absl::OkStatus();
}

absl::Status CompactPass::DescribeRows() {
  LRMOE_ASSIGN_OR_RETURN(payload_,
                         PackPayload(state_, context_.num_tokens, route_.sent_pair, route_.source.send_rows));
  const Description to = Describe(true), from = Describe(false);
  LRMOE_ASSIGN_OR_RETURN(Buffer out, state_.rows().Take(to.total, "row descriptions"));
  LRMOE_RETURN_IF_ERROR(WriteDescriptions(to, payload_.pair_row, out));
  payload_.pair_row.Release();
  route_.selected.kept.Release();
  context_.alpha.Release();
  LRMOE_ASSIGN_OR_RETURN(Buffer in, state_.rows().Take(from.total, "row descriptions"));
  LRMOE_RETURN_IF_ERROR(
      exchange_.Rows("backward descriptions", out.bytes(), to.bytes, in.bytes(), from.bytes, 1));
  out.Release();
  LRMOE_RETURN_IF_ERROR(ReadMasks(from, in));
  return ReadRows(from, in);
}

// All rows forwarded here run here: the saved buffers are the compact rows already, in the same order.
bool CompactPass::AllStay() const {
  if (route_.executor.rows != context_.route.rows) return false;
  for (const RowRun& run : context_.route.runs)
    if (route_.kept.at(context_.route.local[run.local_idx].instance_idx, run.source_idx) != run.count)
      return false;
  for (const Segment& segment : route_.executor.segments)
    if (segment.to_instance != segment.from_instance) return false;
  return true;
}

absl::Status CompactPass::CompactSaved() {
  if (AllStay()) {
    x_ = std::move(context_.x);
    a_ = std::move(context_.a);
    LRMOE_RETURN_IF_ERROR(MoveRows());  // none of this rank's, but other ranks may exchange some
  } else {
    const LayerShape& shape = state_.shape();
    const int64_t rows = route_.executor.rows;
    const bool with_a = !state_.options.recompute_activation;
    LRMOE_ASSIGN_OR_RETURN(x_, state_.rows().Take(rows * state_.row_bytes(), "compact rows"));
    if (with_a) {
      LRMOE_ASSIGN_OR_RETURN(
          a_, state_.rows().Take(rows * shape.fc1_width() * state_.element_bytes(), "compact FC1 rows"));
    }
    {
      LRMOE_ASSIGN_OR_RETURN(Buffer gather, state_.rows().Take(rows * 4, "compaction"));
      // Rows that come from elsewhere are overwritten below.
      state_.device->Fill(gather.data(), 0, gather.size());
      std::vector<kernels::Stretch> stretches;
      stretches.reserve(route_.executor.segments.size());
      size_t run_idx = 0;
      for (const Segment& segment : route_.executor.segments) {
        if (segment.to_instance != segment.from_instance) continue;
        // Segments that stay and runs are both by (instance, source), and each such segment has a run.
        while (context_.route.local[context_.route.runs[run_idx].local_idx].instance_idx !=
                   segment.from_instance ||
               context_.route.runs[run_idx].source_idx != segment.source_idx)
          ++run_idx;
        stretches.push_back({run_kept_base_[run_idx] + segment.first_kept, segment.row, segment.count});
      }
      state_.device->CopyStretches(stretches, kept_rows_.data(), gather.data());
      if (context_.route.rows > 0) {
        const auto index = gather.as<int32_t>();
        state_.device->GatherRows(state_.type(), shape.hidden_size, context_.x.data(), index, x_.data());
        if (with_a)
          state_.device->GatherRows(state_.type(), shape.fc1_width(), context_.a.data(), index, a_.data());
      }
    }
    LRMOE_RETURN_IF_ERROR(MoveRows());
    context_.x.Release();
    context_.a.Release();
  }
  kept_rows_.Release();
  return absl::OkStatus();
}

CompactPass::Transfers CompactPass::FindTransfers() const {
  const LayerPlan& plan = context_.plan();
  const int32_t num_ranks = state_.num_ranks();
  const auto rank_of = [&](int32_t instance) { return plan.instances[instance].rank_idx; };
  Transfers found;
  found.out.resize(num_ranks);
  found.in.resize(num_ranks);
  StagedTransfer& transfer = found.sizes;
  transfer.send_units.assign(num_ranks, 0);
  transfer.recv_units.assign(num_ranks, 0);
  transfer.max_peers = num_ranks;
  std::vector<int64_t> link(static_cast<size_t>(num_ranks) * num_ranks, 0);
  for (const Move& move : route_.moves) {
    const int32_t from = rank_of(move.from_instance), to = rank_of(move.to_instance);
    int64_t& units = link[static_cast<size_t>(from) * num_ranks + to];
    units += move.count;
    transfer.max_units = std::max(transfer.max_units, units);
    if (from == state_.rank()) {
      for (size_t r = 0; r < context_.route.runs.size(); ++r) {
        const RowRun& run = context_.route.runs[r];
        if (context_.route.local[run.local_idx].instance_idx != move.from_instance ||
            run.source_idx != move.source_idx)
          continue;
        found.out[to].push_back({run_kept_base_[r] + move.first_kept, move.count});
        transfer.send_units[to] += move.count;
      }
    }
    if (to != state_.rank()) continue;
    for (const Segment& segment : route_.executor.segments) {
      if (segment.from_instance != move.from_instance || segment.to_instance != move.to_instance ||
          segment.source_idx != move.source_idx || segment.first_kept != move.first_kept)
        continue;
      found.in[from].push_back({segment.row, segment.count});
      transfer.recv_units[from] += segment.count;
    }
  }
  return found;
}

// Saved rows of pairs whose forward executor has no room, to their backward executors.
absl::Status CompactPass::MoveRows() {
  Transfers moved = FindTransfers();
  const int64_t x_bytes = state_.row_bytes();
  const int64_t a_bytes =
      state_.options.recompute_activation ? 0 : state_.shape().fc1_width() * state_.element_bytes();
  moved.sizes.unit_bytes = x_bytes + a_bytes;
  // Visits the parts of a peer's stretches that hold units [first, first + count).
  const auto visit = [](const std::vector<MovedRows>& stretches, int64_t first, int64_t count, auto&& each) {
    for (const MovedRows& stretch : stretches) {
      const int64_t skip = std::min(first, stretch.count);
      const int64_t n = std::min(stretch.count - skip, count);
      if (n > 0) each(stretch.row + skip, n);
      first -= skip;
      count -= n;
    }
  };
  // All x rows of a message, then all FC1 rows.
  const auto fill = [&](int32_t peer, int64_t first, int64_t count, std::byte* x) {
    std::byte* a = x + count * x_bytes;
    visit(moved.out[peer], first, count, [&](int64_t entry, int64_t n) {
      const auto rows = kept_rows_.as<int32_t>().subspan(entry, n);
      state_.device->GatherRows(state_.type(), state_.shape().hidden_size, context_.x.data(), rows, x);
      if (a_bytes > 0)
        state_.device->GatherRows(state_.type(), state_.shape().fc1_width(), context_.a.data(), rows, a);
      x += n * x_bytes;
      a += n * a_bytes;
    });
  };
  const auto take = [&](int32_t peer, int64_t first, int64_t count, const std::byte* x) {
    const std::byte* a = x + count * x_bytes;
    visit(moved.in[peer], first, count, [&](int64_t row, int64_t n) {
      state_.device->Copy(x_.data() + row * x_bytes, x, n * x_bytes);
      state_.device->Copy(a_.data() + row * a_bytes, a, n * a_bytes);
      x += n * x_bytes;
      a += n * a_bytes;
    });
  };
  return exchange_.Staged("backward moved rows", moved.sizes, state_.rows(), fill, take);
}

}  // namespace lrmoe::engine
