#include "controller/store/policy_choice.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"

namespace lrmoe::store {

PolicyChoice ChoosePolicy(const Policy& configured, const std::vector<SavedField>& saved) {
  std::map<std::string, SavedField> by_name;
  for (const SavedField& field : saved) by_name[field.name] = field;
  PolicyChoice choice{configured, {}};
  std::vector<SavedField> kept;
  for (const auto& [name, setting] : PolicyFields(configured)) {
    const auto found = by_name.find(name);
    if (found == by_name.end() || found->second.value == setting) continue;
    const SavedField& field = found->second;
    if (field.configured == setting) {
      kept.push_back(field);
      choice.remarks.push_back(absl::StrCat("policy ", name, " is ", field.value,
                                            ", as it was last set at run time; the setting still says ",
                                            setting));
    } else if (field.value != field.configured) {
      choice.remarks.push_back(absl::StrCat("policy ", name, " is ", setting,
                                            ": the setting was changed from ", field.configured,
                                            ", which undoes ", field.value, ", set at run time"));
    }
  }
  // A field may only be allowed after another one is set: again, until no more can be.
  absl::Status refused;
  for (size_t before = kept.size() + 1; !kept.empty() && kept.size() < before;) {
    before = kept.size();
    std::erase_if(kept, [&](const SavedField& field) {
      const absl::Status set = SetPolicyField(choice.policy, field.name, field.value);
      if (!set.ok()) refused = set;
      return set.ok();
    });
  }
  if (!kept.empty()) {
    choice.policy = configured;
    choice.remarks = {
        absl::StrCat("the policy is that of the settings; what was set at run time does not go with it: ",
                     refused.message())};
  }
  return choice;
}

}  // namespace lrmoe::store
