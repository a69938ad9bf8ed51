// PNG through cairo, where the program was built with it.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "tools/sim/drawing.h"

namespace lrmoe::sim {

// Unimplemented, naming the missing library, without cairo.
absl::Status PngSupport();
absl::Status WritePng(const Drawing& drawing, const std::string& path);

}  // namespace lrmoe::sim
