// A CUDA device without a GPU: kernels/cuda's own device, passes and staging over the kernel emulator, with
// the CPU device behind the GEMM interface and memory that the host cannot touch.
//
// What it checks: host code that follows a pointer into device memory (the pages are closed but while the
// stream runs: a segmentation fault), copies whose ends are not where they say, results read and sources
// changed before the device was waited for (everything happens as late as CUDA allows, when the stream is
// synchronised), memory used before it was written (it starts as NaN patterns) or beyond what was committed.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/cuda/runtime.h"
#include "kernels/kernels.h"

namespace lrmoe::emulator {

inline constexpr int64_t kEmulatedMemoryBytes = int64_t{1} << 30;

// Devices of one process are apart: none can reach another's memory, of which there is `memory_bytes`, but
// for what emulated_ipc.h shares.
std::unique_ptr<kernels::Device> MakeEmulatedDevice(int64_t memory_bytes = kEmulatedMemoryBytes);
// The part of one below the device: memory and a stream.
std::unique_ptr<kernels::cuda::Runtime> MakeEmulatedRuntime();

// A copy between any two places, for a transport: opens the device memory it finds at either end, which must
// not have work under way.
void CopyAnywhere(void* to, const void* from, int64_t bytes);

// Times that work was given to any emulated device of this process: shows that a test really used one.
int64_t WorkDone();

}  // namespace lrmoe::emulator
