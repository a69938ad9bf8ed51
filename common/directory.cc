#include "common/directory.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace lrmoe {

absl::Status SyncDirectory(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return SystemError("open directory", path, errno);
  const int error = fsync(fd) == 0 ? 0 : errno;
  close(fd);
  // Some file systems have nothing to do for a directory and say EINVAL.
  return error == 0 || error == EINVAL ? absl::OkStatus() : SystemError("fsync directory", path, error);
}

absl::Status SystemError(absl::string_view what, const std::string& path, int error) {
  const std::string text = absl::StrCat(path, ": ", what, ": ", std::strerror(error));
  switch (error) {
    case ENOENT:
      return absl::NotFoundError(text);
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(text);
    case ENOSPC:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
      return absl::ResourceExhaustedError(text);
    default:
      return absl::InternalError(text);
  }
}

}  // namespace lrmoe
