// Directories on disk.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace lrmoe {

// Makes the names in a directory durable. Waits for the disk. Errors as of SystemError.
absl::Status SyncDirectory(const std::string& path);

// The error for a failed system call on `path`; `what` says which. NotFound, PermissionDenied,
// ResourceExhausted (space, descriptors), else Internal.
absl::Status SystemError(absl::string_view what, const std::string& path, int error);

}  // namespace lrmoe
