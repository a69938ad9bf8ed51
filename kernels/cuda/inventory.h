// What a machine has of CUDA, as plain facts: choosing from them needs no GPU (worker/device_choice.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lrmoe::kernels::cuda {

struct DeviceFacts {
  std::string name;            // "NVIDIA H200"
  std::string uuid;            // 16 bytes; the same device has the same everywhere, whatever its ordinal
  int compute_capability = 0;  // 90 for sm_90
  int64_t memory_bytes = 0;
};

struct Inventory {
  bool built = false;       // with CUDA; else all below is empty
  int driver_version = 0;   // newest CUDA it supports, 13000 for 13.0; 0: no driver
  int runtime_version = 0;  // of the CUDA this program is built with
  std::string error;        // CUDA's name of why devices could not be listed
  std::vector<DeviceFacts> devices;
};

}  // namespace lrmoe::kernels::cuda
