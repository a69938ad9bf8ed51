#include "worker/overlap_choice.h"

#include "absl/strings/str_cat.h"

namespace lrmoe {

bool ChooseOverlap(absl::string_view setting, const OverlapFacts& facts, std::string* reason) {
  if (facts.num_ranks == 1) {
    *reason = "there is one rank";
    return false;
  }
  if (setting != "auto") {
    *reason = absl::StrCat("overlap is ", setting);
    return setting == "on";
  }
  if (facts.on_device) {
    *reason = "devices exchange rows by themselves";
    return true;
  }
  *reason = absl::StrCat("this rank has ", facts.cores, facts.cores == 1 ? " core" : " cores", " and ",
                         facts.threads, facts.threads == 1 ? " compute thread" : " compute threads");
  return facts.cores > facts.threads;
}

}  // namespace lrmoe
