// Whether ranks exchange rows while they compute: decided once, when a worker starts.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace lrmoe {

struct OverlapFacts {
  int32_t num_ranks = 1;
  bool on_device = false;  // rows travel between devices, which see to it themselves
  int32_t cores = 1;       // this rank's share of its host
  int32_t threads = 1;     // that compute
};

// setting: auto, on or off. Auto wants somebody to move the bytes: the device's link, or a core that no
// compute thread uses for the transport's thread. `reason` is for the log.
bool ChooseOverlap(absl::string_view setting, const OverlapFacts& facts, std::string* reason);

}  // namespace lrmoe
