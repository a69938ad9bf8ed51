// Conversions, sums over elements and AdamW.
#include <bit>
#include <limits>

#include "tests/unit/kernels/twin.h"

namespace lrmoe::kernels {
namespace {

float Fp32(uint32_t bits) {
  return std::bit_cast<float>(bits);
}

// The bf16 nearest to x, ties to the even pattern, found by comparing distances; x finite and below the
// largest bf16.
Bf16 NearestBySearch(float x) {
  const Bf16 down = static_cast<Bf16>(std::bit_cast<uint32_t>(x) >> 16);  // towards zero
  const Bf16 up = static_cast<Bf16>(down + 1);
  const double to_down = std::abs(double{x} - Fp32(uint32_t{down} << 16));
  const double to_up = std::abs(Fp32(uint32_t{up} << 16) - double{x});
  if (to_down != to_up) return to_down < to_up ? down : up;
  return down % 2 == 0 ? down : up;
}

TEST_CASE("bf16 to fp32 is exact and back again, for every pattern", "[convert]") {
  for (const NamedDevice& named : AllDevices()) {
    std::vector<Bf16> all(65536), back(65536);
    std::vector<float> wide(65536);
    for (int i = 0; i < 65536; ++i) all[i] = static_cast<Bf16>(i);
    named.device->Bf16ToFp32(65536, all.data(), wide.data());
    named.device->Fp32ToBf16(65536, wide.data(), back.data());
    for (int i = 0; i < 65536; ++i) {
      REQUIRE(std::bit_cast<uint32_t>(wide[i]) == static_cast<uint32_t>(i) << 16);
      if (std::isnan(wide[i])) {
        REQUIRE((std::isnan(Fp32(uint32_t{back[i]} << 16)) && (back[i] & 0x40)));
      } else {
        REQUIRE(back[i] == all[i]);
      }
    }
  }
}

TEST_CASE("fp32 to bf16 rounds to nearest even, for every pattern and around its midpoint", "[convert]") {
  for (const NamedDevice& named : AllDevices()) {
    for (uint32_t low : {0x0001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      std::vector<float> src;
      for (uint32_t high = 0; high < 65536; ++high) src.push_back(Fp32(high << 16 | low));
      std::vector<Bf16> dst(src.size());
      named.device->Fp32ToBf16(static_cast<int64_t>(src.size()), src.data(), dst.data());
      for (uint32_t high = 0; high < 65536; ++high) {
        CAPTURE(named.name, high, low);
        const uint32_t magnitude = high & 0x7FFF;
        if (magnitude >= 0x7F80) {
          REQUIRE(std::isnan(Fp32(uint32_t{dst[high]} << 16)));
        } else if (magnitude == 0x7F7F) {  // beyond the largest finite: infinity from the midpoint on
          REQUIRE(dst[high] == (low >= 0x8000 ? high + 1 : high));
        } else {
          REQUIRE(dst[high] == NearestBySearch(src[high]));
        }
      }
    }
    const float odd[] = {std::numeric_limits<float>::infinity(), -0.0f, std::numeric_limits<float>::max()};
    Bf16 out[3];
    named.device->Fp32ToBf16(3, odd, out);
    CHECK(out[0] == 0x7F80);
    CHECK(out[1] == 0x8000);
    CHECK(out[2] == 0x7F80);
  }
}

TEST_CASE("squared norm and addition", "[elements]") {
  for (const NamedDevice& named : AllDevices()) {
    CAPTURE(named.name);
    Random random(1);
    for (int64_t n : {0, 1, 7, 8, 9, 1000, 32768, 32769, 100003}) {
      Elements a = Elements::Uniform(Type::kFp32, n, random), b = Elements::Uniform(Type::kFp32, n, random);
      double want = 0;
      for (int64_t i = 0; i < n; ++i) want += a[i] * a[i];
      const double norm = named.device->SquaredNorm(n, a.fp32());
      REQUIRE(std::abs(norm - want) <= 1e-12 * want);
      REQUIRE(named.device->SquaredNorm(n, a.fp32()) == norm);
      Elements sum = a;
      named.device->AddInPlace(n, sum.fp32(), b.fp32());
      REQUIRE(sum.intact());
      for (int64_t i = 0; i < n; ++i) REQUIRE(sum[i] == static_cast<float>(a[i]) + static_cast<float>(b[i]));
    }
  }
}

struct Moments {
  std::vector<double> p, m, v;
};

// One step as the AdamW paper states it, in fp64.
void PlainStep(const Device::AdamWStep& s, Elements& gradient, Moments& at) {
  for (size_t i = 0; i < at.p.size(); ++i) {
    const double g = gradient[static_cast<int64_t>(i)] * s.gradient_scale;
    at.p[i] -= s.lr * s.weight_decay * at.p[i];
    at.m[i] = s.beta1 * at.m[i] + (1 - s.beta1) * g;
    at.v[i] = s.beta2 * at.v[i] + (1 - s.beta2) * g * g;
    const double m_hat = at.m[i] / (1 - std::pow(s.beta1, s.step));
    const double v_hat = at.v[i] / (1 - std::pow(s.beta2, s.step));
    at.p[i] -= s.lr * m_hat / (std::sqrt(v_hat) + s.eps);
  }
}

TEST_CASE("AdamW over 20 steps equals fp64", "[adamw]") {
  for (const NamedDevice& named : AllDevices()) {
    for (Type type : kTypes) {
      for (int64_t n : {1, 13, 40000}) {
        CAPTURE(named.name, static_cast<int>(type), n);
        Random random(2);
        Elements p = Elements::Uniform(Type::kFp32, n, random), weights(type, n);
        Elements m(Type::kFp32, n), v(Type::kFp32, n);
        Moments twin{std::vector<double>(n), std::vector<double>(n, 0), std::vector<double>(n, 0)};
        for (int64_t i = 0; i < n; ++i) {
          m.Set(i, 0);
          v.Set(i, 0);
          twin.p[i] = p[i];
        }
        for (int64_t step = 1; step <= 20; ++step) {
          Elements gradient = Elements::Uniform(Type::kFp32, n, random, 3);
          const Device::AdamWStep s{.step = step, .lr = 3e-3, .weight_decay = 0.1, .gradient_scale = 0.25};
          named.device->AdamW(s, n, p.fp32(), m.fp32(), v.fp32(), gradient.fp32(), type, weights.ptr());
          PlainStep(s, gradient, twin);
        }
        REQUIRE((p.intact() && m.intact() && v.intact() && weights.intact()));
        for (int64_t i = 0; i < n; ++i) {
          REQUIRE(std::abs(p[i] - twin.p[i]) <= 1e-6 * std::abs(twin.p[i]) + 1e-7);
          REQUIRE(std::abs(m[i] - twin.m[i]) <= 1e-6);
          REQUIRE(std::abs(v[i] - twin.v[i]) <= 2e-6 * twin.v[i]);
          if (type == Type::kFp32) REQUIRE(weights[i] == p[i]);
          REQUIRE(Close(type, weights[i], p[i], 0));
        }
      }
    }
  }
}

TEST_CASE("AdamW with a zero gradient only decays", "[adamw]") {
  const auto device = std::move(CreateCpuDevice(1)).value();
  float p = 2, m = 0, v = 0, g = 0, w = 0;
  device->AdamW({.step = 1, .lr = 0.5, .weight_decay = 0.5}, 1, &p, &m, &v, &g, Type::kFp32, &w);
  CHECK(p == 1.5f);
  CHECK(w == 1.5f);
}

}  // namespace
}  // namespace lrmoe::kernels
