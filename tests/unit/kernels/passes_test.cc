#include <functional>
#include <limits>

#include "tests/unit/kernels/twin.h"

namespace lrmoe::kernels {
namespace {

constexpr ExpertActivation kActivations[] = {ExpertActivation::kSwiGlu, ExpertActivation::kSilu,
                                             ExpertActivation::kGelu};
constexpr int64_t kWidths[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 100, 257};

struct Derivatives {
  double phi, dx, dup;
};
Derivatives Plain(ExpertActivation activation, double x, double up) {
  if (activation == ExpertActivation::kGelu) {
    const double cdf = 0.5 * std::erfc(-x / std::sqrt(2.0));
    return {x * cdf, cdf + x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI), 0};
  }
  const double s = 1 / (1 + std::exp(-x));
  const double silu = x * s, slope = s + x * s * (1 - s);
  if (activation == ExpertActivation::kSilu) return {silu, slope, 0};
  return {silu * up, slope * up, silu};
}

// How much a rounding of x is magnified in phi(x), at least 1: the tails of the error function are steep.
double Condition(ExpertActivation activation, double x) {
  return activation == ExpertActivation::kGelu ? 1 + x * x : 1;
}

int64_t AWidth(ExpertActivation activation, int64_t f) {
  return activation == ExpertActivation::kSwiGlu ? 2 * f : f;
}

void RequireClose(const Elements& got, int64_t i, double want, double magnitude, double factor = 1e-6) {
  if (Close(got.type(), got[i], want, magnitude, factor)) return;
  CAPTURE(i, magnitude);
  REQUIRE(got[i] == want);
}

// Runs `check` for every device, type and width with few rows, and once with enough rows for several tasks.
void ForAllShapes(const std::function<void(Device&, Type, int64_t rows, int64_t width)>& check) {
  for (const NamedDevice& named : AllDevices()) {
    for (Type type : kTypes) {
      CAPTURE(named.name, static_cast<int>(type));
      for (int64_t width : kWidths) {
        for (int64_t rows : {0, 1, 5}) check(*named.device, type, rows, width);
      }
      check(*named.device, type, 700, 129);
    }
  }
}

TEST_CASE("activation forward", "[activation]") {
  ForAllShapes([](Device& device, Type type, int64_t rows, int64_t f) {
    for (ExpertActivation activation : kActivations) {
      Random random(static_cast<uint64_t>(f));
      const int64_t width = AWidth(activation, f);
      Elements a = Elements::Uniform(type, rows * width, random, 9), phi(type, rows * f),
               norm2(Type::kFp32, rows);
      device.ActivationForward(activation, type, rows, f, a.ptr(), phi.ptr(), norm2.fp32());
      REQUIRE(phi.intact());
      REQUIRE(norm2.intact());
      for (int64_t row = 0; row < rows; ++row) {
        double sum = 0;
        for (int64_t i = 0; i < f; ++i) {
          const double up = width == 2 * f ? a[row * width + f + i] : 0;
          const double want = Plain(activation, a[row * width + i], up).phi;
          RequireClose(phi, row * f + i, want, std::abs(want) * Condition(activation, a[row * width + i]));
          sum += phi[row * f + i] * phi[row * f + i];
        }
        RequireClose(norm2, row, sum, sum);
      }
    }
  });
}

TEST_CASE("activation backward, phi_alpha in place of u and apart", "[activation]") {
  ForAllShapes([](Device& device, Type type, int64_t rows, int64_t f) {
    for (ExpertActivation activation : kActivations) {
      Random random(static_cast<uint64_t>(f));
      const int64_t width = AWidth(activation, f);
      Elements a = Elements::Uniform(type, rows * width, random, 9),
               u = Elements::Uniform(type, rows * f, random);
      Elements alpha = Elements::Uniform(Type::kFp32, rows, random);
      Elements da(type, rows * width), phi_alpha(type, rows * f), dalpha(Type::kFp32, rows);
      device.ActivationBackward(activation, type, rows, f, a.ptr(), u.ptr(), alpha.fp32(), da.ptr(),
                                phi_alpha.ptr(), dalpha.fp32());
      REQUIRE((da.intact() && phi_alpha.intact() && dalpha.intact()));
      for (int64_t row = 0; row < rows; ++row) {
        double dot = 0, magnitude = 0;
        for (int64_t i = 0; i < f; ++i) {
          const double up = width == 2 * f ? a[row * width + f + i] : 0, g = u[row * f + i];
          const Derivatives d = Plain(activation, a[row * width + i], up);
          RequireClose(da, row * width + i, alpha[row] * g * d.dx, std::abs(g) * (1 + std::abs(up)));
          if (width == 2 * f)
            RequireClose(da, row * width + f + i, alpha[row] * g * d.dup, std::abs(alpha[row] * g * d.dup));
          RequireClose(phi_alpha, row * f + i, alpha[row] * d.phi,
                       std::abs(d.phi) * Condition(activation, a[row * width + i]));
          dot += g * d.phi;
          magnitude += std::abs(g * d.phi) * Condition(activation, a[row * width + i]);
        }
        RequireClose(dalpha, row, dot, magnitude);
      }
      Elements da2(type, rows * width), dalpha2(Type::kFp32, rows);
      device.ActivationBackward(activation, type, rows, f, a.ptr(), u.ptr(), alpha.fp32(), da2.ptr(), u.ptr(),
                                dalpha2.fp32());
      REQUIRE((da2 == da && u == phi_alpha && dalpha2 == dalpha));
    }
  });
}

TEST_CASE("SiLU over its whole range: 2e-7 relative, finite, exact zeros", "[activation]") {
  for (const NamedDevice& named : AllDevices()) {
    CAPTURE(named.name);
    const int64_t n = 200000;
    Elements x(Type::kFp32, n), phi(Type::kFp32, n), norm2(Type::kFp32, 1);
    for (int64_t i = 0; i < n; ++i) x.Set(i, static_cast<float>(-100 + 200.0 * i / (n - 1)));
    named.device->ActivationForward(ExpertActivation::kSilu, Type::kFp32, 1, n, x.ptr(), phi.ptr(),
                                    norm2.fp32());
    double worst = 0;
    for (int64_t i = 0; i < n; ++i) {
      REQUIRE(std::isfinite(phi[i]));
      const double want = x[i] / (1 + std::exp(-x[i]));
      if (x[i] < -86) {
        REQUIRE(std::abs(phi[i] - want) < 1e-34);
      } else if (want != 0) {
        worst = std::max(worst, std::abs(phi[i] - want) / std::abs(want));
      }
    }
    CHECK(worst < 4e-7);  // exp 2e-7, one division, two products
    CHECK(worst > 0);
    Elements odd(Type::kFp32, 6), out(Type::kFp32, 6);
    const float inf = std::numeric_limits<float>::infinity();
    const float values[] = {0.0f, -0.0f, inf, std::nanf(""), 1e-40f, -3e38f};
    for (int i = 0; i < 6; ++i) odd.Set(i, values[i]);
    named.device->ActivationForward(ExpertActivation::kSilu, Type::kFp32, 1, 6, odd.ptr(), out.ptr(),
                                    norm2.fp32());
    CHECK(out[0] == 0);
    CHECK((out[1] == 0 && std::signbit(out[1])));
    CHECK(out[2] == inf);
    CHECK(std::isnan(out[3]));
    CHECK(out[4] == Approx(5e-41).epsilon(1e-3));
    CHECK(out[5] == 0);
  }
}

TEST_CASE("gather rows", "[rows]") {
  ForAllShapes([](Device& device, Type type, int64_t rows, int64_t width) {
    Random random(3);
    Elements src = Elements::Uniform(type, 11 * width, random), dst(type, rows * width);
    std::vector<int32_t> index(rows);
    for (int32_t& i : index) i = static_cast<int32_t>(random.Below(11));
    device.GatherRows(type, width, src.ptr(), index, dst.ptr());
    REQUIRE(dst.intact());
    for (int64_t i = 0; i < rows * width; ++i) REQUIRE(dst[i] == src[index[i / width] * width + i % width]);
  });
}

TEST_CASE("combine rows skips negative positions and keeps slot order", "[rows]") {
  ForAllShapes([](Device& device, Type type, int64_t tokens, int64_t width) {
    Random random(4);
    for (int32_t k : {1, 3, 8}) {
      Elements y = Elements::Uniform(type, 13 * width, random), out(type, tokens * width);
      Elements alpha = Elements::Uniform(Type::kFp32, tokens * k, random);
      std::vector<int32_t> position(tokens * k);
      for (int32_t& p : position) p = random.Below(3) == 0 ? -1 : static_cast<int32_t>(random.Below(13));
      if (tokens > 1) std::fill_n(position.begin() + k, k, -1);
      for (int64_t i = 0; i < tokens * k; ++i) {
        if (position[i] < 0) alpha.Set(i, std::nanf(""));
      }
      device.CombineRows(type, width, tokens, k, y.ptr(), position.data(), alpha.fp32(), out.ptr());
      REQUIRE(out.intact());
      for (int64_t i = 0; i < tokens * width; ++i) {
        float want = 0, magnitude = 0;
        for (int32_t j = 0; j < k; ++j) {
          const int64_t slot = i / width * k + j;
          if (position[slot] < 0) continue;
          const float term =
              static_cast<float>(alpha[slot]) * static_cast<float>(y[position[slot] * width + i % width]);
          want += term;
          magnitude += std::abs(term);
        }
        if (type == Type::kFp32) REQUIRE(out[i] == want);  // the very order of additions
        RequireClose(out, i, want, magnitude);
      }
    }
  });
}

TEST_CASE("sum rows over segments, empty ones give zero", "[rows]") {
  ForAllShapes([](Device& device, Type type, int64_t rows, int64_t width) {
    Random random(5);
    Elements src = Elements::Uniform(type, 17 * width, random), dst(type, rows * width);
    std::vector<int64_t> offset = {0};
    std::vector<int32_t> index;
    for (int64_t row = 0; row < rows; ++row) {
      for (uint64_t j = random.Below(4); j > 0; --j) index.push_back(static_cast<int32_t>(random.Below(17)));
      offset.push_back(static_cast<int64_t>(index.size()));
    }
    device.SumRows(type, width, src.ptr(), index, offset, dst.ptr());
    REQUIRE(dst.intact());
    for (int64_t i = 0; i < rows * width; ++i) {
      float want = 0;
      for (int64_t j = offset[i / width]; j < offset[i / width + 1]; ++j)
        want += static_cast<float>(src[index[j] * width + i % width]);
      if (type == Type::kFp32) REQUIRE(dst[i] == want);
      RequireClose(dst, i, want, 0);
    }
  });
}

TEST_CASE("row norms, absolute sums and dot products", "[rows]") {
  ForAllShapes([](Device& device, Type type, int64_t rows, int64_t width) {
    Random random(6);
    Elements a = Elements::Uniform(type, rows * width, random),
             b = Elements::Uniform(type, 9 * width, random);
    Elements norm2(Type::kFp32, rows), abs_sum(Type::kFp32, rows), dot(Type::kFp32, rows);
    std::vector<int32_t> a_row(rows), b_row(rows);
    for (int64_t row = 0; row < rows; ++row) {
      a_row[row] = static_cast<int32_t>(rows - 1 - row);
      b_row[row] = static_cast<int32_t>(random.Below(9));
    }
    device.RowNorm2(type, rows, width, a.ptr(), norm2.fp32());
    device.RowAbsSum(type, rows, width, a.ptr(), abs_sum.fp32());
    device.RowDot(type, width, a.ptr(), a_row, b.ptr(), b_row, dot.fp32());
    REQUIRE((norm2.intact() && abs_sum.intact() && dot.intact()));
    for (int64_t row = 0; row < rows; ++row) {
      double squares = 0, absolutes = 0, products = 0, magnitude = 0;
      for (int64_t i = 0; i < width; ++i) {
        const double v = a[row * width + i], p = a[a_row[row] * width + i] * b[b_row[row] * width + i];
        squares += v * v;
        absolutes += std::abs(v);
        products += p;
        magnitude += std::abs(p);
      }
      RequireClose(norm2, row, squares, squares);
      RequireClose(abs_sum, row, absolutes, absolutes);
      RequireClose(dot, row, products, magnitude);
    }
  });
}

TEST_CASE("special values pass through the row sums", "[rows]") {
  for (const NamedDevice& named : AllDevices()) {
    for (Type type : kTypes) {
      CAPTURE(named.name, static_cast<int>(type));
      const float inf = std::numeric_limits<float>::infinity();
      Elements src(type, 4 * 9), out(Type::kFp32, 4);
      for (int64_t i = 0; i < 36; ++i) src.Set(i, i % 2 ? -0.0f : 0.0f);
      src.Set(0, -inf);
      src.Set(9 + 8, std::nanf(""));
      src.Set(18, 1e-39f);  // a denormal: its square is zero, itself is not
      named.device->RowNorm2(type, 4, 9, src.ptr(), out.fp32());
      CHECK(out[0] == inf);
      CHECK(std::isnan(out[1]));
      CHECK((out[2] == 0 && out[3] == 0));
      named.device->RowAbsSum(type, 4, 9, src.ptr(), out.fp32());
      CHECK(out[0] == inf);
      CHECK(std::isnan(out[1]));
      CHECK(out[2] == src[18]);
      CHECK((out[3] == 0 && !std::signbit(out[3])));
    }
  }
}

TEST_CASE("all instruction sets and thread counts give the same bits", "[determinism]") {
  const std::vector<NamedDevice> devices = AllDevices();
  Random random(8);
  const int64_t rows = 300, f = 203;
  for (Type type : kTypes) {
    for (ExpertActivation activation : {ExpertActivation::kSwiGlu, ExpertActivation::kSilu}) {
      Elements a = Elements::Uniform(type, rows * AWidth(activation, f), random, 5);
      Elements u = Elements::Uniform(type, rows * f, random),
               alpha = Elements::Uniform(Type::kFp32, rows, random);
      std::vector<Elements> first;
      for (const NamedDevice& named : devices) {
        CAPTURE(named.name);
        std::vector<Elements> out = {Elements(type, a.size()), Elements(type, u.size()),
                                     Elements(type, u.size()), Elements(Type::kFp32, rows),
                                     Elements(Type::kFp32, rows)};
        named.device->ActivationForward(activation, type, rows, f, a.ptr(), out[1].ptr(), out[3].fp32());
        named.device->ActivationBackward(activation, type, rows, f, a.ptr(), u.ptr(), alpha.fp32(),
                                         out[0].ptr(), out[2].ptr(), out[4].fp32());
        if (first.empty()) first = out;
        REQUIRE(out == first);
      }
    }
  }
}

}  // namespace
}  // namespace lrmoe::kernels
