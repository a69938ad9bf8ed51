// lrmoe-gpu: what only a device can show. Needs no gRPC, no MPI and no test framework; tests/gpu/run.sh
// builds it.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/inventory.h"
#include "tests/gpu/checks.h"
#include "worker/device_choice.h"

namespace lrmoe::gpu {

std::string Quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}
std::string Number(double value) {
  return std::isfinite(value) ? absl::StrCat(value) : "null";
}
std::string Object(const JsonMembers& members) {
  return absl::StrCat("{", absl::StrJoin(members, ", "), "}");
}
std::string Array(const std::vector<std::string>& values) {
  return absl::StrCat("[", absl::StrJoin(values, ",\n  "), "]");
}

namespace {

int Run(const std::string& mode, const std::string& json_path) {
  const kernels::cuda::Inventory inventory = kernels::cuda::TakeInventory();
  std::string reason;
  const absl::StatusOr<int32_t> device = ChooseDevice("cuda:0", 0, 1, inventory, &reason);
  if (!device.ok()) {
    std::fprintf(stderr, "lrmoe-gpu: no CUDA device: %s\n", std::string(device.status().message()).c_str());
    return 1;
  }
  const kernels::cuda::DeviceFacts& facts = inventory.devices[0];
  std::printf("%s, sm_%d, %.1f GiB, driver for CUDA %d, built with CUDA %d\n", facts.name.c_str(),
              facts.compute_capability, static_cast<double>(facts.memory_bytes) / (1 << 30),
              inventory.driver_version, inventory.runtime_version);
  if (mode == "facts") return 0;
  JsonMembers json{"\"device\": " + Quoted(facts.name),
                   absl::StrCat("\"compute_capability\": ", facts.compute_capability),
                   absl::StrCat("\"driver_version\": ", inventory.driver_version),
                   absl::StrCat("\"runtime_version\": ", inventory.runtime_version)};
  bool ok = true;
  if (mode == "check") ok = RunChecks(testing::CheckSize::kLarge, &json);
  if (mode == "check-small") ok = RunChecks(testing::CheckSize::kSmall, &json);
  if (mode == "bench") {
    const absl::Status status = RunBench(&json);
    ok = status.ok();
    if (!ok) std::fprintf(stderr, "lrmoe-gpu: %s\n", std::string(status.message()).c_str());
  }
  if (!json_path.empty()) {
    std::ofstream file(json_path);
    file << Object(json) << "\n";
    if (!file.flush()) {
      std::fprintf(stderr, "lrmoe-gpu: cannot write %s\n", json_path.c_str());
      return 1;
    }
  }
  return ok ? 0 : 1;
}

}  // namespace
}  // namespace lrmoe::gpu

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "ipc-client" && argc == 4)
    return lrmoe::gpu::RunIpcClient(std::atoi(argv[2]), std::atoi(argv[3]));
  if (argc > 3 || (mode != "facts" && mode != "check" && mode != "check-small" && mode != "bench")) {
    std::fprintf(stderr, "usage: lrmoe-gpu facts | check | check-small | bench [JSON-FILE]\n");
    return 2;
  }
  return lrmoe::gpu::Run(mode, argc > 2 ? argv[2] : "");
}
