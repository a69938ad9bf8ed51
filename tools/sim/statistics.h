// Statistics of streams in bounded memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <vector>

namespace lrmoe::sim {

// Mean, extremes and quantiles of values >= 0. Quantiles are by nearest rank, at most 0.1 % too high; exact
// where values that differ by less than that are equal.
class Distribution {
 public:
  void Add(double value);

  int64_t count() const { return count_; }
  double mean() const { return count_ > 0 ? sum_ / static_cast<double>(count_) : 0; }
  double min() const { return count_ > 0 ? min_ : 0; }
  double max() const { return max_; }
  // q in 0..1; 0 without values.
  double Quantile(double q) const;

 private:
  struct Bucket {  // of values within 0.1 %
    int64_t count = 0;
    double largest = 0;
  };
  std::map<int32_t, Bucket> buckets_;
  int64_t count_ = 0;
  double sum_ = 0, min_ = std::numeric_limits<double>::infinity(), max_ = 0;
};

// A series for a plot: neighbours are averaged when there are more than 512 points.
class Series {
 public:
  struct Point {
    double x = 0, mean = 0, max = 0;
  };
  void Add(double value);
  // x counts values, from 0.
  std::vector<Point> points() const;

 private:
  static constexpr size_t kMost = 512;
  struct Sum {
    int64_t count = 0;
    double sum = 0, max = 0;
  };
  std::vector<Sum> sums_;
  int64_t stride_ = 1;  // values per entry of sums_
};

}  // namespace lrmoe::sim
