// The command line of lrmoectl: parses, calls the controller, prints.
#pragma once

#include <functional>
#include <iosfwd>
#include <string>
#include <vector>

namespace lrmoe::ctl {

struct Console {
  std::ostream& out;  // results
  std::ostream& err;  // messages
  bool colour = false;
};

// `arguments` are argv[1..]; `environment` returns null for an unset variable. Returns the exit status: 0
// done, 1 failed, 2 usage (also when the controller calls a value invalid). No wait is longer than --timeout,
// except that `plans watch` streams until --for, --count or the end of the controller.
int Run(const std::vector<std::string>& arguments, const std::function<const char*(const char*)>& environment,
        const Console& console);

}  // namespace lrmoe::ctl
