// Passes over parameters: AdamW, sums, conversions.
#include "kernels/cuda/start.cuh"

namespace lrmoe::kernels::cuda {
namespace {

// The constants of a step, rounded to fp32 once on the host, in the order torch.optim.AdamW uses them.
struct AdamWConstants {
  float decay, beta1, one_minus_beta1, beta2, one_minus_beta2, sqrt_correction2, eps, minus_step_size,
      gradient_scale;
};

AdamWConstants Constants(const Device::AdamWStep& step) {
  const double correction1 = 1.0 - std::pow(step.beta1, static_cast<double>(step.step));
  const double correction2 = 1.0 - std::pow(step.beta2, static_cast<double>(step.step));
  return {static_cast<float>(1.0 - step.lr * step.weight_decay),
          static_cast<float>(step.beta1),
          static_cast<float>(1.0 - step.beta1),
          static_cast<float>(step.beta2),
          static_cast<float>(1.0 - step.beta2),
          static_cast<float>(std::sqrt(correction2)),
          static_cast<float>(step.eps),
          static_cast<float>(-step.lr / correction1),
          static_cast<float>(step.gradient_scale)};
}

// Every operation is rounded in turn, as by the CPU device: the same bits, wherever the state lies.
template <typename T>
__global__ void AdamWKernel(AdamWArgs args, AdamWConstants c) {
  T* weights = static_cast<T*>(args.weights);
  for (int64_t i = FirstElement(); i < args.n; i += ElementStride()) {
    const float gradient = Product(args.gradient[i], c.gradient_scale);
    const float m = Product(args.m[i], c.beta1) + Product(c.one_minus_beta1, gradient);
    const float v = Product(args.v[i], c.beta2) + Product(Product(c.one_minus_beta2, gradient), gradient);
    const float denominator = sqrtf(v) / c.sqrt_correction2 + c.eps;
    const float master = Product(args.master[i], c.decay) + Product(c.minus_step_size, m) / denominator;
    args.m[i] = m;
    args.v[i] = v;
    args.master[i] = master;
    weights[i] = FromFloat<T>(master);
  }
}

// Sum over the block in a fixed order; the result is valid in thread 0. `sums`: one per warp.
__device__ __forceinline__ double BlockSum(double value, double* sums) {
  value = WarpSum(value);
  if (threadIdx.x % kWarpSize == 0) sums[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  double total = 0;
  if (threadIdx.x == 0)
    for (int warp = 0; warp < static_cast<int>(blockDim.x) / kWarpSize; ++warp) total += sums[warp];
  return total;
}

__global__ void PartialSquaresKernel(int64_t n, const float* values, double* partial) {
  double sum = 0;
  for (int64_t i = FirstElement(); i < n; i += ElementStride()) {
    const double value = values[i];
    sum = fma(value, value, sum);
  }
  sum = BlockSum(sum, SharedMemory<double>());
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void SumPartialsKernel(const double* partial, double* out) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < kPartialSums; i += blockDim.x) sum += partial[i];
  sum = BlockSum(sum, SharedMemory<double>());
  if (threadIdx.x == 0) *out = sum;
}

__global__ void AddKernel(int64_t n, float* dst, const float* src) {
  for (int64_t i = FirstElement(); i < n; i += ElementStride()) dst[i] += src[i];
}

template <typename From, typename To>
__global__ void ConvertKernel(int64_t n, const From* src, To* dst) {
  for (int64_t i = FirstElement(); i < n; i += ElementStride()) dst[i] = FromFloat<To>(ToFloat(src[i]));
}

}  // namespace

absl::Status AdamW(Stream stream, const AdamWArgs& args) {
  if (absl::Status status = CheckSize("n", args.n); !status.ok()) return status;
  const AdamWConstants constants = Constants(args.step);
  return args.type == Type::kBf16 ? Start(stream, ForElements(args.n), AdamWKernel<Bf16>, args, constants)
                                  : Start(stream, ForElements(args.n), AdamWKernel<float>, args, constants);
}

absl::Status SquaredNorm(Stream stream, int64_t n, const float* values, double* partial, double* out) {
  if (absl::Status status = CheckSize("n", n); !status.ok()) return status;
  const LaunchShape shape = ForPartialSums();
  if (absl::Status status = Start(stream, shape, PartialSquaresKernel, n, values, partial); !status.ok())
    return status;
  return Start(stream, LaunchShape{1, shape.threads, shape.shared_bytes}, SumPartialsKernel,
               static_cast<const double*>(partial), out);
}

absl::Status AddInPlace(Stream stream, int64_t n, float* dst, const float* src) {
  if (absl::Status status = CheckSize("n", n); !status.ok()) return status;
  return Start(stream, ForElements(n), AddKernel, n, dst, src);
}

absl::Status Fp32ToBf16(Stream stream, int64_t n, const float* src, Bf16* dst) {
  if (absl::Status status = CheckSize("n", n); !status.ok()) return status;
  return Start(stream, ForElements(n), ConvertKernel<float, Bf16>, n, src, dst);
}

absl::Status Bf16ToFp32(Stream stream, int64_t n, const Bf16* src, float* dst) {
  if (absl::Status status = CheckSize("n", n); !status.ok()) return status;
  return Start(stream, ForElements(n), ConvertKernel<Bf16, float>, n, src, dst);
}

}  // namespace lrmoe::kernels::cuda
