// The CPU device with its choices made by the caller, for tests and benchmarks; everybody else:
// CreateCpuDevice.
#pragma once

#include <memory>

#include "kernels/cpu/gemm.h"
#include "kernels/cpu/passes.h"
#include "kernels/kernels.h"

namespace lrmoe::kernels::cpu {

// num_threads >= 1. The CPU must have what `passes` and `bf16_path` need.
std::unique_ptr<Device> MakeCpuDevice(int num_threads, const Passes& passes, Bf16Path bf16_path);

}  // namespace lrmoe::kernels::cpu
