#include "common/version.h"

namespace lrmoe {

absl::string_view Version() {
  return LRMOE_VERSION;
}

}  // namespace lrmoe
