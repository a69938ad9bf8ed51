// The activation passes against fp64, their gradient against finite differences of it, and the parameter
// passes.
#include <catch2/catch.hpp>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/passes.h"
#include "tests/unit/cuda/buffers.h"

namespace lrmoe::kernels::cuda {
namespace {

double Phi(ExpertActivation activation, double gate, double up) {
  switch (activation) {
    case ExpertActivation::kSwiGlu:
      return gate / (1 + std::exp(-gate)) * up;
    case ExpertActivation::kSilu:
      return gate / (1 + std::exp(-gate));
    case ExpertActivation::kGelu:
      return 0.5 * gate * std::erfc(-gate / std::sqrt(2.0));
  }
  return 0;
}

struct Case {
  ExpertActivation activation;
  Type type;
  int64_t rows, f, shift;
};
std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (ExpertActivation activation :
       {ExpertActivation::kSwiGlu, ExpertActivation::kSilu, ExpertActivation::kGelu})
    for (Type type : {Type::kBf16, Type::kFp32})
      for (auto [rows, f, shift] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{
               {0, 8, 0}, {1, 1, 0}, {3, 5, 0}, {9, 256, 0}, {4, 264, 1}})
        cases.push_back({activation, type, rows, f, shift});
  return cases;
}

TEST_CASE("the activation and its squared norm", "[cuda][activation]") {
  for (const Case& c : Cases()) {
    Random random(c.rows + c.f);
    const int64_t width = c.activation == ExpertActivation::kSwiGlu ? 2 * c.f : c.f;
    Rows a = Rows::Random(c.type, c.rows * width, random, c.shift);
    Rows phi(c.type, c.rows * c.f, c.shift);
    std::vector<float> norm2 = Poisoned(c.rows);
    REQUIRE(
        ActivationForward(nullptr, c.activation, c.type, c.rows, c.f, a.get(), phi.get(), norm2.data()).ok());
    for (int64_t row = 0; row < c.rows; ++row) {
      double squares = 0;
      for (int64_t j = 0; j < c.f; ++j) {
        const double up = width > c.f ? a[row * width + c.f + j] : 0;
        const double want = Phi(c.activation, a[row * width + j], up);
        REQUIRE(Near(phi[row * c.f + j], want, want, Tolerance(c.type)));
        squares += phi[row * c.f + j] * phi[row * c.f + j];
      }
      REQUIRE(Near(norm2[row], squares, squares, 2e-6));
    }
  }
}

TEST_CASE("the activation's gradient equals finite differences", "[cuda][activation]") {
  for (const Case& c : Cases()) {
    Random random(c.rows * 31 + c.f);
    const bool gated = c.activation == ExpertActivation::kSwiGlu;
    const int64_t width = gated ? 2 * c.f : c.f;
    Rows a = Rows::Random(c.type, c.rows * width, random, c.shift);
    Rows u = Rows::Random(c.type, c.rows * c.f, random, c.shift);
    Rows da(c.type, c.rows * width, c.shift), phi_alpha(c.type, c.rows * c.f, c.shift);
    std::vector<float> alpha = RandomFloats(c.rows, random), dalpha = Poisoned(c.rows);
    REQUIRE(ActivationBackward(nullptr, {c.activation, c.type, c.rows, c.f, a.get(), u.get(), alpha.data(),
                                         da.get(), phi_alpha.get(), dalpha.data()})
                .ok());
    for (int64_t row = 0; row < c.rows; ++row) {
      double dot = 0, magnitude = 0;
      for (int64_t j = 0; j < c.f; ++j) {
        const double gate = a[row * width + j], up = gated ? a[row * width + c.f + j] : 0;
        const double phi = Phi(c.activation, gate, up);
        const double scaled = alpha[row] * u[row * c.f + j];
        const double h = 1e-5;
        const double d_gate = (Phi(c.activation, gate + h, up) - Phi(c.activation, gate - h, up)) / (2 * h);
        REQUIRE(Near(da[row * width + j], scaled * d_gate, std::abs(scaled) * (1 + std::abs(d_gate)),
                     2 * Tolerance(c.type)));
        if (gated) {
          const double d_up = Phi(c.activation, gate, 1);
          REQUIRE(Near(da[row * width + c.f + j], scaled * d_up, scaled * d_up, 2 * Tolerance(c.type)));
        }
        REQUIRE(Near(phi_alpha[row * c.f + j], alpha[row] * phi, phi, Tolerance(c.type)));
        dot += u[row * c.f + j] * phi;
        magnitude += std::abs(u[row * c.f + j] * phi);
      }
      REQUIRE(Near(dalpha[row], dot, magnitude, 4e-6));
    }
  }
}

TEST_CASE("AdamW follows the textbook update in fp64", "[cuda][parameters]") {
  for (Type type : {Type::kBf16, Type::kFp32}) {
    Random random(7);
    const int64_t n = 1000;
    std::vector<float> master = RandomFloats(n, random), m(n, 0.0f), v(n, 0.0f);
    std::vector<double> want(master.begin(), master.end()), want_m(n, 0.0), want_v(n, 0.0);
    Rows weights(type, n);
    for (int64_t step = 1; step <= 3; ++step) {
      const std::vector<float> gradient = RandomFloats(n, random);
      const Device::AdamWStep settings = {step, 1e-2, 0.9, 0.99, 1e-8, 0.1, 0.5};
      REQUIRE(AdamW(nullptr,
                    {settings, n, master.data(), m.data(), v.data(), gradient.data(), type, weights.get()})
                  .ok());
      for (int64_t i = 0; i < n; ++i) {
        const double g = gradient[i] * 0.5;
        want_m[i] = 0.9 * want_m[i] + 0.1 * g;
        want_v[i] = 0.99 * want_v[i] + 0.01 * g * g;
        const double m_hat = want_m[i] / (1 - std::pow(0.9, step)),
                     v_hat = want_v[i] / (1 - std::pow(0.99, step));
        want[i] = want[i] * (1 - 1e-2 * 0.1) - 1e-2 * m_hat / (std::sqrt(v_hat) + 1e-8);
        REQUIRE(Near(master[i], want[i], 1.0, 2e-6));
        REQUIRE(Near(weights[i], master[i], master[i], type == Type::kBf16 ? 0x1.0p-8 : 0));
      }
    }
  }
}

TEST_CASE("sums of squares, additions and conversions", "[cuda][parameters]") {
  for (int64_t n : {0, 4097}) {
    Random random(n + 1);
    std::vector<float> values = RandomFloats(n, random, -100, 100), sum = values;
    std::vector<double> partial(kPartialSums, std::nan("")), out(1, std::nan("")), again(1, std::nan(""));
    REQUIRE(SquaredNorm(nullptr, n, values.data(), partial.data(), out.data()).ok());
    REQUIRE(SquaredNorm(nullptr, n, values.data(), partial.data(), again.data()).ok());
    double want = 0;
    for (float value : values) want += double{value} * value;
    CHECK(Near(out[0], want, want, 1e-12));
    CHECK(out[0] == again[0]);

    REQUIRE(AddInPlace(nullptr, n, sum.data(), values.data()).ok());
    std::vector<Bf16> rounded(n, 0xFFFF);
    std::vector<float> back = Poisoned(n);
    REQUIRE(Fp32ToBf16(nullptr, n, values.data(), rounded.data()).ok());
    REQUIRE(Bf16ToFp32(nullptr, n, rounded.data(), back.data()).ok());
    for (int64_t i = 0; i < n; ++i) {
      REQUIRE(sum[i] == 2 * values[i]);
      REQUIRE(back[i] == RoundToBf16(values[i]));
    }
  }
}

}  // namespace
}  // namespace lrmoe::kernels::cuda
