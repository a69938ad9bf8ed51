#include "common/ids.h"

#include "absl/strings/str_cat.h"

namespace lrmoe {

std::string ToString(const Invocation& invocation) {
  return absl::StrCat("step ", invocation.step, " layer ", invocation.layer, " micro-batch ",
                      invocation.micro_batch);
}

}  // namespace lrmoe
