#include "tests/support/emulated_ipc.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "kernels/interprocess.h"

namespace lrmoe::emulator {
namespace {

constexpr int64_t kPage = 4096;
constexpr uint64_t kMagic = 0x6370696475727565;

struct Handle {
  uint64_t magic, serial;
  int64_t bytes;
  int32_t pid, fd;
  unsigned char unused[32];
};
static_assert(sizeof(Handle) == kernels::kSharedHandleBytes);

[[noreturn]] void Misuse(const char* what) {
  std::fprintf(stderr, "emulated cuda ipc: %s\n", what);
  std::abort();
}

// Until `value` is another than `seen` or somebody wakes.
void Sleep(std::atomic<uint32_t>& value, uint32_t seen, std::chrono::milliseconds limit) {
  const timespec left{limit.count() / 1000, limit.count() % 1000 * 1000000};
  syscall(SYS_futex, &value, FUTEX_WAIT, seen, &left, nullptr, 0);
}
void Wake(std::atomic<uint32_t>& value) {
  syscall(SYS_futex, &value, FUTEX_WAKE, 1000, nullptr, nullptr, 0);
}

// Whether `value` reaches `wanted` within the limit.
bool WaitUntil(std::atomic<uint32_t>& value, uint32_t wanted, std::chrono::milliseconds limit) {
  using Clock = std::chrono::steady_clock;
  const Clock::time_point until = Clock::now() + limit;
  for (uint32_t seen = value; seen < wanted; seen = value) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now());
    if (left.count() <= 0) return false;
    Sleep(value, seen, left);
  }
  return true;
}

}  // namespace

struct SharedFile::Header {
  uint64_t serial;
  std::atomic<uint32_t> openings, recorded, fired, waiters;
};

SharedFile::SharedFile(int fd, bool owner, std::string handle, Header* header, int64_t bytes)
    : fd_(fd),
      owner_(owner),
      handle_(std::move(handle)),
      header_(header),
      memory_(reinterpret_cast<std::byte*>(header) + kPage, static_cast<size_t>(bytes)) {}

std::unique_ptr<SharedFile> SharedFile::Create(int64_t bytes) {
  static std::atomic<uint64_t> serials{0};
  Handle handle{.magic = kMagic, .serial = ++serials, .bytes = bytes, .pid = getpid(), .unused = {}};
  handle.fd = memfd_create("emulated-cuda", MFD_CLOEXEC);
  LRMOE_CHECK_GE(handle.fd, 0);
  LRMOE_CHECK_EQ(ftruncate(handle.fd, kPage + bytes), 0);
  void* at = mmap(nullptr, kPage + bytes, PROT_READ | PROT_WRITE, MAP_SHARED, handle.fd, 0);
  LRMOE_CHECK(at != MAP_FAILED);
  auto* header = static_cast<Header*>(at);
  header->serial = handle.serial;
  std::unique_ptr<SharedFile> file(new SharedFile(
      handle.fd, true, std::string(reinterpret_cast<const char*>(&handle), sizeof(handle)), header, bytes));
  std::memset(file->memory().data(), 0xFF, bytes);
  return file;
}

absl::StatusOr<std::unique_ptr<SharedFile>> SharedFile::Open(absl::string_view bytes) {
  if (absl::Status status = kernels::CheckSharedHandle(bytes); !status.ok()) return status;
  Handle handle;
  std::memcpy(&handle, bytes.data(), sizeof(handle));
  if (handle.magic != kMagic) return absl::InvalidArgumentError("handle: names nothing");
  const absl::Status gone = absl::FailedPreconditionError("handle: opening: its process has let go of it");
  const int fd = open(absl::StrCat("/proc/", handle.pid, "/fd/", handle.fd).c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) return gone;
  void* at = mmap(nullptr, kPage + handle.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  LRMOE_CHECK(at != MAP_FAILED);
  struct stat facts;
  LRMOE_CHECK_EQ(fstat(fd, &facts), 0);
  auto* header = static_cast<Header*>(at);
  if (facts.st_size != kPage + handle.bytes ||
      header->serial != handle.serial) {  // the number was used again
    munmap(at, kPage + handle.bytes);
    close(fd);
    return gone;
  }
  if (++header->openings > 1 && handle.bytes > 0) Misuse("memory is opened twice");
  return std::unique_ptr<SharedFile>(new SharedFile(fd, false, std::string(bytes), header, handle.bytes));
}

SharedFile::~SharedFile() {
  if (!owner_)
    --header_->openings;
  else if (header_->openings > 0 && !memory_.empty())
    Misuse("memory is freed while it is open elsewhere");
  munmap(header_, kPage + memory_.size());
  close(fd_);
}

uint32_t SharedFile::openings() const {
  return header_->openings;
}

void SharedFile::Record() {
  ++header_->recorded;
}
void SharedFile::Fire() {
  header_->fired = header_->recorded.load();
  Wake(header_->fired);
}
uint32_t SharedFile::recorded() const {
  return header_->recorded;
}
uint32_t SharedFile::fired() const {
  return header_->fired;
}

bool SharedFile::WaitUntilFired(uint32_t number, std::chrono::milliseconds limit) {
  if (header_->fired >= number) return true;
  ++header_->waiters;
  Wake(header_->waiters);
  const bool fired = WaitUntil(header_->fired, number, limit);
  --header_->waiters;
  return fired;
}
bool SharedFile::WaitForWaiter(std::chrono::milliseconds limit) {
  return WaitUntil(header_->waiters, 1, limit);
}

}  // namespace lrmoe::emulator
