#include "controller/store/state_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace lrmoe::store {
namespace {

absl::Status Bad(const std::string& path, absl::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("state_dir is \"", path, "\"; ", why));
}

absl::Status Make(const std::string& path) {
  if (mkdir(path.c_str(), 0700) == 0) return absl::OkStatus();
  if (errno != EEXIST)
    return Bad(path, absl::StrCat("it cannot be made: ", std::strerror(errno),
                                  "; allowed: a directory that can be written, or a name in one"));
  struct stat found;
  if (stat(path.c_str(), &found) != 0) return Bad(path, std::strerror(errno));
  if (!S_ISDIR(found.st_mode)) return Bad(path, "it is no directory");
  return absl::OkStatus();
}

// What the holder wrote there; empty when it is not known.
std::string HolderOf(int lock) {
  char text[256];
  const ssize_t size = pread(lock, text, sizeof text, 0);
  std::string holder(text, size > 0 ? static_cast<size_t>(size) : 0);
  while (!holder.empty() && holder.back() == '\n') holder.pop_back();
  return holder;
}

}  // namespace

absl::StatusOr<StateDirectory> StateDirectory::Lock(const std::string& path) {
  if (const absl::Status made = Make(path); !made.ok()) return made;
  const std::string file = absl::StrCat(path, "/lock");
  const int lock = open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (lock < 0)
    return Bad(path, absl::StrCat(file, " cannot be written: ", std::strerror(errno),
                                  "; allowed: a directory of this user"));
  StateDirectory directory(path, lock);
  if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK)
      return Bad(path, absl::StrCat(file, " cannot be locked: ", std::strerror(errno)));
    const std::string holder = HolderOf(lock);
    return absl::FailedPreconditionError(absl::StrCat("state_dir is \"", path,
                                                      "\"; another lrmoe-controller uses it (",
                                                      holder.empty() ? "which one is not known" : holder,
                                                      "); allowed: a directory of this controller alone"));
  }
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  const std::string holder = absl::StrCat("pid ", getpid(), " on ", host, "\n");
  // For people only; a full disk shows when the database is opened.
  if (ftruncate(lock, 0) == 0) (void)!pwrite(lock, holder.data(), holder.size(), 0);
  return directory;
}

StateDirectory::~StateDirectory() {
  if (lock_ >= 0) close(lock_);
}

}  // namespace lrmoe::store
