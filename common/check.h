// Always-on checks for programmer errors. They print both operands and abort; operating errors are
// absl::Status.
#pragma once

#include <sstream>
#include <string>

namespace lrmoe {

// Prints `what` with its place to stderr and aborts.
[[noreturn]] void CheckFailed(const char* file, int line, const std::string& what);

template <typename A, typename B>
[[noreturn]] void CheckOpFailed(const char* file, int line, const char* text, const A& a, const B& b) {
  std::ostringstream out;
  out << text << " (" << a << " against " << b << ")";
  CheckFailed(file, line, out.str());
}

}  // namespace lrmoe

#define LRMOE_CHECK(condition)                              \
  do {                                                      \
    if (!(condition)) [[unlikely]]                          \
      ::lrmoe::CheckFailed(__FILE__, __LINE__, #condition); \
  } while (false)

#define LRMOE_CHECK_OP(op, a, b)                                                                   \
  do {                                                                                             \
    const auto& lrmoe_check_a = (a);                                                               \
    const auto& lrmoe_check_b = (b);                                                               \
    if (!(lrmoe_check_a op lrmoe_check_b)) [[unlikely]]                                            \
      ::lrmoe::CheckOpFailed(__FILE__, __LINE__, #a " " #op " " #b, lrmoe_check_a, lrmoe_check_b); \
  } while (false)

#define LRMOE_CHECK_EQ(a, b) LRMOE_CHECK_OP(==, a, b)
#define LRMOE_CHECK_NE(a, b) LRMOE_CHECK_OP(!=, a, b)
#define LRMOE_CHECK_LE(a, b) LRMOE_CHECK_OP(<=, a, b)
#define LRMOE_CHECK_LT(a, b) LRMOE_CHECK_OP(<, a, b)
#define LRMOE_CHECK_GE(a, b) LRMOE_CHECK_OP(>=, a, b)
#define LRMOE_CHECK_GT(a, b) LRMOE_CHECK_OP(>, a, b)
