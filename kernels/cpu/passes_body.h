// The passes, written once over vectors of eight floats. Included by passes_<instruction set>.cc only, after
// it has set the target and defined LRMOE_PASSES (the table to define) and LRMOE_PASSES_NAME. Everything is
// in an unnamed namespace: each including file must get its own copy.

namespace lrmoe::kernels::cpu {
namespace {

typedef float V8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef uint32_t U8 __attribute__((vector_size(32)));
typedef uint16_t H8 __attribute__((vector_size(16)));

#define LRMOE_INLINE inline __attribute__((always_inline))
#define LRMOE_INLINE_LAMBDA __attribute__((always_inline))

LRMOE_INLINE V8 Fill(float value) {
  return V8{} + value;
}

LRMOE_INLINE V8 Load(const float* p) {
  V8 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
LRMOE_INLINE V8 Load(const Bf16* p) {
  H8 h;
  std::memcpy(&h, p, sizeof h);
  return std::bit_cast<V8>(__builtin_convertvector(h, U8) << 16);
}
LRMOE_INLINE void Store(float* p, V8 v) {
  std::memcpy(p, &v, sizeof v);
}
// Round to nearest even; a NaN stays a NaN (its lowest payload bits could all be lost, so it is made quiet).
LRMOE_INLINE U8 RoundBits(V8 v) {
  const U8 bits = std::bit_cast<U8>(v);
  const U8 rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return (bits & 0x7FFFFFFFu) > 0x7F800000u ? (bits >> 16) | 0x40u : rounded;
}
LRMOE_INLINE void Store(Bf16* p, V8 v) {
  const H8 h = __builtin_convertvector(RoundBits(v), H8);
  std::memcpy(p, &h, sizeof h);
}

// Access to eight elements, or to the last `count` < 8 of a row with zeros read beyond them.
struct Whole {
  template <typename T>
  LRMOE_INLINE V8 Get(const T* p) const {
    return Load(p);
  }
  template <typename T>
  LRMOE_INLINE void Put(T* p, V8 v) const {
    Store(p, v);
  }
};
struct Part {
  int64_t count;
  template <typename T>
  LRMOE_INLINE V8 Get(const T* p) const {
    T lanes[8] = {};
    std::memcpy(lanes, p, count * sizeof(T));
    return Load(lanes);
  }
  template <typename T>
  LRMOE_INLINE void Put(T* p, V8 v) const {
    T lanes[8];
    Store(lanes, v);
    std::memcpy(p, lanes, count * sizeof(T));
  }
};

// body(i, access, lane) for every vector of n elements; lane alternates 0, 1 so that sums have two chains.
template <typename Body>
LRMOE_INLINE void ForEach(int64_t n, Body body) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    body(i, Whole{}, 0);
    body(i + 8, Whole{}, 1);
  }
  if (i + 8 <= n) {
    body(i, Whole{}, 0);
    i += 8;
  }
  if (i < n) body(i, Part{n - i}, 1);
}

struct Sum {
  V8 chain[2] = {};
  LRMOE_INLINE void Add(int lane, V8 v) { chain[lane] += v; }
  LRMOE_INLINE float Total() const {
    const V8 s = chain[0] + chain[1];
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
  }
};

LRMOE_INLINE V8 Abs(V8 v) {
  return std::bit_cast<V8>(std::bit_cast<U8>(v) & 0x7FFFFFFFu);
}

// e^x for x <= 0, relative error < 2e-7; below -87 (where the result would leave the normal range) it is 0.
// x = n ln2 + r with |r| <= ln2 / 2; the polynomial is a minimax fit of (e^r - 1 - r) / r^2.
LRMOE_INLINE V8 ExpOfNonPositive(V8 x) {
  constexpr float kLowest = -87.0f;
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer held in the low bits
  const V8 clamped = x < kLowest ? Fill(kLowest) : x;
  const V8 shifted = clamped * 1.44269504088896341f + kRounder;
  const V8 n = shifted - kRounder;
  const V8 r = (clamped - n * 0.693359375f) + n * 2.12194440054690583e-4f;
  V8 q = r * 0.00019790299120359123f + 0.0013944703387096524f;
  q = q * r + 0.008333497680723667f;
  q = q * r + 0.04166629537940025f;
  q = q * r + 0.1666666567325592f;
  q = q * r + 0.5f;
  const V8 e = (q * (r * r) + r) + 1.0f;
  const V8 scaled = std::bit_cast<V8>(std::bit_cast<U8>(e) + (std::bit_cast<U8>(shifted) << 23));
  return x < kLowest ? V8{} : scaled;
}

// sigmoid(x) and sigmoid(-x), each without cancellation.
struct Sigmoids {
  V8 plus, minus;
};
LRMOE_INLINE Sigmoids SigmoidsOf(V8 x) {
  const V8 e = ExpOfNonPositive(-Abs(x));
  const V8 large = 1.0f / (1.0f + e);
  const V8 small = e * large;
  return {x < 0.0f ? small : large, x < 0.0f ? large : small};
}

LRMOE_INLINE V8 SquareRoot(V8 v) {
#ifdef __AVX__
  return __builtin_ia32_sqrtps256(v);
#else
  V8 out;
  for (int l = 0; l < 8; ++l) out[l] = std::sqrt(v[l]);
  return out;
#endif
}

// What one element of `a` (two for SwiGLU) gives: phi, and u times its derivatives.
struct Derivatives {
  V8 phi, dx, dup;
};
struct SwiGlu {
  static constexpr bool kGated = true;
  static LRMOE_INLINE V8 Value(V8 gate, V8 up) { return gate * SigmoidsOf(gate).plus * up; }
  static LRMOE_INLINE Derivatives Gradient(V8 gate, V8 up, V8 u) {
    const Sigmoids s = SigmoidsOf(gate);
    const V8 silu = gate * s.plus;
    return {silu * up, u * up * (s.plus + silu * s.minus), u * silu};
  }
};
struct Silu {
  static constexpr bool kGated = false;
  static LRMOE_INLINE V8 Value(V8 x, V8) { return x * SigmoidsOf(x).plus; }
  static LRMOE_INLINE Derivatives Gradient(V8 x, V8, V8 u) {
    const Sigmoids s = SigmoidsOf(x);
    const V8 silu = x * s.plus;
    return {silu, u * (s.plus + silu * s.minus), V8{}};
  }
};
struct Gelu {
  static constexpr bool kGated = false;
  // The normal distribution function; erfc keeps its relative accuracy for negative x.
  static LRMOE_INLINE V8 Distribution(V8 x) {
    V8 out;
    for (int l = 0; l < 8; ++l) out[l] = 0.5f * std::erfc(x[l] * -0.70710678118654752f);
    return out;
  }
  static LRMOE_INLINE V8 Value(V8 x, V8) { return x * Distribution(x); }
  static LRMOE_INLINE Derivatives Gradient(V8 x, V8, V8 u) {
    const V8 distribution = Distribution(x);
    const V8 density = 0.39894228040143268f * ExpOfNonPositive(x * x * -0.5f);
    return {x * distribution, u * (distribution + x * density), V8{}};
  }
};

LRMOE_INLINE V8 AsStored(V8 v, const float*) {
  return v;
}
LRMOE_INLINE V8 AsStored(V8 v, const Bf16*) {
  return std::bit_cast<V8>(RoundBits(v) << 16);
}

template <typename Act, typename T>
void ForwardRows(const ActivationForwardArgs& args, int64_t begin, int64_t end) {
  const int64_t f = args.f, a_width = Act::kGated ? 2 * f : f;
  for (int64_t row = begin; row < end; ++row) {
    const T* a = static_cast<const T*>(args.a) + row * a_width;
    T* phi = static_cast<T*>(args.phi) + row * f;
    Sum norm2;
    ForEach(f, [&](int64_t i, auto access, int lane) LRMOE_INLINE_LAMBDA {
      const V8 value = Act::Value(access.Get(a + i), Act::kGated ? access.Get(a + f + i) : V8{});
      access.Put(phi + i, value);
      const V8 stored = AsStored(value, phi);
      norm2.Add(lane, stored * stored);
    });
    args.norm2[row] = norm2.Total();
  }
}

template <typename Act, typename T>
void BackwardRows(const ActivationBackwardArgs& args, int64_t begin, int64_t end) {
  const int64_t f = args.f, a_width = Act::kGated ? 2 * f : f;
  for (int64_t row = begin; row < end; ++row) {
    const T* a = static_cast<const T*>(args.a) + row * a_width;
    const T* u = static_cast<const T*>(args.u) + row * f;  // phi_alpha may be the same row
    T* da = static_cast<T*>(args.da) + row * a_width;
    T* phi_alpha = static_cast<T*>(args.phi_alpha) + row * f;
    const float alpha = args.alpha[row];
    Sum dalpha;
    ForEach(f, [&](int64_t i, auto access, int lane) LRMOE_INLINE_LAMBDA {
      const V8 gradient = access.Get(u + i);
      const Derivatives d =
          Act::Gradient(access.Get(a + i), Act::kGated ? access.Get(a + f + i) : V8{}, gradient);
      access.Put(da + i, alpha * d.dx);
      if constexpr (Act::kGated) access.Put(da + f + i, alpha * d.dup);
      access.Put(phi_alpha + i, alpha * d.phi);
      dalpha.Add(lane, gradient * d.phi);
    });
    args.dalpha[row] = dalpha.Total();
  }
}

void ActivationForward(const ActivationForwardArgs& args, int64_t begin, int64_t end) {
  const bool bf16 = args.type == Type::kBf16;
  switch (args.activation) {
    case ExpertActivation::kSwiGlu:
      return bf16 ? ForwardRows<SwiGlu, Bf16>(args, begin, end)
                  : ForwardRows<SwiGlu, float>(args, begin, end);
    case ExpertActivation::kSilu:
      return bf16 ? ForwardRows<Silu, Bf16>(args, begin, end) : ForwardRows<Silu, float>(args, begin, end);
    case ExpertActivation::kGelu:
      return bf16 ? ForwardRows<Gelu, Bf16>(args, begin, end) : ForwardRows<Gelu, float>(args, begin, end);
  }
}

void ActivationBackward(const ActivationBackwardArgs& args, int64_t begin, int64_t end) {
  const bool bf16 = args.type == Type::kBf16;
  switch (args.activation) {
    case ExpertActivation::kSwiGlu:
      return bf16 ? BackwardRows<SwiGlu, Bf16>(args, begin, end)
                  : BackwardRows<SwiGlu, float>(args, begin, end);
    case ExpertActivation::kSilu:
      return bf16 ? BackwardRows<Silu, Bf16>(args, begin, end) : BackwardRows<Silu, float>(args, begin, end);
    case ExpertActivation::kGelu:
      return bf16 ? BackwardRows<Gelu, Bf16>(args, begin, end) : BackwardRows<Gelu, float>(args, begin, end);
  }
}

// dst[0, width) = sum of add(row, accumulator) over the terms; `visit(add)` calls add(row, weight) in order.
// Four accumulators at a time, so that a term's row is read in whole cache lines and dst is written once.
template <typename T, typename Visit>
LRMOE_INLINE void SumTerms(int64_t width, T* dst, Visit visit) {
  int64_t i = 0;
  for (; i + 32 <= width; i += 32) {
    V8 sum[4] = {};
    visit([&](const T* row, float weight) LRMOE_INLINE_LAMBDA {
      for (int c = 0; c < 4; ++c) sum[c] += weight * Load(row + i + 8 * c);
    });
    for (int c = 0; c < 4; ++c) Store(dst + i + 8 * c, sum[c]);
  }
  ForEach(width - i, [&](int64_t j, auto access, int) LRMOE_INLINE_LAMBDA {
    V8 sum = {};
    visit([&](const T* row, float weight) LRMOE_INLINE_LAMBDA { sum += weight * access.Get(row + i + j); });
    access.Put(dst + i + j, sum);
  });
}

template <typename T>
void CombineRowsOf(const CombineArgs& args, int64_t begin, int64_t end) {
  const T* y = static_cast<const T*>(args.y);
  for (int64_t token = begin; token < end; ++token) {
    const int32_t* position = args.position + token * args.k;
    const float* alpha = args.alpha + token * args.k;
    SumTerms(args.width, static_cast<T*>(args.out) + token * args.width, [&](auto add) LRMOE_INLINE_LAMBDA {
      for (int32_t j = 0; j < args.k; ++j) {
        if (position[j] >= 0) add(y + position[j] * args.width, alpha[j]);
      }
    });
  }
}

template <typename T>
void SumRowsOf(const SumArgs& args, int64_t begin, int64_t end) {
  const T* src = static_cast<const T*>(args.src);
  for (int64_t row = begin; row < end; ++row) {
    SumTerms(args.width, static_cast<T*>(args.dst) + row * args.width, [&](auto add) LRMOE_INLINE_LAMBDA {
      for (int64_t j = args.offset[row]; j < args.offset[row + 1]; ++j) {
        add(src + args.index[j] * args.width, 1.0f);
      }
    });
  }
}

void Combine(const CombineArgs& args, int64_t begin, int64_t end) {
  args.type == Type::kBf16 ? CombineRowsOf<Bf16>(args, begin, end) : CombineRowsOf<float>(args, begin, end);
}

void SumSegments(const SumArgs& args, int64_t begin, int64_t end) {
  args.type == Type::kBf16 ? SumRowsOf<Bf16>(args, begin, end) : SumRowsOf<float>(args, begin, end);
}

template <typename T, typename Term>
LRMOE_INLINE void ReduceRows(const RowReduceArgs& args, int64_t begin, int64_t end, Term term) {
  for (int64_t row = begin; row < end; ++row) {
    const T* src = static_cast<const T*>(args.src) + row * args.width;
    Sum sum;
    ForEach(args.width, [&](int64_t i, auto access, int lane)
                            LRMOE_INLINE_LAMBDA { sum.Add(lane, term(access.Get(src + i))); });
    args.out[row] = sum.Total();
  }
}

void Norm2(const RowReduceArgs& args, int64_t begin, int64_t end) {
  const auto square = [](V8 v) LRMOE_INLINE_LAMBDA { return v * v; };
  args.type == Type::kBf16 ? ReduceRows<Bf16>(args, begin, end, square)
                           : ReduceRows<float>(args, begin, end, square);
}

void AbsSum(const RowReduceArgs& args, int64_t begin, int64_t end) {
  const auto absolute = [](V8 v) LRMOE_INLINE_LAMBDA { return Abs(v); };
  args.type == Type::kBf16 ? ReduceRows<Bf16>(args, begin, end, absolute)
                           : ReduceRows<float>(args, begin, end, absolute);
}

template <typename T>
void DotRows(const RowDotArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* a = static_cast<const T*>(args.a) + args.a_row[row] * args.width;
    const T* b = static_cast<const T*>(args.b) + args.b_row[row] * args.width;
    Sum sum;
    ForEach(args.width, [&](int64_t i, auto access, int lane)
                            LRMOE_INLINE_LAMBDA { sum.Add(lane, access.Get(a + i) * access.Get(b + i)); });
    args.out[row] = sum.Total();
  }
}

void Dot(const RowDotArgs& args, int64_t begin, int64_t end) {
  args.type == Type::kBf16 ? DotRows<Bf16>(args, begin, end) : DotRows<float>(args, begin, end);
}

// torch.optim.AdamW, single tensor: decay, first moment, second moment, denominator, step; each rounded in
// turn.
template <typename T>
void AdamWElements(const AdamWArgs& s, int64_t begin, int64_t end) {
  T* weights = static_cast<T*>(s.weights);
  ForEach(end - begin, [&](int64_t i, auto access, int) LRMOE_INLINE_LAMBDA {
    const int64_t at = begin + i;
    const V8 g = access.Get(s.gradient + at) * s.gradient_scale;
    const V8 m = access.Get(s.m + at) * s.beta1 + s.one_minus_beta1 * g;
    const V8 v = access.Get(s.v + at) * s.beta2 + s.one_minus_beta2 * g * g;
    const V8 denominator = SquareRoot(v) / s.sqrt_correction2 + s.eps;
    const V8 p = access.Get(s.master + at) * s.decay + s.minus_step_size * m / denominator;
    access.Put(s.m + at, m);
    access.Put(s.v + at, v);
    access.Put(s.master + at, p);
    access.Put(weights + at, p);
  });
}

void AdamW(const AdamWArgs& args, int64_t begin, int64_t end) {
  args.type == Type::kBf16 ? AdamWElements<Bf16>(args, begin, end) : AdamWElements<float>(args, begin, end);
}

typedef float V4 __attribute__((vector_size(16)));
typedef double D4 __attribute__((vector_size(32)));

double SquaredNorm(const float* values, int64_t begin, int64_t end) {
  D4 sum[2] = {};
  ForEach(end - begin, [&](int64_t i, auto access, int) LRMOE_INLINE_LAMBDA {
    const V8 v = access.Get(values + begin + i);
    const D4 low = __builtin_convertvector((V4{v[0], v[1], v[2], v[3]}), D4);
    const D4 high = __builtin_convertvector((V4{v[4], v[5], v[6], v[7]}), D4);
    sum[0] += low * low;
    sum[1] += high * high;
  });
  const D4 s = sum[0] + sum[1];
  return (s[0] + s[2]) + (s[1] + s[3]);
}

void Add(float* dst, const float* src, int64_t begin, int64_t end) {
  ForEach(end - begin, [&](int64_t i, auto access, int) LRMOE_INLINE_LAMBDA {
    access.Put(dst + begin + i, access.Get(dst + begin + i) + access.Get(src + begin + i));
  });
}

template <typename From, typename To>
void Convert(const From* src, To* dst, int64_t begin, int64_t end) {
  ForEach(end - begin, [&](int64_t i, auto access, int)
                           LRMOE_INLINE_LAMBDA { access.Put(dst + begin + i, access.Get(src + begin + i)); });
}

}  // namespace

const Passes LRMOE_PASSES = {
    .name = LRMOE_PASSES_NAME,
    .activation_forward = ActivationForward,
    .activation_backward = ActivationBackward,
    .combine = Combine,
    .sum = SumSegments,
    .norm2 = Norm2,
    .abs_sum = AbsSum,
    .dot = Dot,
    .adamw = AdamW,
    .squared_norm = SquaredNorm,
    .add = Add,
    .to_bf16 = Convert<float, Bf16>,
    .to_fp32 = Convert<Bf16, float>,
};

}  // namespace lrmoe::kernels::cpu
