// Which policy holds after a restart: the one set at run time, or the settings'. Pure.
#pragma once

#include <string>
#include <vector>

#include "common/policy.h"

namespace lrmoe::store {

// One field of the policy as it was written down. Texts as in PolicyFields.
struct SavedField {
  std::string name;
  std::string configured;  // what the settings said when the controller last started
  std::string value;       // in force last
};

struct PolicyChoice {
  Policy policy;
  std::vector<std::string> remarks;  // for the log: where the settings and what was in force differ
};

// Field by field: a setting that is what it was at the last start has said nothing new, so what was in force
// stays; one that was changed since then wins. When the two cannot stand together, all settings win.
PolicyChoice ChoosePolicy(const Policy& configured, const std::vector<SavedField>& saved);

}  // namespace lrmoe::store
