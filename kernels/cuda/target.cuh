// What a kernel source is compiled for: a device, by nvcc; or the host, where LRMOE_CUDA_EMULATOR names the
// header of an emulator (the tests'). The kernels themselves do not know which.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/kernels.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#else
#include LRMOE_CUDA_EMULATOR
#endif

namespace lrmoe::kernels::cuda {

inline constexpr uint32_t kFullWarp = 0xFFFFFFFFu;
inline constexpr int kWarpSize = 32;

// The block's dynamic shared memory.
template <typename T>
__device__ __forceinline__ T* SharedMemory() {
#if defined(__CUDACC__)
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  return reinterpret_cast<T*>(shared_bytes);
#else
  return reinterpret_cast<T*>(::lrmoe::emulator::SharedBytes());
#endif
}

// A product that is rounded before it is added to anything: nvcc would fuse a plain one.
__device__ __forceinline__ float Product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

__device__ __forceinline__ float ToFloat(float value) {
  return value;
}
__device__ __forceinline__ float ToFloat(Bf16 value) {
  return __uint_as_float(uint32_t{value} << 16);
}

template <typename T>
__device__ __forceinline__ T FromFloat(float value);
template <>
__device__ __forceinline__ float FromFloat<float>(float value) {
  return value;
}
// Round to nearest even; a NaN stays a (quiet) NaN.
template <>
__device__ __forceinline__ Bf16 FromFloat<Bf16>(float value) {
#if defined(__CUDA_ARCH__)
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
#else
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<Bf16>((bits >> 16) | 0x40u);
  return static_cast<Bf16>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
#endif
}

// Sum over the warp, equal on every lane, in one fixed order.
template <typename T>
__device__ __forceinline__ T WarpSum(T value) {
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2)
    value += __shfl_xor_sync(kFullWarp, value, distance);
  return value;
}

// 16 bytes of a row as floats: one 128-bit access.
template <typename T>
struct Pack {
  static constexpr int kLanes = 16 / static_cast<int>(sizeof(T));
  struct alignas(16) Raw {
    T value[kLanes];
  };

  __device__ static Raw Load(const T* address) { return *reinterpret_cast<const Raw*>(address); }
  __device__ static void Store(T* address, const Raw& raw) { *reinterpret_cast<Raw*>(address) = raw; }
};

// Calls step(start, count) for the pieces of a row of `width` elements that this lane handles: whole packs
// (count == kLanes) when rows are aligned, single elements otherwise. Lane l takes pieces l, l + 32, ...
template <typename T, typename Step>
__device__ __forceinline__ void ForRow(int64_t width, bool packed, Step step) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  if (packed) {
    for (int64_t start = int64_t{lane} * Pack<T>::kLanes; start < width;
         start += int64_t{kWarpSize} * Pack<T>::kLanes)
      step(start, Pack<T>::kLanes);
  } else {
    for (int64_t start = lane; start < width; start += kWarpSize) step(start, 1);
  }
}

// A piece of a row, up to a pack, in registers.
template <typename T>
struct Piece {
  float value[Pack<T>::kLanes];

  __device__ static Piece Load(const T* address, int count) {
    Piece piece;
    if (count == Pack<T>::kLanes) {
      const typename Pack<T>::Raw raw = Pack<T>::Load(address);
      for (int i = 0; i < Pack<T>::kLanes; ++i) piece.value[i] = ToFloat(raw.value[i]);
    } else {
      piece.value[0] = ToFloat(*address);
    }
    return piece;
  }
  __device__ void Store(T* address, int count) const {
    if (count == Pack<T>::kLanes) {
      typename Pack<T>::Raw raw;
      for (int i = 0; i < Pack<T>::kLanes; ++i) raw.value[i] = FromFloat<T>(value[i]);
      Pack<T>::Store(address, raw);
    } else {
      *address = FromFloat<T>(value[0]);
    }
  }
};

// Rows are handled by warps, grid-stride: this warp's first row and the step to its next one.
__device__ __forceinline__ int64_t FirstRow() {
  return int64_t{blockIdx.x} * (blockDim.x / kWarpSize) + threadIdx.x / kWarpSize;
}
__device__ __forceinline__ int64_t RowStride() {
  return int64_t{gridDim.x} * (blockDim.x / kWarpSize);
}
// The same for single elements handled by threads.
__device__ __forceinline__ int64_t FirstElement() {
  return int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
}
__device__ __forceinline__ int64_t ElementStride() {
  return int64_t{gridDim.x} * blockDim.x;
}

}  // namespace lrmoe::kernels::cuda
