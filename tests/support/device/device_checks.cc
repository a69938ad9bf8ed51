#include "tests/support/device/device_checks.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/random.h"
#include "tests/support/device/on_device.h"

namespace lrmoe::testing {
namespace {

using namespace kernels;  // NOLINT: this file is about them

std::vector<float> Floats(int64_t n, Random& random, double low = -1, double high = 1) {
  std::vector<float> values(n);
  for (float& value : values) value = static_cast<float>(low + (high - low) * random.Uniform());
  return values;
}

std::vector<std::byte> ToType(Device& cpu, Type type, const std::vector<float>& values) {
  std::vector<std::byte> bytes(values.size() * SizeOf(type));
  const auto n = static_cast<int64_t>(values.size());
  if (type == Type::kBf16)
    cpu.Fp32ToBf16(n, values.data(), reinterpret_cast<Bf16*>(bytes.data()));
  else
    CopyBytes(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::vector<float> ToFloats(Device& cpu, Type type, const std::vector<std::byte>& bytes) {
  std::vector<float> values(bytes.size() / SizeOf(type));
  const auto n = static_cast<int64_t>(values.size());
  if (type == Type::kBf16)
    cpu.Bf16ToFp32(n, reinterpret_cast<const Bf16*>(bytes.data()), values.data());
  else
    CopyBytes(values.data(), bytes.data(), bytes.size());
  return values;
}

// What one operation gave, as floats and as bytes.
struct Output {
  std::vector<float> values;
  std::vector<std::byte> bits;
  void Add(const std::vector<float>& more) {
    values.insert(values.end(), more.begin(), more.end());
    const std::vector<std::byte> bytes = Bytes(more);
    bits.insert(bits.end(), bytes.begin(), bytes.end());
  }
};

class Checker {
 public:
  Checker(Device& device, CheckSize size, uint64_t seed)
      : device_(device), large_(size == CheckSize::kLarge), seed_(seed) {}

  std::vector<CheckResult> Run() {
    Gemm();
    Activations();
    Rows();
    Parameters();
    return std::move(results_);
  }

 private:
  struct Shape {
    int64_t rows, width;
  };
  std::vector<Shape> Shapes() const {
    std::vector<Shape> shapes{{0, 8}, {1, 1}, {3, 7}, {9, 256}, {17, 264}};
    if (large_) shapes.insert(shapes.end(), {{4097, 2048}, {33000, 768}, {513, 4093}});
    return shapes;
  }

  // Runs `operation` on the CPU once and on the device twice. Differences beyond tolerance * (|value| + floor
  // of the largest value) fail.
  void Case(const std::string& name, const std::string& what, double tolerance,
            const std::function<Output(Device&)>& operation) {
    auto found =
        std::find_if(results_.begin(), results_.end(), [&](const auto& r) { return r.name == name; });
    if (found == results_.end()) found = results_.insert(results_.end(), CheckResult{name, 0, 0, ""});
    CheckResult& result = *found;
    ++result.cases;
    const Output want = operation(*cpu_), got = operation(device_), again = operation(device_);
    const auto fail = [&](const std::string& why) {
      if (result.failure.empty()) result.failure = absl::StrCat(what, ": ", why);
    };
    if (got.bits != again.bits) fail("two runs give different bits");
    if (got.values.size() != want.values.size()) return fail("another number of results");
    double scale = 0;
    for (float value : want.values) scale = std::max(scale, std::abs(double{value}));
    for (size_t i = 0; i < want.values.size(); ++i) {
      const double difference = std::abs(double{got.values[i]} - want.values[i]);
      const double relative = difference / (scale + 1e-30);
      if (!(relative <= tolerance))
        fail(absl::StrCat("result ", i, " is ", got.values[i], ", the CPU's ", want.values[i]));
      if (std::isfinite(relative)) result.worst = std::max(result.worst, relative);
    }
  }
  static double Tolerance(Type type) { return type == Type::kBf16 ? 0x1.0p-7 : 1e-5; }
  static std::string Of(Type type) { return type == Type::kBf16 ? " bf16" : " fp32"; }

  void Gemm() {
    struct Problem {
      int64_t n, k;
      std::vector<int64_t> rows;
    };
    std::vector<Problem> problems{{8, 16, {1}}, {24, 40, {3, 0, 17, 1}}, {5, 7, {2, 9}}};
    if (large_)
      problems.insert(problems.end(),
                      {{1536, 2048, {512, 1, 0, 777}}, {2048, 768, std::vector<int64_t>(40, 21)}});
    Random random(seed_);
    for (const Problem& p : problems)
      for (const Type type : {Type::kBf16, Type::kFp32})
        for (const GemmKind kind : {GemmKind::kForward, GemmKind::kInputGradient, GemmKind::kWeightGradient})
          OneGemm(kind, type, p.n, p.k, p.rows, random);
  }

  void OneGemm(GemmKind kind, Type type, int64_t n, int64_t k, const std::vector<int64_t>& rows,
               Random& random) {
    const bool gradient = kind == GemmKind::kWeightGradient;
    const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
    const auto groups = static_cast<int64_t>(rows.size());
    const int64_t a_width = gradient ? n : k, e = SizeOf(type);
    const auto a = ToType(*cpu_, type, Floats(total * a_width, random));
    const auto b = ToType(*cpu_, type, Floats(gradient ? total * k : groups * n * k, random));
    const auto c = gradient ? Bytes(Floats(groups * n * k, random)) : Poison(total * n * e);
    static constexpr const char* kNames[] = {"GEMM forward", "GEMM input gradient", "GEMM weight gradient"};
    Case(kNames[static_cast<int>(kind)] + Of(type), absl::StrCat("n ", n, ", k ", k, ", ", groups, " groups"),
         Tolerance(type), [&](Device& device) {
           OnDevice da(device, a), db(device, b), dc(device, c);
           std::vector<GemmGroup> work;
           int64_t first = 0;
           for (int64_t g = 0; g < groups; ++g) {
             auto* left = da.as<std::byte>() + first * a_width * e;
             auto* right = db.as<std::byte>() + (gradient ? first * k : g * n * k) * e;
             auto* out = dc.as<std::byte>() + (gradient ? g * n * k * 4 : first * n * e);
             work.push_back({left, right, out, rows[g], gradient && g % 2 == 1});
             first += rows[g];
           }
           LRMOE_CHECK(device.GroupedGemm(kind, type, n, k, work).ok());
           Output output;
           output.Add(ToFloats(*cpu_, gradient ? Type::kFp32 : type, dc.Read()));
           return output;
         });
  }

  void Activations() {
    Random random(seed_ + 1);
    for (const Type type : {Type::kBf16, Type::kFp32})
      for (const ExpertActivation activation :
           {ExpertActivation::kSwiGlu, ExpertActivation::kSilu, ExpertActivation::kGelu})
        for (const Shape& s : Shapes()) {
          const int64_t width = activation == ExpertActivation::kSwiGlu ? 2 * s.width : s.width;
          const auto a = ToType(*cpu_, type, Floats(s.rows * width, random, -4, 4));
          const auto u = ToType(*cpu_, type, Floats(s.rows * s.width, random));
          const std::vector<float> alpha = Floats(s.rows, random);
          const std::string what =
              absl::StrCat("activation ", static_cast<int>(activation), ", ", s.rows, " x ", s.width);
          Case("activation" + Of(type), what, Tolerance(type), [&](Device& device) {
            OnDevice da(device, a), phi(device, Poison(s.rows * s.width * SizeOf(type))),
                norms(device, Poison(s.rows * 4));
            device.ActivationForward(activation, type, s.rows, s.width, da.get(), phi.get(),
                                     norms.as<float>());
            Output output;
            output.Add(ToFloats(*cpu_, type, phi.Read()));
            std::vector<float> norm2 = norms.Read<float>();
            // Of another magnitude than phi: as norms.
            for (float& value : norm2) value = std::sqrt(value / static_cast<float>(s.width));
            output.Add(norm2);
            return output;
          });
          Case("activation gradient" + Of(type), what, Tolerance(type), [&](Device& device) {
            OnDevice da(device, a), du(device, u), weight(device, alpha),
                out(device, Poison(s.rows * width * SizeOf(type))), dots(device, Poison(s.rows * 4));
            // phi_alpha takes the place of u, as in the engine.
            device.ActivationBackward(activation, type, s.rows, s.width, da.get(), du.get(),
                                      weight.as<float>(), out.get(), du.get(), dots.as<float>());
            std::vector<float> dalpha = dots.Read<float>();
            Output output;
            output.Add(ToFloats(*cpu_, type, out.Read()));
            output.Add(ToFloats(*cpu_, type, du.Read()));
            for (float& value : dalpha) value /= static_cast<float>(s.width);
            output.Add(dalpha);
            return output;
          });
        }
  }

  void Rows() {
    Random random(seed_ + 2);
    for (const Type type : {Type::kBf16, Type::kFp32})
      for (const Shape& s : Shapes()) {
        const auto src = ToType(*cpu_, type, Floats((s.rows + 2) * s.width, random));
        const auto other = ToType(*cpu_, type, Floats((s.rows + 2) * s.width, random));
        GatherAndSum(type, s, src, random);
        Combine(type, s, src, random);
        Reductions(type, s, src, other, random);
      }
  }

  void GatherAndSum(Type type, const Shape& s, const std::vector<std::byte>& src, Random& random) {
    const std::string what = absl::StrCat(s.rows, " x ", s.width);
    const int64_t bytes = s.rows * s.width * SizeOf(type);
    std::vector<int32_t> index(s.rows), terms;
    for (int32_t& i : index) i = static_cast<int32_t>(random.Below(s.rows + 2));
    std::vector<int64_t> offset{0};
    for (int64_t row = 0; row < s.rows; ++row) offset.push_back(offset.back() + random.Between(0, 3));
    terms.resize(offset.back());
    for (int32_t& i : terms) i = static_cast<int32_t>(random.Below(s.rows + 2));
    Case("gather" + Of(type), what, 0, [&](Device& device) {
      OnDevice from(device, src), rows(device, index), to(device, Poison(bytes));
      device.GatherRows(type, s.width, from.get(), rows.span<const int32_t>(), to.get());
      Output output;
      output.Add(ToFloats(*cpu_, type, to.Read()));
      return output;
    });
    Case("segmented sum" + Of(type), what, Tolerance(type), [&](Device& device) {
      OnDevice from(device, src), rows(device, terms), first(device, offset), to(device, Poison(bytes));
      device.SumRows(type, s.width, from.get(), rows.span<const int32_t>(), first.span<const int64_t>(),
                     to.get());
      Output output;
      output.Add(ToFloats(*cpu_, type, to.Read()));
      return output;
    });
    std::vector<int32_t> order(s.rows);
    std::iota(order.begin(), order.end(), 0);
    for (int64_t i = s.rows - 1; i > 0; --i) std::swap(order[i], order[random.Below(i + 1)]);
    Case("permutation" + Of(type), what, 0, [&](Device& device) {
      OnDevice rows(device, std::vector<std::byte>(src.begin(), src.begin() + bytes)), to(device, order);
      device.PermuteRows(s.width * SizeOf(type), to.span<int32_t>(), rows.get());
      Output output;
      output.Add(ToFloats(*cpu_, type, rows.Read()));
      return output;
    });
  }

  void Combine(Type type, const Shape& s, const std::vector<std::byte>& src, Random& random) {
    const int32_t k = 3;
    std::vector<int32_t> position(s.rows * k);
    for (int32_t& p : position)
      p = random.Below(4) == 0 ? -1 : static_cast<int32_t>(random.Below(s.rows + 2));
    const std::vector<float> alpha = Floats(s.rows * k, random);
    Case("combine" + Of(type), absl::StrCat(s.rows, " x ", s.width), Tolerance(type), [&](Device& device) {
      OnDevice y(device, src), from(device, position), weight(device, alpha),
          out(device, Poison(s.rows * s.width * SizeOf(type)));
      device.CombineRows(type, s.width, s.rows, k, y.get(), from.as<int32_t>(), weight.as<float>(),
                         out.get());
      Output output;
      output.Add(ToFloats(*cpu_, type, out.Read()));
      return output;
    });
  }

  void Reductions(Type type, const Shape& s, const std::vector<std::byte>& a, const std::vector<std::byte>& b,
                  Random& random) {
    std::vector<int32_t> a_row(s.rows), b_row(s.rows);
    for (int32_t& i : a_row) i = static_cast<int32_t>(random.Below(s.rows + 2));
    for (int32_t& i : b_row) i = static_cast<int32_t>(random.Below(s.rows + 2));
    const std::string what = absl::StrCat(s.rows, " x ", s.width);
    const auto one = [&](const std::string& name,
                         const std::function<void(Device&, void*, void*, float*)>& run) {
      Case(name + Of(type), what, 1e-5, [&](Device& device) {
        OnDevice left(device, a), right(device, b), out(device, Poison(s.rows * 4));
        run(device, left.get(), right.get(), out.as<float>());
        Output output;
        output.Add(out.Read<float>());
        return output;
      });
    };
    one("row norm",
        [&](Device& d, void* x, void*, float* out) { d.RowNorm2(type, s.rows, s.width, x, out); });
    one("row sum of |x|",
        [&](Device& d, void* x, void*, float* out) { d.RowAbsSum(type, s.rows, s.width, x, out); });
    one("row dot", [&](Device& d, void* x, void* y, float* out) {
      OnDevice left(d, a_row), right(d, b_row);
      d.RowDot(type, s.width, x, left.span<const int32_t>(), y, right.span<const int32_t>(), out);
      LRMOE_CHECK(d.Wait().ok());  // before its index is gone
    });
  }

  void Parameters() {
    Random random(seed_ + 3);
    std::vector<int64_t> sizes{1, 255, 4099};
    if (large_) sizes.push_back(5'000'001);
    for (const int64_t n : sizes) {
      const std::vector<float> x = Floats(n, random), y = Floats(n, random);
      const std::string what = absl::StrCat(n, " elements");
      Case("add", what, 0, [&](Device& device) {
        OnDevice dst(device, Bytes(x)), src(device, Bytes(y));
        device.AddInPlace(n, dst.as<float>(), src.as<float>());
        Output output;
        output.Add(ToFloats(*cpu_, Type::kFp32, dst.Read()));
        return output;
      });
      Case("squared norm", what, 1e-6, [&](Device& device) {
        OnDevice values(device, Bytes(x));
        const double sum = device.SquaredNorm(n, values.as<float>());
        Output output;
        output.Add({static_cast<float>(sum)});
        return output;
      });
      Case("fp32 to bf16 and back", what, 0, [&](Device& device) {
        OnDevice from(device, Bytes(x)), bf16(device, Poison(n * 2)), to(device, Poison(n * 4));
        device.Fp32ToBf16(n, from.as<float>(), bf16.as<Bf16>());
        device.Bf16ToFp32(n, bf16.as<Bf16>(), to.as<float>());
        Output output;
        output.Add(ToFloats(*cpu_, Type::kFp32, to.Read()));
        return output;
      });
      for (const Type type : {Type::kBf16, Type::kFp32}) AdamW(type, n, x, y, random);
    }
  }

  void AdamW(Type type, int64_t n, const std::vector<float>& master, const std::vector<float>& gradient,
             Random& random) {
    const std::vector<float> m = Floats(n, random), v = Floats(n, random, 0, 1);
    Device::AdamWStep step;
    step.step = 3;
    step.gradient_scale = 0.5;
    Case("AdamW" + Of(type), absl::StrCat(n, " elements"), 0, [&](Device& device) {
      OnDevice dp(device, Bytes(master)), dm(device, Bytes(m)), dv(device, Bytes(v)),
          dg(device, Bytes(gradient)), weights(device, Poison(n * SizeOf(type)));
      device.AdamW(step, n, dp.as<float>(), dm.as<float>(), dv.as<float>(), dg.as<float>(), type,
                   weights.get());
      Output output;
      for (const OnDevice* part : {&dp, &dm, &dv}) output.Add(ToFloats(*cpu_, Type::kFp32, part->Read()));
      output.Add(ToFloats(*cpu_, type, weights.Read()));
      return output;
    });
  }

  Device& device_;
  const std::unique_ptr<Device> cpu_ = std::move(CreateCpuDevice(1)).value();
  const bool large_;
  const uint64_t seed_;
  std::vector<CheckResult> results_;
};

}  // namespace

std::vector<CheckResult> CheckDevice(Device& device, CheckSize size, uint64_t seed) {
  return Checker(device, size, seed).Run();
}

}  // namespace lrmoe::testing
