// Launch geometry to the largest supported shapes, and kernels that reach beyond 2^31 elements.
#include "kernels/cuda/launch.h"

#include <sys/mman.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "common/random.h"
#include "kernels/cuda/passes.h"
#include "kernels/memory.h"
#include "tests/unit/cuda/buffers.h"

namespace lrmoe::kernels::cuda {
namespace {

constexpr int64_t kMaxPairs = (int64_t{1} << 31) - 1;  // of one rank: positions are int32
constexpr int64_t kMaxWidth = 2 * (int64_t{1} << 20);  // a of the widest gated expert
constexpr int64_t kMaxParameters = int64_t{1} << 42;

// What every device since sm_80 takes without asking.
void RequireLaunchable(const LaunchShape& shape) {
  REQUIRE(shape.blocks <= uint32_t{std::numeric_limits<int32_t>::max()});
  REQUIRE(shape.threads >= 32);
  REQUIRE(shape.threads <= 1024);
  REQUIRE(shape.threads % 32 == 0);
  REQUIRE(shape.shared_bytes <= 48 * 1024);
}

// Addresses without memory behind them: pages appear where they are written.
class Sparse {
 public:
  explicit Sparse(int64_t bytes) : bytes_(bytes) {
    void* base =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(base != MAP_FAILED);
    base_ = static_cast<float*>(base);
  }
  ~Sparse() { munmap(base_, bytes_); }
  float* get() const { return base_; }

 private:
  int64_t bytes_;
  float* base_;
};

}  // namespace

TEST_CASE("launches fit every device at the largest sizes, and cover everything", "[cuda][launch]") {
  for (const int64_t rows :
       {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{8}, int64_t{9}, kMaxPairs - 1, kMaxPairs}) {
    const LaunchShape shape = ForRows(rows);
    RequireLaunchable(shape);
    REQUIRE((shape.blocks == 0) == (rows == 0));
    // Grid-stride: the blocks there are take every row, and no block has nothing to do.
    REQUIRE(int64_t{shape.blocks} * kRowsPerBlock < rows + kRowsPerBlock);
    // The last loop index of a warp is rows + a stride, in 64 bits far from overflow.
    REQUIRE(rows + int64_t{shape.blocks} * kRowsPerBlock <
            std::numeric_limits<int64_t>::max() / kMaxWidth / 4);
  }
  for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{255}, int64_t{257}, kMaxPairs, kMaxParameters,
                          std::numeric_limits<int64_t>::max() - kThreadsPerBlock * kMaxBlocks}) {
    RequireLaunchable(ForElements(n));
    REQUIRE((ForElements(n).blocks == 0) == (n == 0));
  }
  for (const int64_t items : {int64_t{1}, int64_t{128}, int64_t{65536}, kMaxPairs}) {
    RequireLaunchable(ForBlocks(items));
    REQUIRE(ForBlocks(items).blocks == items);
    RequireLaunchable(ForLists(items));
    REQUIRE(ForLists(items).blocks == std::min(items, kMaxListBlocks));
  }
  RequireLaunchable(ForPartialSums());
  constexpr int64_t kWarps = kBlockThreads / 32;
  static_assert(kBlockSharedBytes >= 256 * 4 + 2 * 4, "a histogram and two scalars");
  static_assert(kBlockSharedBytes >= kWarps * 8 + kWarps * 4, "a sum and a count per warp");
  static_assert(ForRows(9).blocks == 2 && ForElements(257).blocks == 2 && ForElements(256).blocks == 1);
}

TEST_CASE("pieces cover the entries of items up to the most pairs, in any number", "[cuda][launch]") {
  static_assert(PiecesOf(0) == 0 && PiecesOf(1) == 1);
  for (const int64_t entries : {kPieceEntries - 1, kPieceEntries, kPieceEntries + 1, kMaxPairs}) {
    REQUIRE(PiecesOf(entries) * kPieceEntries >= entries);
    REQUIRE((PiecesOf(entries) - 1) * kPieceEntries < entries);
  }
  // As many items as there are pairs, each of its own piece: prefix sums and loop counters have 64 bits.
  REQUIRE(kMaxPairs * kPieceEntries < std::numeric_limits<int64_t>::max() / 4);
  RequireLaunchable(ForRows(kMaxPairs));
}

TEST_CASE("columns are permuted in whole packs, within the scratch memory, all of them", "[cuda][launch]") {
  Random random(3);
  for (int round = 0; round < 2000; ++round) {
    const int64_t width = random.Between(1, 1 << 15);
    const int64_t rows = random.Below(3) == 0 ? random.Between(1, kMaxPairs) : random.Between(1, 1 << 20);
    const int64_t columns = PermutedColumns(width, rows);
    CAPTURE(width, rows, columns);
    REQUIRE((columns == width || columns % 8 == 0));
    REQUIRE((columns >= 1 && columns <= width));
    if (rows <= kPermuteScratchBytes / 16) REQUIRE(rows * columns * 2 <= kPermuteScratchBytes);
  }
  REQUIRE(PermutedColumns(2048, 0) == 2048);
}

TEST_CASE("row passes reach rows beyond 2^31 elements and 2^32 bytes", "[cuda][launch]") {
  const int64_t width = 64;
  const int32_t far = 50'000'000;  // 3.2e9 elements, 12.8e9 bytes
  const Sparse rows((int64_t{far} + 1) * width * 4);
  float* const last = rows.get() + int64_t{far} * width;
  for (int64_t i = 0; i < width; ++i) last[i] = static_cast<float>(i + 1);
  const std::vector<int32_t> index{far, 0};
  std::vector<float> out = Poisoned(2 * width);
  const auto require_out = [&] {
    for (int64_t i = 0; i < width; ++i) {
      REQUIRE(out[i] == static_cast<float>(i + 1));
      REQUIRE(out[width + i] == 0);
    }
    out = Poisoned(2 * width);
  };
  REQUIRE(GatherRows(nullptr, Type::kFp32, width, rows.get(), index.data(), 2, out.data()).ok());
  require_out();
  const std::vector<float> alpha{1, 1};
  REQUIRE(CombineRows(nullptr, {Type::kFp32, width, 2, 1, rows.get(), index.data(), alpha.data(), out.data()})
              .ok());
  require_out();
  const std::vector<int64_t> offset{0, 1, 2};
  REQUIRE(
      SumRows(nullptr, {Type::kFp32, width, 2, rows.get(), index.data(), offset.data(), out.data()}).ok());
  require_out();
  std::vector<float> dot = Poisoned(2);
  REQUIRE(
      RowDot(nullptr, {Type::kFp32, width, 2, rows.get(), index.data(), rows.get(), index.data(), dot.data()})
          .ok());
  REQUIRE(dot[0] == static_cast<float>(width * (width + 1) * (2 * width + 1) / 6));
  REQUIRE(dot[1] == 0);
}

TEST_CASE("rows are permuted as on the host, whatever the stretches of columns", "[cuda][rows]") {
  Random random(4);
  for (const int64_t width : {int64_t{1}, int64_t{7}, int64_t{8}, int64_t{64}, int64_t{100}})
    for (const int64_t num_rows : {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{9}, int64_t{33}})
      for (const int64_t columns : {int64_t{1}, int64_t{8}, int64_t{16}, width}) {
        if (columns > width) continue;
        std::vector<int32_t> to(num_rows);
        std::iota(to.begin(), to.end(), 0);
        for (int64_t i = num_rows - 1; i > 0; --i) std::swap(to[i], to[random.Below(i + 1)]);
        Rows rows = Rows::Random(Type::kBf16, num_rows * width, random);
        std::vector<Bf16> want(num_rows * width);
        if (!want.empty()) std::memcpy(want.data(), rows.get(), want.size() * 2);
        for (int64_t first = 0; first < width; first += columns) {
          const int64_t count = std::min(columns, width - first);
          Rows scratch(Type::kBf16, num_rows * count);
          REQUIRE(
              PermuteColumns(nullptr, {width, first, count, num_rows, to.data(), rows.get(), scratch.get()})
                  .ok());
        }
        PermuteHostRows(width * 2, to, want.data());
        REQUIRE((want.empty() || std::memcmp(rows.get(), want.data(), want.size() * 2) == 0));
        for (int64_t i = 0; i < num_rows; ++i) REQUIRE(to[i] == i);
      }
}

}  // namespace lrmoe::kernels::cuda
