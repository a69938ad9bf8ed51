#include "worker/engine/compact.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>
#include <utility>

#include "common/check.h"
#include "common/status_macros.h"

namespace lrmoe::engine {
namespace {

// Metadata of one kept pair, behind the masks in a description.
struct RowDescription {
  int32_t payload_row;  // among the rows from this source
  float alpha;
};

// A mask is only needed where some but not all rows of (instance, source) survive.
int64_t MaskSize(int64_t kept, int64_t routed) {
  return kept > 0 && kept < routed ? (routed + 7) / 8 : 0;
}

}  // namespace

// Bytes of masks, as a source to each executor or as an executor from each source; padded so that what
// follows is aligned.
std::vector<int64_t> CompactPass::MaskBytes(bool as_source) const {
  const LayerPlan& plan = context_.plan();
  std::vector<int64_t> bytes(state_.num_ranks(), 0);
  for (size_t i = 0; i < plan.instances.size(); ++i) {
    const InstancePlan& instance = plan.instances[i];
    if (as_source) {
      bytes[instance.rank_idx] +=
          MaskSize(route_.kept.at(i, state_.rank()), instance.forward_rows_by_source[state_.rank()]);
    } else if (instance.rank_idx == state_.rank()) {
      for (int32_t s = 0; s < state_.num_ranks(); ++s)
        bytes[s] += MaskSize(route_.kept.at(i, s), instance.forward_rows_by_source[s]);
    }
  }
  for (int64_t& b : bytes) b = (b + 7) / 8 * 8;
  return bytes;
}

void CompactPass::WriteMasks(std::span<std::byte> message, std::span<const int64_t> message_base) const {
  const LayerPlan& plan = context_.plan();
  struct Mask {
    std::byte* at = nullptr;  // where there is one
    uint64_t bits = 0;        // of the last pairs, up to 64
    int64_t pairs = 0;
  };
  std::vector<Mask> masks(plan.instances.size());
  std::vector<int64_t> next(message_base.begin(), message_base.end());
  for (size_t i = 0; i < plan.instances.size(); ++i) {
    const InstancePlan& instance = plan.instances[i];
    const int64_t size =
        MaskSize(route_.kept.at(i, state_.rank()), instance.forward_rows_by_source[state_.rank()]);
    if (size == 0) continue;
    masks[i].at = message.data() + next[instance.rank_idx];
    next[instance.rank_idx] += size;
  }
  const auto write = [](Mask& mask, int64_t bytes) {
    if (mask.at != nullptr) std::memcpy(mask.at + (mask.pairs - 1) / 64 * 8, &mask.bits, bytes);
    mask.bits = 0;
  };
  const auto pair_instance = context_.pair_instance.as<int32_t>();
  const auto target = route_.pair_target.as<int32_t>();
  for (size_t p = 0; p < pair_instance.size(); ++p) {
    Mask& mask = masks[pair_instance[p]];
    mask.bits |= static_cast<uint64_t>(target[p] >= 0) << (mask.pairs % 64);
    if (++mask.pairs % 64 == 0) write(mask, 8);
  }
  for (Mask& mask : masks)
    if (mask.pairs % 64 != 0) write(mask, (mask.pairs % 64 + 7) / 8);
}

void CompactPass::ReadMasks(std::span<const std::byte> message, std::span<const int64_t> message_base) {
  std::vector<int64_t> next(message_base.begin(), message_base.end());
  const auto rows = kept_rows_.as<int32_t>();
  int64_t filled = 0;
  for (const RowRun& run : context_.route.runs) {
    run_kept_base_.push_back(filled);
    const int64_t kept = route_.kept.at(context_.route.local[run.local_idx].instance_idx, run.source_idx);
    const int64_t size = MaskSize(kept, run.count);
    if (kept == 0) continue;
    if (size == 0) {
      for (int64_t i = 0; i < run.count; ++i) rows[filled++] = static_cast<int32_t>(run.row + i);
      continue;
    }
    const std::byte* mask = message.data() + next[run.source_idx];
    next[run.source_idx] += size;
    // A dropped row is written as well, and then over: a branch would be mispredicted. Never beyond the end,
    // as not more rows are filled than looked at.
    for (int64_t i = 0; i < run.count; ++i) {
      rows[filled] = static_cast<int32_t>(run.row + i);
      filled += static_cast<int64_t>(mask[i / 8] >> (i % 8) & std::byte(1));
    }
    LRMOE_CHECK_EQ(filled - run_kept_base_.back(), kept);
  }
}

absl::Status CompactPass::DescribeRows() {
  Arena& arena = *state_.arena;
  const int32_t num_ranks = state_.num_ranks();
  const int64_t pairs = static_cast<int64_t>(context_.pair_instance.as<int32_t>().size());
  const auto position = route_.pair_position.as<int32_t>();
  const int64_t rows_out = Sum(route_.source.send_rows);

  LRMOE_ASSIGN_OR_RETURN(token_, arena.Take(pairs * 4, "gradient tokens"));
  LRMOE_ASSIGN_OR_RETURN(Buffer pair_row, arena.Take(pairs * 4, "gradient rows"));
  payload_ = PackPayload(context_.plan(), route_.pair_target.as<int32_t>(), state_.shape().top_k,
                         route_.source.send_rows, token_.as<int32_t>(), pair_row.as<int32_t>());

  std::vector<int64_t> bytes_out = MaskBytes(true), bytes_in = MaskBytes(false);
  const std::vector<int64_t> mask_out = bytes_out, mask_in = bytes_in;
  for (int32_t r = 0; r < num_ranks; ++r) {
    bytes_out[r] += route_.source.send_rows[r] * static_cast<int64_t>(sizeof(RowDescription));
    bytes_in[r] += route_.executor.recv_rows[r] * static_cast<int64_t>(sizeof(RowDescription));
  }
  const std::vector<int64_t> base_out = Offsets(bytes_out), base_in = Offsets(bytes_in);
  LRMOE_ASSIGN_OR_RETURN(Buffer out, arena.Take(base_out[num_ranks], "row descriptions"));
  LRMOE_ASSIGN_OR_RETURN(Buffer in, arena.Take(base_in[num_ranks], "row descriptions"));
  WriteMasks(out.bytes(), std::span(base_out).first(num_ranks));
  {
    // By target + 1: where the descriptions of its rank begin; dropped pairs have position -1 of a place
    // aside.
    RowDescription aside;
    std::vector<std::byte*> rows_at(context_.plan().instances.size() + 1);
    rows_at[0] = reinterpret_cast<std::byte*>(&aside + 1);
    const std::vector<int64_t> first_position = Offsets(route_.source.send_rows);
    for (size_t i = 0; i + 1 < rows_at.size(); ++i) {
      const int32_t r = context_.plan().instances[i].rank_idx;
      rows_at[i + 1] = out.data() + base_out[r] + mask_out[r] -
                       first_position[r] * static_cast<int64_t>(sizeof(RowDescription));
    }
    const auto target = route_.pair_target.as<int32_t>();
    const auto row_of = pair_row.as<int32_t>();
    const auto alpha = context_.alpha.as<float>();
    for (int64_t p = 0; p < pairs && rows_out > 0; ++p) {
      const RowDescription row{row_of[p], alpha[p]};
      std::memcpy(rows_at[target[p] + 1] + position[p] * static_cast<int64_t>(sizeof(RowDescription)), &row,
                  sizeof(row));
    }
  }
  LRMOE_RETURN_IF_ERROR(
      exchange_.Rows("backward descriptions", out.bytes(), bytes_out, in.bytes(), bytes_in, 1));
  out.Release();

  LRMOE_ASSIGN_OR_RETURN(kept_rows_, arena.Take(context_.route.rows * 4, "kept rows"));
  ReadMasks(in.bytes(), std::span(base_in).first(num_ranks));
  LRMOE_ASSIGN_OR_RETURN(row_alpha_, arena.Take(route_.executor.rows * 4, "row weights"));
  LRMOE_ASSIGN_OR_RETURN(row_payload_, arena.Take(route_.executor.rows * 4, "payload rows"));
  const std::vector<int64_t> first_position = Offsets(route_.executor.recv_rows);
  std::vector<const std::byte*> rows_from(num_ranks);
  for (int32_t r = 0; r < num_ranks; ++r)
    rows_from[r] = in.data() + base_in[r] + mask_in[r] -
                   first_position[r] * static_cast<int64_t>(sizeof(RowDescription));
  ReadRows(rows_from);
  return absl::OkStatus();
}

void CompactPass::ReadRows(std::span<const std::byte* const> rows_from) {
  payload_rows_.assign(rows_from.size(), 0);
  const auto described = [&](const Segment& segment) {
    return rows_from[segment.source_idx] + segment.position * static_cast<int64_t>(sizeof(RowDescription));
  };
  // Payload rows can be numbered only when all sources' counts are known.
  for (const Segment& segment : route_.executor.segments) {
    const std::byte* at = described(segment);
    int32_t last = -1;
    for (int64_t i = 0; i < segment.count; ++i, at += sizeof(RowDescription)) {
      RowDescription row;
      std::memcpy(&row, at, sizeof(row));
      last = std::max(last, row.payload_row);
    }
    int64_t& rows = payload_rows_[segment.source_idx];
    rows = std::max<int64_t>(rows, last + 1);
  }
  const std::vector<int64_t> payload_base = Offsets(payload_rows_);
  for (const Segment& segment : route_.executor.segments) {
    const std::byte* at = described(segment);
    float* const alpha = row_alpha_.as<float>().data() + segment.row;
    int32_t* const payload = row_payload_.as<int32_t>().data() + segment.row;
    const auto base = static_cast<int32_t>(payload_base[segment.source_idx]);
    for (int64_t i = 0; i < segment.count; ++i, at += sizeof(RowDescription)) {
      RowDescription row;
      std::memcpy(&row, at, sizeof(row));
      alpha[i] = row.alpha;
      payload[i] = base + row.payload_row;
    }
  }
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
    Arena& arena = *state_.arena;
    const LayerShape& shape = state_.shape();
    const int64_t rows = route_.executor.rows;
    const bool with_a = !state_.options.recompute_activation;
    LRMOE_ASSIGN_OR_RETURN(x_, state_.rows().Take(rows * state_.row_bytes(), "compact rows"));
    if (with_a) {
      LRMOE_ASSIGN_OR_RETURN(
          a_, state_.rows().Take(rows * shape.fc1_width() * state_.element_bytes(), "compact FC1 rows"));
    }
    {
      LRMOE_ASSIGN_OR_RETURN(Buffer gather, arena.Take(rows * 4, "compaction"));
      const auto index = gather.as<int32_t>();
      std::fill(index.begin(), index.end(), 0);  // rows that come from elsewhere are overwritten below
      size_t run_idx = 0;
      for (const Segment& segment : route_.executor.segments) {
        if (segment.to_instance != segment.from_instance) continue;
        // Segments that stay and runs are both by (instance, source), and each such segment has a run.
        while (context_.route.local[context_.route.runs[run_idx].local_idx].instance_idx !=
                   segment.from_instance ||
               context_.route.runs[run_idx].source_idx != segment.source_idx)
          ++run_idx;
        const int64_t first = run_kept_base_[run_idx] + segment.first_kept;
        std::copy_n(kept_rows_.as<int32_t>().begin() + first, segment.count, index.begin() + segment.row);
      }
      if (context_.route.rows > 0) {
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

// Saved rows of pairs whose forward executor has no room, to their backward executors.
absl::Status CompactPass::MoveRows() {
  const LayerPlan& plan = context_.plan();
  const int32_t num_ranks = state_.num_ranks();
  const auto rank_of = [&](int32_t instance) { return plan.instances[instance].rank_idx; };
  StagedTransfer transfer;
  transfer.send_units.assign(num_ranks, 0);
  transfer.recv_units.assign(num_ranks, 0);
  transfer.max_peers = num_ranks;
  const int64_t x_bytes = state_.row_bytes();
  const int64_t a_bytes =
      state_.options.recompute_activation ? 0 : state_.shape().fc1_width() * state_.element_bytes();
  transfer.unit_bytes = x_bytes + a_bytes;
  std::vector<int64_t> link(static_cast<size_t>(num_ranks) * num_ranks, 0);
  std::vector<std::vector<MovedRows>> out(num_ranks), in(num_ranks);
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
        out[to].push_back({run_kept_base_[r] + move.first_kept, move.count});
        transfer.send_units[to] += move.count;
      }
    }
    if (to != state_.rank()) continue;
    for (const Segment& segment : route_.executor.segments) {
      if (segment.from_instance != move.from_instance || segment.to_instance != move.to_instance ||
          segment.source_idx != move.source_idx || segment.first_kept != move.first_kept)
        continue;
      in[from].push_back({segment.row, segment.count});
      transfer.recv_units[from] += segment.count;
    }
  }
  // Visits the rows of units [first, first + count) of a peer's stretches.
  const auto visit = [](const std::vector<MovedRows>& stretches, int64_t first, int64_t count, auto&& each) {
    for (const MovedRows& stretch : stretches) {
      const int64_t skip = std::min(first, stretch.count);
      const int64_t n = std::min(stretch.count - skip, count);
      for (int64_t i = 0; i < n; ++i) each(stretch.row + skip + i);
      first -= skip;
      count -= n;
    }
  };
  const auto fill = [&](int32_t peer, int64_t first, int64_t count, std::byte* to) {
    visit(out[peer], first, count, [&](int64_t entry) {
      const int64_t row = kept_rows_.as<int32_t>()[entry];
      state_.device->Copy(to, context_.x.data() + row * x_bytes, x_bytes);
      state_.device->Copy(to + x_bytes, context_.a.data() + row * a_bytes, a_bytes);
      to += x_bytes + a_bytes;
    });
  };
  const auto take = [&](int32_t peer, int64_t first, int64_t count, const std::byte* from) {
    visit(in[peer], first, count, [&](int64_t row) {
      state_.device->Copy(x_.data() + row * x_bytes, from, x_bytes);
      state_.device->Copy(a_.data() + row * a_bytes, from + x_bytes, a_bytes);
      from += x_bytes + a_bytes;
    });
  };
  return exchange_.Staged("backward moved rows", transfer, state_.rows(), fill, take);
}

}  // namespace lrmoe::engine
