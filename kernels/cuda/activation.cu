// The expert activation and its gradient, fused with the norms and dots that the score and the router
// gradient need.
#include "kernels/cuda/start.cuh"

namespace lrmoe::kernels::cuda {
namespace {

__device__ __forceinline__ float Sigmoid(float x) {
  return 1.0f / (1.0f + expf(-x));
}

// phi(a) of one element and what its gradient needs: d phi / d gate, and d phi / d up (SwiGLU only).
struct Activated {
  float phi, d_gate, d_up;
};

template <ExpertActivation kActivation>
__device__ __forceinline__ Activated Activate(float gate, float up) {
  if constexpr (kActivation == ExpertActivation::kGelu) {
    constexpr float kInverseSqrt2 = 0.70710678118654752f;
    constexpr float kInverseSqrt2Pi = 0.39894228040143268f;
    const float cdf = 0.5f * (1.0f + erff(gate * kInverseSqrt2));
    return {gate * cdf, cdf + gate * kInverseSqrt2Pi * expf(-0.5f * gate * gate), 0.0f};
  } else {
    const float sigmoid = Sigmoid(gate);
    const float silu = gate * sigmoid;
    const float d_silu = sigmoid * (1.0f + gate * (1.0f - sigmoid));
    if constexpr (kActivation == ExpertActivation::kSwiGlu) return {silu * up, d_silu * up, silu};
    return {silu, d_silu, 0.0f};
  }
}

template <ExpertActivation kActivation>
__host__ __device__ constexpr int64_t WidthOfA(int64_t f) {
  return kActivation == ExpertActivation::kSwiGlu ? 2 * f : f;
}

template <typename T, ExpertActivation kActivation>
__global__ void ForwardKernel(int64_t rows, int64_t f, bool packed, const T* a, T* phi, float* norm2) {
  constexpr bool kGated = kActivation == ExpertActivation::kSwiGlu;
  for (int64_t row = FirstRow(); row < rows; row += RowStride()) {
    const T* gate_row = a + row * WidthOfA<kActivation>(f);
    float sum = 0;
    ForRow<T>(f, packed, [&](int64_t start, int count) {
      const Piece<T> gate = Piece<T>::Load(gate_row + start, count);
      Piece<T> up = {};
      if constexpr (kGated) up = Piece<T>::Load(gate_row + f + start, count);
      Piece<T> out;
      for (int i = 0; i < count; ++i) {
        // The norm is that of phi as stored.
        out.value[i] = ToFloat(FromFloat<T>(Activate<kActivation>(gate.value[i], up.value[i]).phi));
        sum = fmaf(out.value[i], out.value[i], sum);
      }
      out.Store(phi + row * f + start, count);
    });
    sum = WarpSum(sum);
    if (threadIdx.x % kWarpSize == 0) norm2[row] = sum;
  }
}

template <typename T, ExpertActivation kActivation>
__global__ void BackwardKernel(ActivationBackwardArgs args, bool packed) {
  constexpr bool kGated = kActivation == ExpertActivation::kSwiGlu;
  const int64_t width = WidthOfA<kActivation>(args.f);
  for (int64_t row = FirstRow(); row < args.rows; row += RowStride()) {
    const T* gate_row = static_cast<const T*>(args.a) + row * width;
    T* da = static_cast<T*>(args.da) + row * width;
    const float alpha = args.alpha[row];
    float sum = 0;
    ForRow<T>(args.f, packed, [&](int64_t start, int count) {
      const Piece<T> gate = Piece<T>::Load(gate_row + start, count);
      const Piece<T> u = Piece<T>::Load(static_cast<const T*>(args.u) + row * args.f + start, count);
      Piece<T> up = {}, d_gate, d_up, phi_alpha;
      if constexpr (kGated) up = Piece<T>::Load(gate_row + args.f + start, count);
      for (int i = 0; i < count; ++i) {
        const Activated active = Activate<kActivation>(gate.value[i], up.value[i]);
        const float scaled = alpha * u.value[i];
        d_gate.value[i] = scaled * active.d_gate;
        d_up.value[i] = scaled * active.d_up;
        phi_alpha.value[i] = alpha * active.phi;
        sum = fmaf(u.value[i], active.phi, sum);
      }
      d_gate.Store(da + start, count);
      if constexpr (kGated) d_up.Store(da + args.f + start, count);
      phi_alpha.Store(static_cast<T*>(args.phi_alpha) + row * args.f + start, count);
    });
    sum = WarpSum(sum);
    if (threadIdx.x % kWarpSize == 0) args.dalpha[row] = sum;
  }
}

template <typename T, ExpertActivation kActivation>
absl::Status Forward(Stream stream, int64_t rows, int64_t f, const void* a, void* phi, float* norm2) {
  return Start(stream, ForRows(rows), ForwardKernel<T, kActivation>, rows, f, Packed<T>(f, {a, phi}),
               static_cast<const T*>(a), static_cast<T*>(phi), norm2);
}

template <typename T>
absl::Status ForwardOf(Stream stream, ExpertActivation activation, int64_t rows, int64_t f, const void* a,
                       void* phi, float* norm2) {
  switch (activation) {
    case ExpertActivation::kSwiGlu:
      return Forward<T, ExpertActivation::kSwiGlu>(stream, rows, f, a, phi, norm2);
    case ExpertActivation::kSilu:
      return Forward<T, ExpertActivation::kSilu>(stream, rows, f, a, phi, norm2);
    case ExpertActivation::kGelu:
      return Forward<T, ExpertActivation::kGelu>(stream, rows, f, a, phi, norm2);
  }
  return absl::InvalidArgumentError("unknown activation");
}

template <typename T>
absl::Status BackwardOf(Stream stream, const ActivationBackwardArgs& args) {
  const bool packed = Packed<T>(args.f, {args.a, args.u, args.da, args.phi_alpha});
  const LaunchShape shape = ForRows(args.rows);
  switch (args.activation) {
    case ExpertActivation::kSwiGlu:
      return Start(stream, shape, BackwardKernel<T, ExpertActivation::kSwiGlu>, args, packed);
    case ExpertActivation::kSilu:
      return Start(stream, shape, BackwardKernel<T, ExpertActivation::kSilu>, args, packed);
    case ExpertActivation::kGelu:
      return Start(stream, shape, BackwardKernel<T, ExpertActivation::kGelu>, args, packed);
  }
  return absl::InvalidArgumentError("unknown activation");
}

}  // namespace

absl::Status ActivationForward(Stream stream, ExpertActivation activation, Type type, int64_t rows, int64_t f,
                               const void* a, void* phi, float* norm2) {
  if (absl::Status status = CheckSize("rows", rows); !status.ok()) return status;
  return type == Type::kBf16 ? ForwardOf<Bf16>(stream, activation, rows, f, a, phi, norm2)
                             : ForwardOf<float>(stream, activation, rows, f, a, phi, norm2);
}

absl::Status ActivationBackward(Stream stream, const ActivationBackwardArgs& args) {
  if (absl::Status status = CheckSize("rows", args.rows); !status.ok()) return status;
  return args.type == Type::kBf16 ? BackwardOf<Bf16>(stream, args) : BackwardOf<float>(stream, args);
}

}  // namespace lrmoe::kernels::cuda
