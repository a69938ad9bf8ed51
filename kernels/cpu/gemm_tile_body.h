// Packing and tiles over vectors of LRMOE_TILE_LANES lanes. Included by gemm_tile_<instruction set>.cc only,
// after it has set the target and defined LRMOE_TILES (the set to define), LRMOE_TILES_NAME,
// LRMOE_TILES_DESCRIPTION, LRMOE_TILE_ROWS, LRMOE_TILE_VECTORS and, where there is such an instruction,
// LRMOE_TILE_DOT(acc, a, b). Everything is in an unnamed namespace: each including file must get its own
// copy.

namespace lrmoe::kernels::cpu {
namespace {

constexpr int kLanes = LRMOE_TILE_LANES;
constexpr int kMaxRows = LRMOE_TILE_ROWS;
constexpr int kVectors = LRMOE_TILE_VECTORS;
constexpr int64_t kPanel = kLanes * kVectors;
typedef float V __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U __attribute__((vector_size(4 * kLanes)));
typedef uint16_t H __attribute__((vector_size(2 * kLanes)));

#define LRMOE_INLINE inline __attribute__((always_inline))

template <typename T, typename From>
LRMOE_INLINE T LoadAs(const From* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <typename T, typename To>
LRMOE_INLINE void StoreAs(To* to, T value) {
  std::memcpy(to, &value, sizeof value);
}
template <typename T>
LRMOE_INLINE T LoadPart(const void* from, int64_t bytes) {
  T value = {};
  std::memcpy(&value, from, bytes);
  return value;
}
// Up to one vector of elements, zeros behind the end.
template <typename T, typename From>
LRMOE_INLINE T LoadUpTo(const From* from, int64_t bytes) {
  return bytes >= static_cast<int64_t>(sizeof(T)) ? LoadAs<T>(from) : LoadPart<T>(from, bytes);
}

// How elements become lanes: FromRows takes up to one vector of a stored row, for pairs also of the next one
// at an offset (null: there is none), Step splits what PackColumns has transposed.
struct Fp32Lanes {  // fp32 as it is
  using Element = float;
  static constexpr int64_t kDepthPerStep = 1, kStepsPerLane = 1;
  static LRMOE_INLINE U FromRows(const float* row, const float*, int64_t count, int64_t) {
    return LoadUpTo<U>(row, count * 4);
  }
  static LRMOE_INLINE U Step(U lanes, int) { return lanes; }
};
struct WideLanes {  // bf16, each widened to fp32
  using Element = uint16_t;
  static constexpr int64_t kDepthPerStep = 1, kStepsPerLane = 2;
  static LRMOE_INLINE U FromRows(const uint16_t* row, const uint16_t*, int64_t count, int64_t) {
    return __builtin_convertvector(LoadUpTo<H>(row, count * 2), U) << 16;
  }
  static LRMOE_INLINE U Step(U lanes, int i) { return i == 0 ? lanes << 16 : lanes & 0xFFFF0000u; }
};
struct PairLanes {  // bf16, two along the contraction
  using Element = uint16_t;
  static constexpr int64_t kDepthPerStep = 2, kStepsPerLane = 1;
  static LRMOE_INLINE U FromRows(const uint16_t* row, const uint16_t* next, int64_t count, int64_t offset) {
    const U low = __builtin_convertvector(LoadUpTo<H>(row, count * 2), U);
    if (next == nullptr) return low;
    return low | (__builtin_convertvector(LoadUpTo<H>(next + offset, count * 2), U) << 16);
  }
  static LRMOE_INLINE U Step(U lanes, int) { return lanes; }
};

#ifdef LRMOE_TILE_DOT
typedef uint16_t H2 __attribute__((vector_size(64)));
constexpr H2 kPairLow = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
constexpr H2 kPairHigh = kPairLow + 16;

// One step of one panel from two whole rows.
LRMOE_INLINE void InterleaveStep(const uint16_t* row, const uint16_t* next, uint32_t* out) {
#pragma GCC unroll 8
  for (int64_t at = 0; at < kPanel; at += 32) {
    const H2 a = LoadAs<H2>(row + at), b = LoadAs<H2>(next + at);
    StoreAs(out + at, __builtin_shuffle(a, b, kPairLow));
    StoreAs(out + at + 16, __builtin_shuffle(a, b, kPairHigh));
  }
}
#endif

// One step of one panel. `count` elements are there.
template <typename Lanes, bool kWhole>
LRMOE_INLINE void PackStep(const typename Lanes::Element* row, const typename Lanes::Element* next,
                           int64_t count, uint32_t* out) {
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    const int64_t left = kWhole ? kLanes : count - v * kLanes;
    StoreAs(out + v * kLanes, left <= 0 ? U{} : Lanes::FromRows(row + v * kLanes, next, left, v * kLanes));
  }
}

// Stored [depth, width]: rows (or pairs of rows) become steps.
template <typename Lanes>
void PackRows(const PackArgs& p) {
  using Element = typename Lanes::Element;
  const auto* row = static_cast<const Element*>(p.from);
  auto* const to = static_cast<uint32_t*>(p.to);
  const int64_t steps = (p.depth + Lanes::kDepthPerStep - 1) / Lanes::kDepthPerStep;
  const int64_t whole = p.width / kPanel, stride = p.stride;
  for (int64_t s = 0; s < steps; ++s, row += Lanes::kDepthPerStep * stride) {
    const bool pair = Lanes::kDepthPerStep == 2 && (s + 1) * 2 <= p.depth;
    const Element* next = pair ? row + stride : nullptr;
    uint32_t* out = to + s * kPanel;
    for (int64_t panel = 0; panel < whole; ++panel, out += steps * kPanel) {
#ifdef LRMOE_TILE_DOT
      if constexpr (Lanes::kDepthPerStep == 2) {
        if (pair) {
          InterleaveStep(row + panel * kPanel, next + panel * kPanel, out);
          continue;
        }
      }
#endif
      PackStep<Lanes, true>(row + panel * kPanel, nullptr, kPanel, out);
    }
    if (whole * kPanel < p.width)
      PackStep<Lanes, false>(row + whole * kPanel, pair ? next + whole * kPanel : nullptr,
                             p.width - whole * kPanel, out);
  }
}

#if LRMOE_TILE_LANES == 16
constexpr U kLow32 = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
constexpr U kHigh32 = {2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31};
constexpr U kLow64 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
constexpr U kHigh64 = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
constexpr U kEven128 = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
constexpr U kOdd128 = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
#else
constexpr U kLow32 = {0, 8, 1, 9, 4, 12, 5, 13};
constexpr U kHigh32 = {2, 10, 3, 11, 6, 14, 7, 15};
constexpr U kLow64 = {0, 1, 8, 9, 4, 5, 12, 13};
constexpr U kHigh64 = {2, 3, 10, 11, 6, 7, 14, 15};
constexpr U kEven128 = {0, 1, 2, 3, 8, 9, 10, 11};
constexpr U kOdd128 = {4, 5, 6, 7, 12, 13, 14, 15};
#endif

// Transposes a square of lanes in place: within 128 bits first, then blocks of 128 bits.
LRMOE_INLINE void Transpose(U (&r)[kLanes]) {
  constexpr int kGroups = kLanes / 4;
  U block[4][kGroups];  // [t][q]: 128 bits number l hold column 4 l + t of rows 4 q .. 4 q + 3
#pragma GCC unroll 4
  for (int q = 0; q < kGroups; ++q) {
    const U low01 = __builtin_shuffle(r[4 * q], r[4 * q + 1], kLow32);
    const U high01 = __builtin_shuffle(r[4 * q], r[4 * q + 1], kHigh32);
    const U low23 = __builtin_shuffle(r[4 * q + 2], r[4 * q + 3], kLow32);
    const U high23 = __builtin_shuffle(r[4 * q + 2], r[4 * q + 3], kHigh32);
    block[0][q] = __builtin_shuffle(low01, low23, kLow64);
    block[1][q] = __builtin_shuffle(low01, low23, kHigh64);
    block[2][q] = __builtin_shuffle(high01, high23, kLow64);
    block[3][q] = __builtin_shuffle(high01, high23, kHigh64);
  }
#pragma GCC unroll 4
  for (int t = 0; t < 4; ++t) {
    const U even01 = __builtin_shuffle(block[t][0], block[t][1], kEven128);
    const U odd01 = __builtin_shuffle(block[t][0], block[t][1], kOdd128);
#if LRMOE_TILE_LANES == 16
    const U even23 = __builtin_shuffle(block[t][2], block[t][3], kEven128);
    const U odd23 = __builtin_shuffle(block[t][2], block[t][3], kOdd128);
    r[t] = __builtin_shuffle(even01, even23, kEven128);
    r[4 + t] = __builtin_shuffle(odd01, odd23, kEven128);
    r[8 + t] = __builtin_shuffle(even01, even23, kOdd128);
    r[12 + t] = __builtin_shuffle(odd01, odd23, kOdd128);
#else
    r[t] = even01;
    r[4 + t] = odd01;
#endif
  }
}

// Stored [width, depth]: squares of lanes are transposed.
template <typename Lanes>
void PackColumns(const PackArgs& p) {
  using Element = typename Lanes::Element;
  constexpr int64_t kDepthPerVector = sizeof(U) / sizeof(Element);
  const auto* from = static_cast<const Element*>(p.from);
  auto* to = static_cast<uint32_t*>(p.to);
  const int64_t steps = (p.depth + Lanes::kDepthPerStep - 1) / Lanes::kDepthPerStep;
  const int64_t padded_width = (p.width + kPanel - 1) / kPanel * kPanel;
  for (int64_t column = 0; column < padded_width; column += kLanes) {
    uint32_t* out = to + column / kPanel * steps * kPanel + column % kPanel;
    const int64_t here = std::clamp<int64_t>(p.width - column, 0, kLanes);
    int64_t s = 0;
    for (int64_t d = 0; d < p.depth; d += kDepthPerVector) {
      U r[kLanes];
      const auto bytes = static_cast<int64_t>((p.depth - d) * sizeof(Element));
      if (here == kLanes && bytes >= static_cast<int64_t>(sizeof(U))) {
        const Element* at = from + column * p.stride + d;
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) r[i] = LoadAs<U>(at + i * p.stride);
      } else {
        for (int i = 0; i < kLanes; ++i)
          r[i] = i < here ? LoadUpTo<U>(from + (column + i) * p.stride + d, bytes) : U{};
      }
      Transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        for (int half = 0; half < Lanes::kStepsPerLane; ++half, ++s) {
          if (s < steps) StoreAs(out + s * kPanel, Lanes::Step(r[i], half));
        }
      }
    }
  }
}

struct MultiplyFp32 {
  static LRMOE_INLINE V Add(V sum, U a, V b) { return sum + std::bit_cast<V>(a) * b; }
};
#ifdef LRMOE_TILE_DOT
struct MultiplyPairs {
  static LRMOE_INLINE V Add(V sum, U a, V b) { return LRMOE_TILE_DOT(sum, a, b); }
};
#endif

template <bool kAccumulate, int kRows>
LRMOE_INLINE void StoreSums(const V (&sum)[kRows][kVectors], float* c, int64_t c_stride) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r, c += c_stride) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      StoreAs(c + v * kLanes, kAccumulate ? LoadAs<V>(c + v * kLanes) + sum[r][v] : sum[r][v]);
    }
  }
}

template <typename Multiply, int kRows>
void TileOf(const TileArgs& t) {
  V sum[kRows][kVectors] = {};
  const uint32_t* row[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    row[r] = static_cast<const uint32_t*>(t.a) + r * t.a_row;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) __builtin_prefetch(t.c + r * t.c_stride + v * kLanes, 1);
  }
  const auto* panel = static_cast<const float*>(t.panel);
  const int64_t steps = t.steps, a_step = t.a_step;
  const char* ahead = t.ahead;
  int64_t at = 0;
  for (int64_t s = 0; s < steps; ahead += t.ahead_stride) {
    const char* line = ahead;
    for (const int64_t end = std::min(steps, s + t.ahead_lines); s < end;
         ++s, at += a_step, panel += kPanel, line += 64) {
      __builtin_prefetch(line, 0, 2);
      V b[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) b[v] = LoadAs<V>(panel + v * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const U a = U{} + row[r][at];
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[r][v] = Multiply::Add(sum[r][v], a, b[v]);
      }
    }
  }
  if (t.accumulate)
    StoreSums<true>(sum, t.c, t.c_stride);
  else
    StoreSums<false>(sum, t.c, t.c_stride);
}

template <typename Multiply>
void Tile(const TileArgs& t) {
  static_assert(kMaxRows == 6);
  switch (t.rows) {
    case 1:
      return TileOf<Multiply, 1>(t);
    case 2:
      return TileOf<Multiply, 2>(t);
    case 3:
      return TileOf<Multiply, 3>(t);
    case 4:
      return TileOf<Multiply, 4>(t);
    case 5:
      return TileOf<Multiply, 5>(t);
    default:
      return TileOf<Multiply, 6>(t);
  }
}

template <typename Lanes, typename Multiply>
constexpr TileOps OpsOf() {
  return {sizeof(typename Lanes::Element),
          Lanes::kDepthPerStep,
          kMaxRows,
          kPanel,
          PackRows<Lanes>,
          PackColumns<Lanes>,
          Tile<Multiply>};
}

}  // namespace

const TileSet LRMOE_TILES = {
    .name = LRMOE_TILES_NAME,
    .description = LRMOE_TILES_DESCRIPTION,
    .fp32 = OpsOf<Fp32Lanes, MultiplyFp32>(),
#ifdef LRMOE_TILE_DOT
    .bf16 = OpsOf<PairLanes, MultiplyPairs>(),
#else
    .bf16 = OpsOf<WideLanes, MultiplyFp32>(),
#endif
};

}  // namespace lrmoe::kernels::cpu
