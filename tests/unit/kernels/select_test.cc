#include <algorithm>
#include <bit>
#include <limits>

#include "tests/unit/kernels/twin.h"

namespace lrmoe::kernels {
namespace {

// Indices kept, by sorting: larger score first, ties to the lower index.
std::vector<char> KeptBySorting(const std::vector<float>& scores, int64_t k) {
  std::vector<int64_t> order(scores.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
  std::vector<char> kept(scores.size(), 0);
  for (int64_t i = 0; i < k; ++i) kept[order[i]] = 1;
  return kept;
}

std::vector<char> KeptByThreshold(const std::vector<float>& scores, TopK top) {
  std::vector<char> kept(scores.size(), 0);
  for (size_t i = 0; i < scores.size(); ++i) {
    kept[i] = scores[i] > top.threshold || (scores[i] == top.threshold && top.ties-- > 0);
  }
  return kept;
}

TopK SelectTopK(const std::vector<float>& scores, int64_t k) {
  std::vector<uint32_t> scratch(scores.size());
  return kernels::SelectTopK(scores, k, scratch);
}

void CheckSelection(const std::vector<float>& scores, int64_t k) {
  CAPTURE(scores.size(), k);
  const TopK top = SelectTopK(scores, k);
  REQUIRE(KeptByThreshold(scores, top) == KeptBySorting(scores, k));
  if (k > 0) REQUIRE(top.ties >= 1);  // the k-th largest itself
}

std::vector<float> Scores(Random& random, int64_t n, int style) {
  std::vector<float> scores(n);
  for (float& score : scores) {
    switch (style) {
      case 0:  // any finite non-negative pattern, denormals included
        score = std::bit_cast<float>(static_cast<uint32_t>(random.Below(0x7F800000u)));
        break;
      case 1:  // few values, many ties
        score = static_cast<float>(random.Below(4));
        break;
      case 2:  // all equal
        score = 0.75f;
        break;
      case 3:  // zeros of both signs and a few others
        score =
            random.Below(4) == 0 ? static_cast<float>(random.Uniform()) : (random.Below(2) ? 0.0f : -0.0f);
        break;
      default:  // neighbours that differ in the last bits only
        score = std::bit_cast<float>(0x3F800000u + static_cast<uint32_t>(random.Below(2000)));
    }
  }
  return scores;
}

TEST_CASE("SelectTopK equals sorting", "[select]") {
  Random random(7);
  for (int64_t n : {0, 1, 2, 3, 100, 511, 512, 513, 3000, 65536}) {
    for (int style = 0; style < 5; ++style) {
      const std::vector<float> scores = Scores(random, n, style);
      for (int64_t k : {int64_t{0}, n, n / 2, std::min<int64_t>(n, 1), std::max<int64_t>(0, n - 1),
                        random.Between(0, n)}) {
        CheckSelection(scores, k);
      }
    }
  }
}

TEST_CASE("SelectTopK on many random problems", "[select]") {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    Random random(seed);
    const std::vector<float> scores =
        Scores(random, random.Between(1, 1500), static_cast<int>(random.Below(5)));
    CheckSelection(scores, random.Between(0, static_cast<int64_t>(scores.size())));
  }
}

TEST_CASE("SelectTopK keeps what its header says at the ends", "[select]") {
  const std::vector<float> scores = {3, 1, 2, 1};
  CHECK(SelectTopK(scores, 0).threshold == std::numeric_limits<float>::infinity());
  CHECK(SelectTopK(scores, 0).ties == 0);
  CHECK(SelectTopK(scores, 4).threshold == 1);
  CHECK(SelectTopK(scores, 4).ties == 2);
  CHECK(SelectTopK(scores, 3).threshold == 1);
  CHECK(SelectTopK(scores, 3).ties == 1);
}

}  // namespace
}  // namespace lrmoe::kernels
