// The row and element passes as plain functions over a range, compiled once per instruction set. All of them
// keep the same lanes, the same order of additions and no fused multiply-add, so the bits do not depend on
// the instruction set.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace lrmoe::kernels::cpu {

// Arguments as in kernels.h; the range of rows (or elements) is [begin, end).
struct ActivationForwardArgs {
  ExpertActivation activation;
  Type type;
  int64_t f;
  const void* a;
  void* phi;
  float* norm2;
};
struct ActivationBackwardArgs {
  ExpertActivation activation;
  Type type;
  int64_t f;
  const void* a;
  const void* u;
  const float* alpha;
  void* da;
  void* phi_alpha;
  float* dalpha;
};
struct CombineArgs {
  Type type;
  int64_t width;
  int32_t k;
  const void* y;
  const int32_t* position;
  const float* alpha;
  void* out;
};
struct SumArgs {
  Type type;
  int64_t width;
  const void* src;
  const int32_t* index;
  const int64_t* offset;
  void* dst;
};
struct RowReduceArgs {
  Type type;
  int64_t width;
  const void* src;
  float* out;
};
struct RowDotArgs {
  Type type;
  int64_t width;
  const void* a;
  const int32_t* a_row;
  const void* b;
  const int32_t* b_row;
  float* out;
};
struct AdamWArgs {
  float decay;  // 1 - lr * weight_decay
  float beta1, one_minus_beta1;
  float beta2, one_minus_beta2;
  float sqrt_correction2;  // sqrt(1 - beta2^step)
  float eps;
  float minus_step_size;  // -lr / (1 - beta1^step)
  float gradient_scale;
  float *master, *m, *v;
  const float* gradient;
  Type type;
  void* weights;
};

struct Passes {
  const char* name;  // "avx2", "x86-64"
  void (*activation_forward)(const ActivationForwardArgs& args, int64_t begin, int64_t end);
  void (*activation_backward)(const ActivationBackwardArgs& args, int64_t begin, int64_t end);
  void (*combine)(const CombineArgs& args, int64_t begin, int64_t end);
  void (*sum)(const SumArgs& args, int64_t begin, int64_t end);
  void (*norm2)(const RowReduceArgs& args, int64_t begin, int64_t end);
  void (*abs_sum)(const RowReduceArgs& args, int64_t begin, int64_t end);
  void (*dot)(const RowDotArgs& args, int64_t begin, int64_t end);
  void (*adamw)(const AdamWArgs& args, int64_t begin, int64_t end);
  double (*squared_norm)(const float* values, int64_t begin, int64_t end);
  void (*add)(float* dst, const float* src, int64_t begin, int64_t end);
  void (*to_bf16)(const float* src, Bf16* dst, int64_t begin, int64_t end);
  void (*to_fp32)(const Bf16* src, float* dst, int64_t begin, int64_t end);
};

extern const Passes kBaselinePasses;
extern const Passes kAvx2Passes;

// The widest set this CPU runs.
const Passes& SelectPasses();

}  // namespace lrmoe::kernels::cpu
