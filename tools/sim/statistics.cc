#include "tools/sim/statistics.h"

#include <cmath>

namespace lrmoe::sim {
namespace {

constexpr double kResolution = 1e-3;
constexpr double kLeast = 1e-6;  // smaller values share a bucket with 0

int32_t BucketOf(double value) {
  if (value < kLeast) return 0;
  return 1 + static_cast<int32_t>(std::log(value / kLeast) / std::log1p(kResolution));
}

}  // namespace

void Distribution::Add(double value) {
  Bucket& bucket = buckets_[BucketOf(value)];
  ++bucket.count;
  bucket.largest = std::max(bucket.largest, value);
  ++count_;
  sum_ += value;
  min_ = std::min(min_, value);
  max_ = std::max(max_, value);
}

double Distribution::Quantile(double q) const {
  const auto rank = static_cast<int64_t>(std::ceil(q * static_cast<double>(count_)));
  int64_t below = 0;
  for (const auto& [unused, bucket] : buckets_) {
    below += bucket.count;
    if (below >= rank) return bucket.largest;
  }
  return 0;
}

void Series::Add(double value) {
  if (sums_.empty() || sums_.back().count == stride_) {
    if (sums_.size() == kMost) {
      for (size_t i = 0; i < kMost / 2; ++i) {
        const Sum &a = sums_[2 * i], &b = sums_[2 * i + 1];
        sums_[i] = {a.count + b.count, a.sum + b.sum, std::max(a.max, b.max)};
      }
      sums_.resize(kMost / 2);
      stride_ *= 2;
    }
    sums_.emplace_back();
  }
  Sum& last = sums_.back();
  ++last.count;
  last.sum += value;
  last.max = std::max(last.max, value);
}

std::vector<Series::Point> Series::points() const {
  std::vector<Point> out;
  double x = 0;
  for (const Sum& sum : sums_) {
    const auto count = static_cast<double>(sum.count);
    out.push_back({x + (count - 1) / 2, sum.sum / count, sum.max});
    x += count;
  }
  return out;
}

}  // namespace lrmoe::sim
