// LRMOE_RETURN_IF_ERROR(expr) and LRMOE_ASSIGN_OR_RETURN(lhs, expr) for absl::Status and absl::StatusOr.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define LRMOE_RETURN_IF_ERROR(expr)      \
  do {                                   \
    absl::Status lrmoe_status = (expr);  \
    if (!lrmoe_status.ok()) [[unlikely]] \
      return lrmoe_status;               \
  } while (false)

#define LRMOE_STATUS_JOIN_(a, b) a##b
#define LRMOE_STATUS_JOIN(a, b) LRMOE_STATUS_JOIN_(a, b)
#define LRMOE_ASSIGN_OR_RETURN_(tmp, lhs, expr) \
  auto tmp = (expr);                            \
  if (!tmp.ok()) [[unlikely]]                   \
    return tmp.status();                        \
  lhs = std::move(tmp).value()
#define LRMOE_ASSIGN_OR_RETURN(lhs, expr) \
  LRMOE_ASSIGN_OR_RETURN_(LRMOE_STATUS_JOIN(lrmoe_statusor_, __LINE__), lhs, expr)
