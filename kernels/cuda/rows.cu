// Passes over rows: gather, combine, segmented sum, norms, dots. A warp per row.
#include "kernels/cuda/start.cuh"

namespace lrmoe::kernels::cuda {
namespace {

template <typename T>
__global__ void GatherKernel(int64_t width, bool packed, const T* src, const int32_t* index, int64_t num_rows,
                             T* dst) {
  for (int64_t row = FirstRow(); row < num_rows; row += RowStride()) {
    const T* from = src + int64_t{index[row]} * width;
    T* to = dst + row * width;
    ForRow<T>(width, packed, [&](int64_t start, int count) {
      if (count == Pack<T>::kLanes)
        Pack<T>::Store(to + start, Pack<T>::Load(from + start));
      else
        to[start] = from[start];
    });
  }
}

template <typename T>
__global__ void CombineKernel(CombineRowsArgs args, bool packed) {
  const T* y = static_cast<const T*>(args.y);
  for (int64_t token = FirstRow(); token < args.num_tokens; token += RowStride()) {
    ForRow<T>(args.width, packed, [&](int64_t start, int count) {
      Piece<T> sum = {};
      for (int32_t slot = 0; slot < args.k; ++slot) {  // slot order: the same sum on every device
        const int64_t pair = token * args.k + slot;
        const int32_t position = args.position[pair];
        if (position < 0) continue;
        const Piece<T> row = Piece<T>::Load(y + position * args.width + start, count);
        for (int i = 0; i < count; ++i) sum.value[i] = fmaf(args.alpha[pair], row.value[i], sum.value[i]);
      }
      sum.Store(static_cast<T*>(args.out) + token * args.width + start, count);
    });
  }
}

template <typename T>
__global__ void SumKernel(SumRowsArgs args, bool packed) {
  const T* src = static_cast<const T*>(args.src);
  for (int64_t row = FirstRow(); row < args.num_rows; row += RowStride()) {
    const int64_t begin = args.offset[row];
    const int64_t end = args.offset[row + 1];
    ForRow<T>(args.width, packed, [&](int64_t start, int count) {
      Piece<T> sum = {};
      for (int64_t j = begin; j < end; ++j) {
        const Piece<T> term = Piece<T>::Load(src + int64_t{args.index[j]} * args.width + start, count);
        for (int i = 0; i < count; ++i) sum.value[i] += term.value[i];
      }
      sum.Store(static_cast<T*>(args.dst) + row * args.width + start, count);
    });
  }
}

enum class Norm : uint8_t { kSquares, kAbsolute };

template <typename T, Norm kNorm>
__global__ void NormKernel(int64_t rows, int64_t width, bool packed, const T* src, float* out) {
  for (int64_t row = FirstRow(); row < rows; row += RowStride()) {
    float sum = 0;
    ForRow<T>(width, packed, [&](int64_t start, int count) {
      const Piece<T> piece = Piece<T>::Load(src + row * width + start, count);
      for (int i = 0; i < count; ++i) {
        const float value = piece.value[i];
        sum = kNorm == Norm::kSquares ? fmaf(value, value, sum) : sum + fabsf(value);
      }
    });
    sum = WarpSum(sum);
    if (threadIdx.x % kWarpSize == 0) out[row] = sum;
  }
}

template <typename T>
__global__ void DotKernel(RowDotArgs args, bool packed) {
  for (int64_t row = FirstRow(); row < args.num_rows; row += RowStride()) {
    const T* a = static_cast<const T*>(args.a) + int64_t{args.a_row[row]} * args.width;
    const T* b = static_cast<const T*>(args.b) + int64_t{args.b_row[row]} * args.width;
    float sum = 0;
    ForRow<T>(args.width, packed, [&](int64_t start, int count) {
      const Piece<T> left = Piece<T>::Load(a + start, count);
      const Piece<T> right = Piece<T>::Load(b + start, count);
      for (int i = 0; i < count; ++i) sum = fmaf(left.value[i], right.value[i], sum);
    });
    sum = WarpSum(sum);
    if (threadIdx.x % kWarpSize == 0) args.out[row] = sum;
  }
}

// Both halves of PermuteColumns: to the scratch in the new order, and back.
template <bool kToScratch>
__global__ void PermuteKernel(PermuteColumnsArgs args, bool packed) {
  Bf16* scratch = static_cast<Bf16*>(args.scratch);
  for (int64_t row = FirstRow(); row < args.num_rows; row += RowStride()) {
    Bf16* in_place = static_cast<Bf16*>(args.rows) + row * args.width + args.first_column;
    Bf16* aside = scratch + (kToScratch ? int64_t{args.to[row]} : row) * args.num_columns;
    const Bf16* from = kToScratch ? in_place : aside;
    Bf16* to = kToScratch ? aside : in_place;
    ForRow<Bf16>(args.num_columns, packed, [&](int64_t start, int count) {
      if (count == Pack<Bf16>::kLanes)
        Pack<Bf16>::Store(to + start, Pack<Bf16>::Load(from + start));
      else
        to[start] = from[start];
    });
  }
}

template <typename T>
absl::Status Gather(Stream stream, int64_t width, const void* src, const int32_t* index, int64_t num_rows,
                    void* dst) {
  return Start(stream, ForRows(num_rows), GatherKernel<T>, width, Packed<T>(width, {src, dst}),
               static_cast<const T*>(src), index, num_rows, static_cast<T*>(dst));
}

template <Norm kNorm>
absl::Status RowNorm(Stream stream, Type type, int64_t rows, int64_t width, const void* src, float* out) {
  if (absl::Status status = CheckSize("rows", rows); !status.ok()) return status;
  if (type == Type::kBf16)
    return Start(stream, ForRows(rows), NormKernel<Bf16, kNorm>, rows, width, Packed<Bf16>(width, {src}),
                 static_cast<const Bf16*>(src), out);
  return Start(stream, ForRows(rows), NormKernel<float, kNorm>, rows, width, Packed<float>(width, {src}),
               static_cast<const float*>(src), out);
}

}  // namespace

absl::Status GatherRows(Stream stream, Type type, int64_t width, const void* src, const int32_t* index,
                        int64_t num_rows, void* dst) {
  if (absl::Status status = CheckSize("num_rows", num_rows); !status.ok()) return status;
  return type == Type::kBf16 ? Gather<Bf16>(stream, width, src, index, num_rows, dst)
                             : Gather<float>(stream, width, src, index, num_rows, dst);
}

absl::Status CombineRows(Stream stream, const CombineRowsArgs& args) {
  if (absl::Status status = CheckSize("num_tokens", args.num_tokens); !status.ok()) return status;
  const LaunchShape shape = ForRows(args.num_tokens);
  if (args.type == Type::kBf16)
    return Start(stream, shape, CombineKernel<Bf16>, args, Packed<Bf16>(args.width, {args.y, args.out}));
  return Start(stream, shape, CombineKernel<float>, args, Packed<float>(args.width, {args.y, args.out}));
}

absl::Status SumRows(Stream stream, const SumRowsArgs& args) {
  if (absl::Status status = CheckSize("num_rows", args.num_rows); !status.ok()) return status;
  const LaunchShape shape = ForRows(args.num_rows);
  if (args.type == Type::kBf16)
    return Start(stream, shape, SumKernel<Bf16>, args, Packed<Bf16>(args.width, {args.src, args.dst}));
  return Start(stream, shape, SumKernel<float>, args, Packed<float>(args.width, {args.src, args.dst}));
}

absl::Status PermuteColumns(Stream stream, const PermuteColumnsArgs& args) {
  if (absl::Status status = CheckSize("num_rows", args.num_rows); !status.ok()) return status;
  const bool packed = Packed<Bf16>(args.width, {args.rows, args.scratch}) &&
                      Packed<Bf16>(args.num_columns, {}) && Packed<Bf16>(args.first_column, {});
  const LaunchShape shape = ForRows(args.num_rows);
  if (absl::Status status = Start(stream, shape, PermuteKernel<true>, args, packed); !status.ok())
    return status;
  return Start(stream, shape, PermuteKernel<false>, args, packed);
}

absl::Status RowNorm2(Stream stream, Type type, int64_t rows, int64_t width, const void* src, float* out) {
  return RowNorm<Norm::kSquares>(stream, type, rows, width, src, out);
}

absl::Status RowAbsSum(Stream stream, Type type, int64_t rows, int64_t width, const void* src, float* out) {
  return RowNorm<Norm::kAbsolute>(stream, type, rows, width, src, out);
}

absl::Status RowDot(Stream stream, const RowDotArgs& args) {
  if (absl::Status status = CheckSize("num_rows", args.num_rows); !status.ok()) return status;
  const LaunchShape shape = ForRows(args.num_rows);
  if (args.type == Type::kBf16)
    return Start(stream, shape, DotKernel<Bf16>, args, Packed<Bf16>(args.width, {args.a, args.b}));
  return Start(stream, shape, DotKernel<float>, args, Packed<float>(args.width, {args.a, args.b}));
}

}  // namespace lrmoe::kernels::cuda
