// The arithmetic of grouped GEMM for cuBLAS, against the definitions of GemmKind.
#include "kernels/cuda/gemm_shape.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <vector>

#include "common/random.h"

namespace lrmoe::kernels::cuda {
namespace {

// What cublasGemmEx computes, column-major. Every index is checked against the operand's size.
void ColumnMajorGemm(const BlasShape& s, const std::vector<double>& a, const std::vector<double>& b,
                     std::vector<double>& c) {
  const auto at = [](const std::vector<double>& m, bool transpose, int64_t ld, int64_t row, int64_t column) {
    const int64_t i = transpose ? column + row * ld : row + column * ld;
    REQUIRE(i < static_cast<int64_t>(m.size()));
    return m[i];
  };
  REQUIRE(s.lda >= (s.transpose_a ? s.k : s.m));
  REQUIRE(s.ldb >= (s.transpose_b ? s.n : s.k));
  REQUIRE(s.ldc >= s.m);
  for (int64_t column = 0; column < s.n; ++column)
    for (int64_t row = 0; row < s.m; ++row) {
      double sum = 0;
      for (int64_t i = 0; i < s.k; ++i)
        sum += at(a, s.transpose_a, s.lda, row, i) * at(b, s.transpose_b, s.ldb, i, column);
      REQUIRE(row + column * s.ldc < static_cast<int64_t>(c.size()));
      double& out = c[row + column * s.ldc];
      out = sum + (s.beta == 0 ? 0 : s.beta * out);
    }
}

std::vector<double> Whole(int64_t n, Random& random) {  // small integers: sums are exact
  std::vector<double> values(n);
  for (double& value : values) value = static_cast<double>(random.Between(-4, 4));
  return values;
}

std::vector<GemmGroup> Groups(const std::vector<int64_t>& rows) {
  std::vector<GemmGroup> groups;
  for (int64_t r : rows) groups.push_back({nullptr, nullptr, nullptr, r});
  return groups;
}

}  // namespace

TEST_CASE("column-major calls compute the row-major products", "[cuda][gemm]") {
  Random random(1);
  for (int round = 0; round < 60; ++round) {
    const int64_t n = random.Between(1, 9), k = random.Between(1, 9), rows = random.Between(1, 9);
    CAPTURE(n, k, rows);
    for (const GemmKind kind : {GemmKind::kForward, GemmKind::kInputGradient, GemmKind::kWeightGradient}) {
      const bool gradient = kind == GemmKind::kWeightGradient, overwrite = round % 2 == 1;
      const std::vector<double> a = Whole(rows * (gradient ? n : k), random);
      const std::vector<double> b = Whole(gradient ? rows * k : n * k, random);
      std::vector<double> c = Whole(gradient ? n * k : rows * n, random), want = c;
      for (int64_t i = 0; i < (gradient ? n : rows); ++i)
        for (int64_t j = 0; j < (gradient ? k : n); ++j) {
          double sum = 0;
          if (kind == GemmKind::kForward)
            for (int64_t l = 0; l < k; ++l) sum += a[i * k + l] * b[j * k + l];
          if (kind == GemmKind::kInputGradient)
            for (int64_t l = 0; l < k; ++l) sum += a[i * k + l] * b[l * n + j];
          if (gradient)
            for (int64_t l = 0; l < rows; ++l) sum += a[l * n + i] * b[l * k + j];
          double& out = want[gradient ? i * k + j : i * n + j];
          out = sum + (gradient && !overwrite ? out : 0);
        }
      ColumnMajorGemm(ToColumnMajor(kind, n, k, rows, overwrite), b, a, c);
      REQUIRE(c == want);
    }
  }
}

TEST_CASE("the grouped call is used only where its types allow, by rule or for small groups",
          "[cuda][gemm]") {
  const auto small = Groups(std::vector<int64_t>(64, 3)), large = Groups(std::vector<int64_t>(64, 512)),
             few = Groups({3, 3});
  using enum GemmKind;
  for (const GemmPathRule rule : {GemmPathRule::kByTable, GemmPathRule::kStreams, GemmPathRule::kGrouped})
    CHECK(ChooseGemmPath(rule, kWeightGradient, Type::kBf16, small) == GemmPath::kStreams);
  for (const GemmKind kind : {kForward, kInputGradient}) {
    CHECK(ChooseGemmPath(GemmPathRule::kByTable, kind, Type::kBf16, small) == GemmPath::kGrouped);
    CHECK(ChooseGemmPath(GemmPathRule::kByTable, kind, Type::kBf16, large) == GemmPath::kStreams);
    CHECK(ChooseGemmPath(GemmPathRule::kByTable, kind, Type::kBf16, few) == GemmPath::kStreams);
    CHECK(ChooseGemmPath(GemmPathRule::kStreams, kind, Type::kBf16, small) == GemmPath::kStreams);
    CHECK(ChooseGemmPath(GemmPathRule::kGrouped, kind, Type::kFp32, large) == GemmPath::kGrouped);
  }
  CHECK(ChooseGemmPath(GemmPathRule::kGrouped, kWeightGradient, Type::kFp32, large) == GemmPath::kGrouped);
  std::vector<GemmGroup> crooked = small;
  crooked.back().a = reinterpret_cast<const void*>(0x1008);
  CHECK(ChooseGemmPath(GemmPathRule::kGrouped, kForward, Type::kBf16, crooked) == GemmPath::kStreams);
  CHECK(ChooseGemmPath(GemmPathRule::kGrouped, kForward, Type::kFp32, crooked) == GemmPath::kGrouped);
}

TEST_CASE("groups are spread over streams: near even, the same for the same rows", "[cuda][gemm]") {
  Random random(2);
  for (int round = 0; round < 200; ++round) {
    std::vector<int64_t> rows(random.Between(0, 40));
    for (int64_t& r : rows) r = random.Between(1, 1000);
    const auto num_streams = static_cast<int32_t>(random.Between(1, 5));
    const std::vector<int32_t> stream = SpreadOverStreams(Groups(rows), num_streams);
    REQUIRE(stream.size() == rows.size());
    REQUIRE(stream == SpreadOverStreams(Groups(rows), num_streams));
    std::vector<int64_t> load(num_streams, 0);
    int64_t total = 0, largest = 0;
    for (size_t i = 0; i < rows.size(); ++i) {
      REQUIRE((stream[i] >= 0 && stream[i] < num_streams));
      load[stream[i]] += rows[i];
      total += rows[i];
      largest = std::max(largest, rows[i]);
    }
    // Greedy: no stream is above the average by more than one group.
    REQUIRE(*std::max_element(load.begin(), load.end()) <= total / num_streams + largest);
  }
}

}  // namespace lrmoe::kernels::cuda
