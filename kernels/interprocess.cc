#include "kernels/interprocess.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"

namespace lrmoe::kernels {

std::string DeviceUuidText(absl::string_view uuid) {
  const std::string hex = absl::BytesToHexString(uuid);
  if (uuid.size() != kDeviceUuidBytes) return absl::StrCat("\"", hex, "\" (", uuid.size(), " bytes)");
  return absl::StrCat("GPU-", hex.substr(0, 8), "-", hex.substr(8, 4), "-", hex.substr(12, 4), "-",
                      hex.substr(16, 4), "-", hex.substr(20));
}

absl::Status CheckSharedHandle(absl::string_view handle) {
  if (handle.size() == kSharedHandleBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("handle: ", handle.size(), " bytes, allowed are ", kSharedHandleBytes,
                   " (another length is no handle of CUDA's; PyTorch packs it in more)"));
}

}  // namespace lrmoe::kernels
