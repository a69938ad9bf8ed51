// The janitor's own side: what runs in the forked process. Only for janitor.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lrmoe::launcher {

// Packets on the socket between worker and janitor: one byte of kind, then text or an int32.
enum class Packet : uint8_t {
  // worker -> janitor
  kName = 1,   // text: who
  kFile,       // text: path to remove at the end
  kKeep,       // text: path of a kFile to leave alone after all
  kDirectory,  // text: directory to remove at the end
  kVariable,   // text: one NAME=value of the training process's environment
  kLaunch,     // with the variables told so far
  kSignal,     // int: signal to the training process's group
  kDone,       // the worker ends in good order
  // janitor -> worker
  kStarted,     // int: pid
  kNotStarted,  // int: errno
  kEnded,       // int: wait status
};

// Longest text; longer environment entries cannot be passed on (the kernel's own limit is 128 KiB).
inline constexpr size_t kMaxPacketText = 131072;

// Serves `fd` until the worker is done or gone, cleans up, exits. Never returns.
[[noreturn]] void RunJanitor(int fd, const std::vector<std::string>& command);

}  // namespace lrmoe::launcher
