// The settings of lrmoe-controller, in one place.
#pragma once

#include <string>

#include "common/config.h"
#include "controller/rpc/listener.h"
#include "controller/server.h"

namespace lrmoe {

struct ControllerSettings {
  ServerOptions server;
  rpc::ListenerOptions listener;
  std::string port_file;
  std::string state_dir;
  std::string log_level = "info";
};

// `settings` outlives `parser`.
void AddControllerSettings(ControllerSettings* settings, Settings* parser);
// What no single setting can tell: InvalidArgument naming the setting.
absl::Status Validate(const ControllerSettings& settings);

}  // namespace lrmoe
