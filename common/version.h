// The version of lrmoe this program was built from, e.g. "0.1.0".
#pragma once

#include "absl/strings/string_view.h"

namespace lrmoe {

absl::string_view Version();

}  // namespace lrmoe
