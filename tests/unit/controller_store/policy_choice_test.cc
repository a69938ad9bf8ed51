// Settings against what was set at run time.
#include "controller/store/policy_choice.h"

#include "tests/unit/controller_store/fixture.h"

namespace lrmoe::store {
namespace {

using Catch::Contains;

// As the database has it after a run with `configured` that ended with `value` in force.
std::vector<SavedField> Saved(const Policy& configured, const Policy& value) {
  std::vector<SavedField> saved;
  const auto values = PolicyFields(value);
  for (const auto& [name, setting] : PolicyFields(configured))
    saved.push_back({name, setting, values[saved.size()].second});
  return saved;
}

TEST_CASE("policy: field by field, what was set at run time stays until its setting changes") {
  Policy before, set, now;
  set.seed = 7;
  set.retention_floor = 0.25;
  CHECK(ChoosePolicy(before, {}).policy == before);
  CHECK(ChoosePolicy(before, Saved(before, before)).remarks.empty());

  PolicyChoice choice = ChoosePolicy(before, Saved(before, set));
  CHECK(choice.policy == set);
  REQUIRE(choice.remarks.size() == 2);
  CHECK(choice.remarks[0] ==
        "policy retention_floor is 0.25, as it was last set at run time; the setting still says 0");

  now.seed = 9;  // the operator changed this setting, and a third one
  now.window_us = 100;
  choice = ChoosePolicy(now, Saved(before, set));
  CHECK(choice.policy.seed == 9);
  CHECK(choice.policy.retention_floor == 0.25);
  CHECK(choice.policy.window_us == 100);
  CHECK_THAT(choice.remarks[1],
             Contains("policy seed is 9: the setting was changed from 0, which undoes 7, set at run time"));
  CHECK(choice.remarks.size() == 2);

  now.seed = 7;  // changed to what is in force anyway
  CHECK(ChoosePolicy(now, Saved(before, set)).policy.seed == 7);
}

TEST_CASE("policy: fields that depend on each other") {
  Policy rows, sampled, plain;
  rows.rescale = Rescale::kRows;
  sampled.selection = Selection::kLrmSampled;
  // Set at run time: first rescale = off, then selection = lrm_sampled; in the fields' order that would not
  // go.
  CHECK(ChoosePolicy(rows, Saved(rows, sampled)).policy == sampled);
  // The settings now say selection = lrm_sampled, against rescale = rows of the run time.
  const PolicyChoice choice = ChoosePolicy(sampled, Saved(plain, rows));
  CHECK(choice.policy == sampled);
  REQUIRE(choice.remarks.size() == 1);
  CHECK_THAT(choice.remarks[0], Contains("does not go with it: rescale is \"rows\""));
}

TEST_CASE("policy: fields and values that this version does not know") {
  Policy policy;
  std::vector<SavedField> saved = Saved(policy, policy);
  saved.erase(saved.begin());                  // a field that is new
  saved.push_back({"colour", "red", "blue"});  // one that is gone
  CHECK(ChoosePolicy(policy, saved).policy == policy);
  saved.front() = {"rates", PolicyFields(policy)[1].second, "all"};
  CHECK(ChoosePolicy(policy, saved).policy == policy);
}

TEST_CASE("policy: over restarts") {
  TemporaryDirectory directory;
  Policy settings, set;
  settings.seed = 1;
  set = settings;
  set.seed = 2;
  {
    Run run(directory.state(), settings);
    run.store->SetPolicy(set);
    REQUIRE(run.Close().ok());
  }
  for (int i = 0; i < 2; ++i) CHECK(Run(directory.state(), settings).policy.seed == 2);
  settings.seed = 3;
  CHECK(Run(directory.state(), settings).policy.seed == 3);
  settings.seed = 1;  // back: a change as well
  CHECK(Run(directory.state(), settings).policy.seed == 1);
  settings.window_us = 5;
  CHECK(Run(directory.state(), settings).policy == settings);
}

}  // namespace
}  // namespace lrmoe::store
