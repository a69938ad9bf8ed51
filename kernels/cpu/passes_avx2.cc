// The passes for CPUs with AVX2. Headers come before the pragma: an inline function of theirs compiled for
// AVX2 could otherwise be the copy the linker keeps for everybody.
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/cpu/passes.h"

#pragma GCC push_options
#pragma GCC target("avx2")
#define LRMOE_PASSES kAvx2Passes
#define LRMOE_PASSES_NAME "avx2"
#include "kernels/cpu/passes_body.h"
#pragma GCC pop_options

namespace lrmoe::kernels::cpu {

const Passes& SelectPasses() {
  return __builtin_cpu_supports("avx2") ? kAvx2Passes : kBaselinePasses;
}

}  // namespace lrmoe::kernels::cpu
