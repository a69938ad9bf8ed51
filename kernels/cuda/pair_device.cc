#include "kernels/cuda/pair_device.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/launch.h"

namespace lrmoe::kernels::cuda {
namespace {

// Staged values that may be under way; beyond this the device waits for its stream.
constexpr int64_t kStagedBytesLimit = int64_t{256} << 20;

int64_t EntriesOf(const Stretch& stretch) {
  return stretch.count;
}
int64_t EntriesOf(const Range& range) {
  return range.count;
}
int64_t EntriesOf(const WeightRule& rule) {
  return rule.range.count;
}

}  // namespace

absl::Status PairDevice::Wait() {
  if (absl::Status status = runtime_->Synchronize(); !status.ok()) Keep(status);
  if (!error_.ok()) return error_;
  staging_.Finish();
  return absl::OkStatus();
}

void PairDevice::Expect(const char* operation, size_t count, std::initializer_list<const void*> pointers) {
  for (const void* pointer : pointers)
    if (count > 0 && pointer != nullptr && !runtime_->Holds(pointer))
      Keep(
          absl::InvalidArgumentError(absl::StrCat(operation, ": memory outside that of ", runtime_->name())));
}

void PairDevice::Relieve() {
  if (staging_.bytes_in_use() > kStagedBytesLimit) Keep(Wait());
}

template <typename T>
std::span<const T> PairDevice::In(std::span<const T> src) {
  absl::StatusOr<const void*> staged = staging_.In(src.data(), static_cast<int64_t>(src.size_bytes()));
  if (staged.ok()) return {static_cast<const T*>(*staged), src.size()};
  Keep(staged.status());
  return {};
}

template <typename Item>
Cut<Item> PairDevice::InPieces(std::span<const Item> items) {
  first_piece_.assign(1, 0);
  for (const Item& item : items) first_piece_.push_back(first_piece_.back() + PiecesOf(EntriesOf(item)));
  return {In(items).data(), In(std::span<const int64_t>(first_piece_)).data(),
          static_cast<int64_t>(items.size()), first_piece_.back()};
}

void PairDevice::GatherWords(int64_t n, const int32_t* index, const void* src, void* dst) {
  Expect("GatherWords", n, {index, src, dst});
  Do([&] { return cuda::GatherWords(runtime_->stream(), n, index, src, dst); });
}

void PairDevice::ScatterWords(int64_t n, const int32_t* index, const void* src, void* dst) {
  Expect("ScatterWords", n, {index, src, dst});
  Do([&] { return cuda::ScatterWords(runtime_->stream(), n, index, src, dst); });
}

void PairDevice::Invert(int64_t n, const int32_t* index, int32_t* dst) {
  Expect("Invert", n, {index, dst});
  Do([&] { return cuda::Invert(runtime_->stream(), n, index, dst); });
}

void PairDevice::CopyStretches(std::span<const Stretch> stretches, const void* src, void* dst) {
  Expect("CopyStretches", stretches.size(), {src, dst});
  const Cut<Stretch> staged = InPieces(stretches);
  Do([&] { return cuda::CopyStretches(runtime_->stream(), staged, src, dst); });
  Relieve();
}

void PairDevice::CountStretches(std::span<const Stretch> stretches, int32_t* dst) {
  Expect("CountStretches", stretches.size(), {dst});
  const Cut<Stretch> staged = InPieces(stretches);
  Do([&] { return cuda::CountStretches(runtime_->stream(), staged, dst); });
  Relieve();
}

void PairDevice::CountRepeated(int64_t n, int32_t times, int32_t* dst) {
  Expect("CountRepeated", n, {dst});
  Do([&] { return cuda::CountRepeated(runtime_->stream(), n, times, dst); });
}

void PairDevice::MaxOfRanges(std::span<const Range> ranges, const int32_t* src, std::span<int32_t> largest) {
  Expect("MaxOfRanges", ranges.size(), {src});
  const Cut<Range> staged = InPieces(ranges);
  auto* const out = Scratch<int32_t>(static_cast<int64_t>(largest.size()));
  Fill(out, 0xFF, static_cast<int64_t>(largest.size_bytes()));
  Do([&] { return cuda::MaxOfRanges(runtime_->stream(), staged, src, out); });
  Deliver(largest, out);
  Relieve();
}

void PairDevice::ScorePairs(const ScoreArgs& args) {
  Expect("ScorePairs", args.num_pairs, {args.alpha, args.token_value, args.norm2, args.position, args.score});
  auto* const bad_pair = Scratch<int64_t>(1);
  Fill(bad_pair, 0xFF, sizeof(int64_t));  // none, and the largest of unsigned numbers
  Do([&] {
    return cuda::ScorePairs(runtime_->stream(), args, reinterpret_cast<unsigned long long*>(bad_pair));
  });
  Deliver(args.bad_pair, bad_pair);
  Relieve();
}

void PairDevice::FindThresholds(const ThresholdArgs& args) {
  Expect("FindThresholds", args.experts.size(), {args.score, args.verdicts});
  ThresholdArgs staged = args;
  staged.experts = In(args.experts);
  staged.ranges = In(args.ranges);
  staged.verdict = In(args.verdict);
  Do([&] { return cuda::FindThresholds(runtime_->stream(), staged); });
  Relieve();
}

void PairDevice::KeepPairs(const KeepArgs& args) {
  Expect("KeepPairs", args.rules.size(), {args.score, args.verdicts, args.pair, args.kept, args.kept_pair});
  KeepArgs staged = args;
  staged.rules = In(args.rules);
  staged.ranges = In(args.ranges);
  const auto out = [this](auto host) {
    using T = typename decltype(host)::element_type;
    return std::span<T>(Scratch<T>(static_cast<int64_t>(host.size())), host.size());
  };
  staged.num_kept = out(args.num_kept);
  staged.total_score = out(args.total_score);
  staged.kept_score = out(args.kept_score);
  Do([&] { return cuda::KeepPairs(runtime_->stream(), staged); });
  Deliver(args.num_kept, staged.num_kept.data());
  Deliver(args.total_score, staged.total_score.data());
  Deliver(args.kept_score, staged.kept_score.data());
  Relieve();
}

void PairDevice::WeighPairs(const WeighArgs& args) {
  Expect("WeighPairs", args.rules.size(), {args.verdicts, args.score, args.kept, args.pair, args.weight});
  const Cut<WeightRule> staged = InPieces(args.rules);
  Do([&] { return cuda::WeighPairs(runtime_->stream(), args, staged); });
  Relieve();
}

void PairDevice::PackPayload(const PayloadArgs& args) {
  Expect("PackPayload", args.num_tokens, {args.sent_pair, args.destination, args.token, args.pair_row});
  std::vector<int64_t> first_pair(1, 0);
  for (const int64_t pairs : args.pairs_to) first_pair.push_back(first_pair.back() + pairs);
  const std::span<const int64_t> staged_first = In(std::span<const int64_t>(first_pair));
  PayloadArgs staged = args;
  staged.rows = {Scratch<int32_t>(static_cast<int64_t>(args.rows.size())), args.rows.size()};
  Fill(args.destination, 0xFF, args.num_tokens * args.k * static_cast<int64_t>(sizeof(int32_t)));
  Do([&] { return cuda::PackPayload(runtime_->stream(), staged, staged_first); });
  Deliver(args.rows, staged.rows.data());
  Relieve();
}

void PairDevice::PackBits(std::span<const Stretch> stretches, const uint8_t* marks, uint8_t* bits) {
  Expect("PackBits", stretches.size(), {marks, bits});
  const Cut<Stretch> staged = InPieces(stretches);
  Do([&] { return cuda::PackBits(runtime_->stream(), staged, marks, bits); });
  Relieve();
}

void PairDevice::UnpackBits(std::span<const Stretch> stretches, const uint8_t* bits, int32_t* index) {
  Expect("UnpackBits", stretches.size(), {bits, index});
  const std::span<const Stretch> staged = In(stretches);
  Do([&] { return cuda::UnpackBits(runtime_->stream(), staged, bits, index); });
  Relieve();
}

void PairDevice::GroupByKey(int64_t n, const int32_t* keys, int64_t num_keys, int64_t* offset,
                            int32_t* index) {
  Expect("GroupByKey", n, {keys, index});
  Expect("GroupByKey", 1, {offset});
  Fill(offset, 0, (num_keys + 2) * static_cast<int64_t>(sizeof(int64_t)));
  Do([&] { return cuda::GroupByKey(runtime_->stream(), n, keys, num_keys, offset, index); });
}

}  // namespace lrmoe::kernels::cuda
