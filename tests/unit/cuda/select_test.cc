// Score and selection against a sort; launch geometry up to the largest supported shapes; the emulator
// itself.
#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/passes.h"
#include "tests/unit/cuda/buffers.h"

namespace lrmoe::kernels::cuda {
namespace {

TEST_CASE("scores multiply the three terms and land at their position", "[cuda][select]") {
  Random random(3);
  const int64_t tokens = 333;
  const int32_t k = 4;
  const int64_t pairs = tokens * k;
  std::vector<float> alpha = RandomFloats(pairs, random), gradient = RandomFloats(tokens, random, 0, 5),
                     phi = RandomFloats(pairs, random, 0, 5), score = Poisoned(pairs);
  std::vector<int32_t> position(pairs);
  std::iota(position.begin(), position.end(), 0);
  for (int64_t i = pairs - 1; i > 0; --i) std::swap(position[i], position[random.Below(i + 1)]);
  unsigned long long bad = std::numeric_limits<int64_t>::max();
  const ScoreArgs args = {pairs,        k,   alpha.data(), gradient.data(), phi.data(), position.data(),
                          score.data(), &bad};
  REQUIRE(Score(nullptr, args).ok());
  CHECK(bad == static_cast<unsigned long long>(std::numeric_limits<int64_t>::max()));
  for (int64_t u = 0; u < pairs; ++u) {
    const double want = double{alpha[u]} * alpha[u] * gradient[u / k] * phi[u];
    REQUIRE(Near(score[position[u]], want, want, 1e-6));
  }

  phi[700] = std::numeric_limits<float>::infinity();
  alpha[41] = std::nanf("");
  phi[41] = 1;
  REQUIRE(Score(nullptr, args).ok());
  CHECK(bad == 41);
}

// Keeps by sorting: score descending, then position ascending.
std::vector<int32_t> KeepBySorting(const std::vector<float>& score, int64_t begin, int64_t end,
                                   int64_t keep) {
  std::vector<int32_t> order(end - begin);
  std::iota(order.begin(), order.end(), static_cast<int32_t>(begin));
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return score[a] > score[b]; });
  order.resize(keep);
  std::sort(order.begin(), order.end());
  return order;
}

TEST_CASE("selection keeps exactly what a sort keeps, ties to the lowest position", "[cuda][select]") {
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Random random(seed);
    const int64_t experts = random.Between(1, 4);
    const int64_t distinct = random.Between(1, 50);  // few distinct scores: many ties
    std::vector<int64_t> offset = {0}, kept_offset = {0};
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t n = random.Below(4) == 0 ? 0 : random.Between(1, 1500);
      offset.push_back(offset.back() + n);
      const int64_t choice = random.Below(4);
      kept_offset.push_back(kept_offset.back() + (choice == 0 ? 0 : choice == 1 ? n : random.Between(0, n)));
    }
    std::vector<float> score(offset.back());
    for (float& s : score)
      s = seed % 2 ? static_cast<float>(random.Below(distinct)) * 0.25f
                   : static_cast<float>(random.Uniform() * 1e-6);
    std::vector<uint8_t> kept(offset.back(), 0xEE);
    std::vector<int32_t> kept_index(kept_offset.back(), -7);
    REQUIRE(Select(nullptr,
                   {experts, score.data(), offset.data(), kept_offset.data(), kept.data(), kept_index.data()})
                .ok());
    for (int64_t e = 0; e < experts; ++e) {
      const std::vector<int32_t> want =
          KeepBySorting(score, offset[e], offset[e + 1], kept_offset[e + 1] - kept_offset[e]);
      const std::vector<int32_t> got(kept_index.begin() + kept_offset[e],
                                     kept_index.begin() + kept_offset[e + 1]);
      REQUIRE(got == want);
      for (int64_t i = offset[e]; i < offset[e + 1]; ++i)
        REQUIRE(kept[i] == std::binary_search(want.begin(), want.end(), static_cast<int32_t>(i)));
    }
  }
}

TEST_CASE("launch geometry stays within a device's limits for the largest shapes", "[cuda][launch]") {
  // 2^40 pairs, and the largest parameter tensor: 4096 experts x 3 x 65536 x 262144.
  for (int64_t size : {int64_t{0}, int64_t{1}, (int64_t{1} << 31) - 1, int64_t{1} << 31, int64_t{1} << 40,
                       int64_t{4096} * 3 * 65536 * 262144}) {
    for (const LaunchShape& shape : {ForRows(size), ForElements(size)}) {
      CHECK((shape.blocks == 0) == (size == 0));
      CHECK(shape.blocks <= kMaxBlocks);
      CHECK(shape.threads % 32 == 0);
      // One step past the last element must not overflow the 64-bit loop counter.
      CHECK(size <= std::numeric_limits<int64_t>::max() - int64_t{shape.blocks} * shape.threads);
    }
    if (size > 0 && size <= kMaxBlocks) CHECK(int64_t{ForRows(size).blocks} * kRowsPerBlock >= size);
  }
  static_assert(ForRows(9).blocks == 2 && ForElements(257).blocks == 2 && ForElements(256).blocks == 1);
  static_assert(ForExperts(4096).shared_bytes <= 48 * 1024);  // needs no opt-in
}

}  // namespace
}  // namespace lrmoe::kernels::cuda
