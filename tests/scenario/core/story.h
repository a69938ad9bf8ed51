// Plays a story against the core: commands in, the core's actions out as text. See tests/scenario/README.md.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "controller/core/core.h"

namespace lrmoe::test {

class Story {
 public:
  Story();
  // One line of a story; returns what the core did, one line per action, or "error: ..." for a bad command.
  std::string Play(const std::string& line);

 private:
  using Words = std::vector<std::string>;
  // key=value words of a command; the first word and plain words are not among them.
  using Values = std::map<std::string, std::string>;

  std::string Step(const core::Event& event);
  std::string Show(const core::Action& action);
  std::string Show(const ControllerMessage& message) const;
  std::string ShowProblem(const core::StartPlan& start) const;
  std::string ShowStatus();
  core::Event ParseMessage(const Words& words, const Values& values) const;
  std::string FinishPlan(const Words& words, const Values& values);
  void SetOptions(const Values& values);

  core::CoreOptions options_;
  std::unique_ptr<core::Core> core_;
  int64_t now_us_ = 0;
  std::map<uint64_t, core::StartPlan> jobs_;  // by ticket
};

}  // namespace lrmoe::test
