// absl::Status and grpc::Status have the same codes.
#pragma once

#include <grpcpp/support/status.h>

#include <string>

#include "absl/status/status.h"

namespace lrmoe::worker {

// Messages travel in an HTTP/2 header of limited size (8 KiB by default, up to three bytes per byte of text).
inline constexpr size_t kMaxStatusMessageBytes = 2000;

inline grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  std::string message(status.message().substr(0, kMaxStatusMessageBytes));
  if (message.size() < status.message().size()) message += " ...";
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message);
}

inline absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

}  // namespace lrmoe::worker
