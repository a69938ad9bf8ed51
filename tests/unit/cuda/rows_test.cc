// The row passes of kernels/cuda, run by the emulator, against plain loops in fp64.
#include <catch2/catch.hpp>

#include "kernels/cuda/passes.h"
#include "tests/unit/cuda/buffers.h"

namespace lrmoe::kernels::cuda {
namespace {

struct Case {
  Type type;
  int64_t rows, width, shift;
  uint64_t seed;
};

// Ragged shapes: empty, single, odd widths, whole packs, more rows than a block, misaligned bases.
std::vector<Case> Cases() {
  std::vector<Case> cases;
  uint64_t seed = 1;
  for (Type type : {Type::kBf16, Type::kFp32})
    for (auto [rows, width] : std::vector<std::pair<int64_t, int64_t>>{
             {0, 8}, {1, 1}, {3, 7}, {8, 8}, {9, 256}, {17, 264}, {5, 1000}})
      for (int64_t shift : {0, 1}) cases.push_back({type, rows, width, shift, seed++});
  return cases;
}

TEST_CASE("gather copies rows bit for bit", "[cuda][rows]") {
  for (const Case& c : Cases()) {
    Random random(c.seed);
    Rows src = Rows::Random(c.type, (c.rows + 2) * c.width, random, c.shift);
    Rows dst(c.type, c.rows * c.width, c.shift);
    std::vector<int32_t> index(c.rows);
    for (int32_t& i : index) i = static_cast<int32_t>(random.Below(c.rows + 2));
    REQUIRE(GatherRows(nullptr, c.type, c.width, src.get(), index.data(), c.rows, dst.get()).ok());
    for (int64_t i = 0; i < c.rows * c.width; ++i)
      REQUIRE(dst[i] == src[int64_t{index[i / c.width]} * c.width + i % c.width]);
  }
}

TEST_CASE("combine weighs the rows of each token in slot order", "[cuda][rows]") {
  for (const Case& c : Cases()) {
    Random random(c.seed);
    const int32_t k = 3;
    Rows y = Rows::Random(c.type, (c.rows * k + 1) * c.width, random, c.shift);
    Rows out(c.type, c.rows * c.width, c.shift);
    std::vector<float> alpha = RandomFloats(c.rows * k, random);
    std::vector<int32_t> position(c.rows * k);
    for (int32_t& p : position)
      p = static_cast<int32_t>(random.Below(c.rows * k + 1)) - (random.Below(4) == 0 ? 1000000 : 0);
    REQUIRE(
        CombineRows(nullptr, {c.type, c.width, c.rows, k, y.get(), position.data(), alpha.data(), out.get()})
            .ok());
    for (int64_t i = 0; i < c.rows * c.width; ++i) {
      double want = 0, magnitude = 0;
      for (int32_t j = 0; j < k; ++j) {
        const int64_t pair = i / c.width * k + j;
        if (position[pair] < 0) continue;
        const double term = alpha[pair] * y[int64_t{position[pair]} * c.width + i % c.width];
        want += term;
        magnitude += std::abs(term);
      }
      REQUIRE(Near(out[i], want, magnitude, Tolerance(c.type)));
    }
  }
}

TEST_CASE("segmented sums add the named rows; an empty segment gives zeros", "[cuda][rows]") {
  for (const Case& c : Cases()) {
    Random random(c.seed);
    std::vector<int64_t> offset = {0};
    for (int64_t row = 0; row < c.rows; ++row) offset.push_back(offset.back() + random.Between(0, 4));
    std::vector<int32_t> index(offset.back());
    for (int32_t& i : index) i = static_cast<int32_t>(random.Below(c.rows + 1));
    Rows src = Rows::Random(c.type, (c.rows + 1) * c.width, random, c.shift);
    Rows dst(c.type, c.rows * c.width, c.shift);
    REQUIRE(
        SumRows(nullptr, {c.type, c.width, c.rows, src.get(), index.data(), offset.data(), dst.get()}).ok());
    for (int64_t i = 0; i < c.rows * c.width; ++i) {
      double want = 0, magnitude = 0;
      for (int64_t j = offset[i / c.width]; j < offset[i / c.width + 1]; ++j) {
        want += src[int64_t{index[j]} * c.width + i % c.width];
        magnitude += std::abs(src[int64_t{index[j]} * c.width + i % c.width]);
      }
      REQUIRE(Near(dst[i], want, magnitude, Tolerance(c.type)));
    }
  }
}

TEST_CASE("norms and dots of rows", "[cuda][rows]") {
  for (const Case& c : Cases()) {
    Random random(c.seed);
    Rows a = Rows::Random(c.type, (c.rows + 1) * c.width, random, c.shift);
    Rows b = Rows::Random(c.type, (c.rows + 1) * c.width, random, c.shift);
    std::vector<int32_t> a_row(c.rows), b_row(c.rows);
    for (int32_t& i : a_row) i = static_cast<int32_t>(random.Below(c.rows + 1));
    for (int32_t& i : b_row) i = static_cast<int32_t>(random.Below(c.rows + 1));
    std::vector<float> norm2 = Poisoned(c.rows), absolute = Poisoned(c.rows), dot = Poisoned(c.rows);
    REQUIRE(RowNorm2(nullptr, c.type, c.rows, c.width, a.get(), norm2.data()).ok());
    REQUIRE(RowAbsSum(nullptr, c.type, c.rows, c.width, a.get(), absolute.data()).ok());
    REQUIRE(
        RowDot(nullptr, {c.type, c.width, c.rows, a.get(), a_row.data(), b.get(), b_row.data(), dot.data()})
            .ok());
    for (int64_t row = 0; row < c.rows; ++row) {
      double squares = 0, sum = 0, product = 0, magnitude = 0;
      for (int64_t j = 0; j < c.width; ++j) {
        const double value = a[row * c.width + j];
        squares += value * value;
        sum += std::abs(value);
        const double term = a[int64_t{a_row[row]} * c.width + j] * b[int64_t{b_row[row]} * c.width + j];
        product += term;
        magnitude += std::abs(term);
      }
      REQUIRE(Near(norm2[row], squares, squares, 2e-6));
      REQUIRE(Near(absolute[row], sum, sum, 2e-6));
      REQUIRE(Near(dot[row], product, magnitude, 2e-6));
    }
  }
}

TEST_CASE("a negative size is refused by name", "[cuda][rows]") {
  const absl::Status status = GatherRows(nullptr, Type::kFp32, 4, nullptr, nullptr, -1, nullptr);
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  CHECK_THAT(std::string(status.message()), Catch::Contains("num_rows is -1"));
}

}  // namespace
}  // namespace lrmoe::kernels::cuda
