// Score and exact selection on a device, against plain loops.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/random.h"
#include "kernels/cuda/passes.h"
#include "tests/support/device/device_checks.h"

namespace lrmoe::testing {
namespace {

using namespace kernels;  // NOLINT: this file is about them
using cuda::Direction;
using cuda::Runtime;

template <typename T>
class Array {
 public:
  Array(Runtime& runtime, std::vector<T> values) : runtime_(runtime), values_(std::move(values)) {
    memory_ = std::move(runtime.Reserve(std::max<int64_t>(1, bytes()))).value();
    LRMOE_CHECK(memory_->Commit(std::max<int64_t>(1, bytes())).ok());
    if (bytes() > 0)
      LRMOE_CHECK(runtime.Copy(memory_->base(), values_.data(), bytes(), Direction::kToDevice).ok());
  }
  T* get() const { return reinterpret_cast<T*>(memory_->base()); }
  const std::vector<T>& Read() {
    if (bytes() > 0)
      LRMOE_CHECK(runtime_.Copy(values_.data(), memory_->base(), bytes(), Direction::kToHost).ok());
    LRMOE_CHECK(runtime_.Synchronize().ok());
    return values_;
  }

 private:
  int64_t bytes() const { return static_cast<int64_t>(values_.size() * sizeof(T)); }
  Runtime& runtime_;
  std::vector<T> values_;
  std::unique_ptr<Memory> memory_;
};

CheckResult CheckScore(Runtime& runtime, int64_t tokens, Random& random) {
  CheckResult result{"score", 1, 0, ""};
  const int32_t k = 4;
  const int64_t pairs = tokens * k;
  std::vector<float> alpha(pairs), gradient(tokens), phi(pairs);
  for (auto* values : {&alpha, &gradient, &phi})
    for (float& value : *values) value = static_cast<float>(random.Uniform());
  const int64_t bad = pairs > 40 ? 37 : -1;
  if (bad >= 0) phi[bad] = std::numeric_limits<float>::infinity();
  std::vector<int32_t> position(pairs);
  std::iota(position.begin(), position.end(), 0);
  for (int64_t i = pairs - 1; i > 0; --i) std::swap(position[i], position[random.Below(i + 1)]);
  Array<float> d_alpha(runtime, alpha), d_gradient(runtime, gradient), d_phi(runtime, phi),
      d_score(runtime, std::vector<float>(pairs, NAN));
  Array<int32_t> d_position(runtime, position);
  Array<unsigned long long> d_bad(runtime,
                                  {static_cast<unsigned long long>(std::numeric_limits<int64_t>::max())});
  LRMOE_CHECK(runtime
                  .Launch([&] {
                    return cuda::Score(runtime.stream(),
                                       {pairs, k, d_alpha.get(), d_gradient.get(), d_phi.get(),
                                        d_position.get(), d_score.get(), d_bad.get()});
                  })
                  .ok());
  const std::vector<float>& score = d_score.Read();
  for (int64_t p = 0; p < pairs; ++p) {
    const double want = double{alpha[p]} * alpha[p] * gradient[p / k] * phi[p];
    const double got = score[position[p]];
    if (p == bad ? std::isfinite(got) : !(std::abs(got - want) <= 1e-5 * want))
      result.failure = absl::StrCat("pair ", p, " has ", got, ", expected ", want);
    else if (p != bad)
      result.worst = std::max(result.worst, std::abs(got - want) / (want + 1e-30));
  }
  if (bad >= 0 && d_bad.Read()[0] != static_cast<unsigned long long>(bad))
    result.failure = absl::StrCat("the pair without a finite score is ", d_bad.Read()[0], ", expected ", bad);
  return result;
}

// Ties, all, none, one; scores with few different values.
CheckResult CheckSelect(Runtime& runtime, int64_t experts, int64_t most, Random& random) {
  CheckResult result{"selection", experts, 0, ""};
  std::vector<int64_t> offset{0}, kept_offset{0};
  std::vector<float> score;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t n = random.Between(0, most);
    const int64_t keep = random.Below(5) == 0 ? n : random.Between(0, n);
    const bool coarse = random.Below(2) == 0;
    for (int64_t i = 0; i < n; ++i)
      score.push_back(coarse ? static_cast<float>(random.Below(4)) : static_cast<float>(random.Uniform()));
    offset.push_back(offset.back() + n);
    kept_offset.push_back(kept_offset.back() + keep);
  }
  Array<float> d_score(runtime, score);
  Array<int64_t> d_offset(runtime, offset), d_kept_offset(runtime, kept_offset);
  Array<uint8_t> d_kept(runtime, std::vector<uint8_t>(score.size(), 7));
  Array<int32_t> d_index(runtime, std::vector<int32_t>(kept_offset.back(), -7));
  LRMOE_CHECK(runtime
                  .Launch([&] {
                    return cuda::Select(runtime.stream(), {experts, d_score.get(), d_offset.get(),
                                                           d_kept_offset.get(), d_kept.get(), d_index.get()});
                  })
                  .ok());
  std::vector<uint8_t> want(score.size(), 0);
  std::vector<int32_t> want_index;
  for (int64_t e = 0; e < experts; ++e) {
    std::vector<int64_t> order(offset[e + 1] - offset[e]);
    std::iota(order.begin(), order.end(), offset[e]);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return score[a] > score[b]; });
    order.resize(kept_offset[e + 1] - kept_offset[e]);
    std::sort(order.begin(), order.end());
    for (int64_t i : order) {
      want[i] = 1;
      want_index.push_back(static_cast<int32_t>(i));
    }
  }
  if (d_kept.Read() != want) result.failure = "another set is kept";
  if (d_index.Read() != want_index) result.failure = "the list of kept pairs differs";
  return result;
}

}  // namespace

std::vector<CheckResult> CheckSelection(Runtime& runtime, CheckSize size, uint64_t seed) {
  Random random(seed);
  const bool large = size == CheckSize::kLarge;
  std::vector<CheckResult> results;
  results.push_back(CheckScore(runtime, large ? 32768 : 33, random));
  results.push_back(CheckSelect(runtime, large ? 128 : 5, large ? 20000 : 2100, random));
  return results;
}

}  // namespace lrmoe::testing
