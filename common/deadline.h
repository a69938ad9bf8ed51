// A point in time by which a blocking call must end. Every wait in lrmoe has one.
#pragma once

#include <chrono>

namespace lrmoe {

using Deadline = std::chrono::steady_clock::time_point;

inline Deadline After(std::chrono::steady_clock::duration limit) {
  return std::chrono::steady_clock::now() + limit;
}

}  // namespace lrmoe
