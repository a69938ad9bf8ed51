// A process that dies at any system call of a save: the last good checkpoint always loads, whole.
//
// The calls that change files are defined here and so stand in for the C library's in this program. In a
// child process they count down and end it; a write that is hit leaves a random part of its bytes.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/unit/checkpoint/fixture.h"

namespace {

constexpr int kDied = 77;
int64_t calls_left = -1;  // negative: count only
int64_t calls_made = 0;
uint64_t torn_seed = 0;

bool DiesNow() {
  ++calls_made;
  return calls_left >= 0 && calls_left-- == 0;
}
void MaybeDie() {
  if (DiesNow()) _exit(kDied);
}

}  // namespace

extern "C" {

ssize_t write(int fd, const void* bytes, size_t size) {
  if (fd > 2 && DiesNow()) {
    syscall(SYS_write, fd, bytes, lrmoe::Random(torn_seed).Below(size + 1));
    _exit(kDied);
  }
  return syscall(SYS_write, fd, bytes, size);
}
int fsync(int fd) {
  MaybeDie();
  return static_cast<int>(syscall(SYS_fsync, fd));
}
int rename(const char* from, const char* to) noexcept {
  MaybeDie();
  return static_cast<int>(syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0));
}
int renameat2(int from_fd, const char* from, int to_fd, const char* to, unsigned flags) noexcept {
  MaybeDie();
  return static_cast<int>(syscall(SYS_renameat2, from_fd, from, to_fd, to, flags));
}
int unlinkat(int fd, const char* path, int flags) noexcept {
  MaybeDie();
  return static_cast<int>(syscall(SYS_unlinkat, fd, path, flags));
}
int mkdir(const char* path, mode_t mode) noexcept {
  MaybeDie();
  return static_cast<int>(syscall(SYS_mkdirat, AT_FDCWD, path, mode));
}

}  // extern "C"

namespace lrmoe::engine {
namespace {

// Saves in a child that dies at call number `at`; returns whether it died (else the save was complete).
bool SaveAndDie(Stores& stores, const std::string& directory, int64_t step, int64_t at, uint64_t seed) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    calls_left = at;
    torn_seed = seed;
    _exit(Save(stores, directory, step).ok() ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFEXITED(status));
  REQUIRE((WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == kDied));
  return WEXITSTATUS(status) == kDied;
}

TEST_CASE("a crash at any point of a save leaves the last good checkpoint", "[checkpoint]") {
  const TemporaryDirectory directory;
  const ModelSpec model = SmallModel();
  Stores first = FilledStores(model, 2, 1);
  REQUIRE(Save(first, directory.path(), 1).ok());
  // How many calls a save takes that replaces one, cleaning up included.
  const int64_t before = calls_made;
  REQUIRE(Save(first, directory.path(), 1).ok());
  const int64_t calls = calls_made - before;
  REQUIRE(calls > 30);

  Random random(4);
  int64_t newest = 1, died = 0, replaced = 0;
  std::string good = Contents(first);
  for (int trial = 0; trial < 300; ++trial) {
    const bool same_step = random.Below(2) == 0;
    const int64_t step = newest + (same_step ? 0 : 1);
    const int32_t world_size = static_cast<int32_t>(random.Between(1, 3));
    Stores stores = FilledStores(model, world_size, 100 + trial);
    // Every call in turn, then anywhere.
    const int64_t at = trial <= calls ? trial : static_cast<int64_t>(random.Below(calls + 1));
    const bool child_died = SaveAndDie(stores, directory.path(), step, at, trial);
    died += child_died;

    Stores loaded = EmptyStores(model, static_cast<int32_t>(random.Between(1, 3)));
    const absl::StatusOr<int64_t> loaded_step = Load(loaded, directory.path(), -1);
    INFO("trial " << trial << ", call " << at << ": " << loaded_step.status().ToString());
    REQUIRE(loaded_step.ok());
    const std::string contents = Contents(loaded);
    const std::string attempted = Contents(stores);
    if (contents == attempted) {
      REQUIRE(*loaded_step == step);
      replaced += child_died;
    } else {
      REQUIRE(child_died);
      REQUIRE(*loaded_step == newest);
      REQUIRE(contents == good);
    }
    good = contents;
    newest = *loaded_step;
  }
  CHECK(died >= 200);
  CHECK(replaced > 0);  // some died after the new one was in place
  // What all the crashes left goes with the next save.
  REQUIRE(Save(first, directory.path(), newest + 1).ok());
  for (const auto& entry : std::filesystem::directory_iterator(directory.path())) {
    CHECK_THAT(entry.path().string(), !Catch::EndsWith(".tmp"));
  }
}

}  // namespace
}  // namespace lrmoe::engine
