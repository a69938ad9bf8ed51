#include "tests/support/emulated_cuda.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "kernels/cuda/device.h"
#include "tests/support/cuda_emulator.h"
#include "tests/support/emulated_ipc.h"

namespace lrmoe::emulator {
namespace {

using kernels::Memory;
using kernels::cuda::Direction;

constexpr int64_t kPage = 4096;

std::atomic<int64_t> g_work{0};

// Of a device of its own, 16 bytes.
std::string NextUuid() {
  static std::atomic<uint64_t> devices{0};
  const uint64_t parts[] = {0x64657461'6c756d65, ++devices};
  return {reinterpret_cast<const char*>(parts), sizeof(parts)};
}

[[noreturn]] void Misuse(const char* what) {
  std::fprintf(stderr, "emulated cuda: %s\n", what);
  std::abort();
}

// One range of device memory. Closed to everybody but while it is opened.
class Region {
 public:
  // The first `committed` bytes hold something already.
  Region(std::byte* base, int64_t capacity, int64_t committed = 0)
      : base_(base), capacity_(capacity), committed_(committed) {
    Protect();
  }

  std::byte* base() const { return base_; }
  int64_t capacity() const { return capacity_; }
  bool Has(const void* pointer) const { return pointer >= base_ && pointer < base_ + capacity_; }
  // Whole pages up to `end` that are not usable yet.
  int64_t Missing(int64_t end) {
    const std::lock_guard lock(mutex_);
    return std::max<int64_t>(0, (end + kPage - 1) / kPage * kPage - committed_);
  }
  int64_t committed() {
    const std::lock_guard lock(mutex_);
    return committed_;
  }
  void Commit(int64_t end) {
    const std::lock_guard lock(mutex_);
    end = (end + kPage - 1) / kPage * kPage;
    if (end <= committed_) return;
    LRMOE_CHECK_EQ(mprotect(base_ + committed_, end - committed_, PROT_READ | PROT_WRITE), 0);
    std::memset(base_ + committed_, 0xFF, end - committed_);
    committed_ = end;
    Protect();
  }
  void Open() {
    const std::lock_guard lock(mutex_);
    if (++open_ == 1) Protect();
  }
  void Close() {
    const std::lock_guard lock(mutex_);
    if (--open_ == 0) Protect();
  }

 private:
  void Protect() {
    if (committed_ > 0)
      LRMOE_CHECK_EQ(mprotect(base_, committed_, open_ > 0 ? PROT_READ | PROT_WRITE : PROT_NONE), 0);
  }

  std::byte* const base_;
  const int64_t capacity_;
  std::mutex mutex_;
  int64_t committed_;  // mutex_
  int open_ = 0;       // mutex_
};

// Every range of every device, for CopyAnywhere.
struct Regions {
  std::mutex mutex;
  std::vector<Region*> all;  // mutex
};
Regions& AllRegions() {
  static Regions regions;
  return regions;
}

class EmulatedRuntime;

// `capacity` bytes of addresses that `mapping` keeps. The first `committed` of them hold something already.
class DeviceMemory : public Memory {
 public:
  DeviceMemory(EmulatedRuntime* runtime, std::shared_ptr<const void> mapping, std::span<std::byte> addresses,
               int64_t committed = 0);
  ~DeviceMemory() override;
  absl::Status Commit(int64_t end) override;

 private:
  EmulatedRuntime* const runtime_;
  const std::shared_ptr<const void> mapping_;
  Region region_;
};

class EmulatedRuntime : public kernels::cuda::Runtime, public kernels::Interprocess {
 public:
  explicit EmulatedRuntime(int64_t memory_bytes) : memory_bytes_(memory_bytes) {}
  ~EmulatedRuntime() override { LRMOE_CHECK(regions_.empty()); }

  absl::string_view name() const override { return "emulated CUDA device"; }
  kernels::cuda::Stream stream() const override { return &queue_; }
  int64_t memory_bytes() const override { return memory_bytes_; }
  bool Holds(const void* pointer) const override {
    return std::any_of(regions_.begin(), regions_.end(), [=](const Region* r) { return r->Has(pointer); });
  }
  absl::StatusOr<std::unique_ptr<Memory>> Reserve(int64_t bytes) override {
    if (bytes > memory_bytes_)
      return absl::ResourceExhaustedError(absl::StrCat(bytes, " bytes of device memory"));
    absl::StatusOr<std::unique_ptr<Memory>> addresses = kernels::ReserveHostMemory(bytes + kPage);
    if (!addresses.ok()) return addresses.status();
    const std::span<std::byte> usable((*addresses)->base(), (*addresses)->capacity() - kPage);
    return std::make_unique<DeviceMemory>(this, *std::move(addresses), usable);
  }
  absl::StatusOr<std::unique_ptr<Memory>> AllocatePinned(int64_t bytes) override {
    absl::StatusOr<std::unique_ptr<Memory>> memory = kernels::ReserveHostMemory(bytes);
    if (!memory.ok()) return memory;
    if (absl::Status status = (*memory)->Commit(bytes); !status.ok()) return status;
    return memory;
  }
  absl::Status Copy(void* dst, const void* src, int64_t bytes, Direction direction) override {
    if (Holds(dst) != (direction != Direction::kToHost)) Misuse("a copy's destination is not where it says");
    if (Holds(src) != (direction != Direction::kToDevice)) Misuse("a copy's source is not where it says");
    queue_.Add([=] { std::memcpy(dst, src, bytes); });
    return absl::OkStatus();
  }
  absl::Status Fill(void* dst, uint8_t value, int64_t bytes) override {
    if (!Holds(dst)) Misuse("a fill outside the device");
    queue_.Add([=] { std::memset(dst, value, bytes); });
    return absl::OkStatus();
  }
  absl::Status Launch(absl::FunctionRef<absl::Status()> enqueue) override {
    ++g_work;
    return enqueue();
  }
  absl::Status Synchronize() override {
    for (Region* region : regions_) region->Open();
    queue_.Drain();
    for (Region* region : regions_) region->Close();
    return overdue_;
  }
  kernels::Interprocess& interprocess() override { return *this; }

  const std::string& uuid() const override { return uuid_; }
  absl::StatusOr<std::unique_ptr<Memory>> OpenMemory(absl::string_view handle, int64_t bytes) override {
    absl::StatusOr<std::shared_ptr<SharedFile>> file = SharedFile::Open(handle);
    if (!file.ok()) return file.status();
    const auto size = static_cast<int64_t>((*file)->memory().size());
    if (bytes < 1 || bytes > size)
      return absl::InvalidArgumentError(absl::StrCat("bytes: ", bytes, ", allowed are 1..", size));
    const std::span<std::byte> memory = (*file)->memory().first(bytes);
    return std::make_unique<DeviceMemory>(this, *std::move(file), memory, bytes);
  }
  absl::StatusOr<std::unique_ptr<kernels::SharedEvent>> OpenEvent(absl::string_view handle) override;
  absl::StatusOr<std::unique_ptr<kernels::SharedEvent>> MakeEvent() override;

  void Await(const std::shared_ptr<SharedFile>& event, std::chrono::milliseconds limit) {
    queue_.Add([this, event, number = event->recorded(), limit] {
      if (event->WaitUntilFired(number, overdue_.ok() ? limit : limit.zero())) return;
      overdue_ = absl::DeadlineExceededError(
          absl::StrCat("the event of another process did not fire within ", limit.count(), " ms"));
    });
  }
  // A device gets there by itself; here only when it is made to.
  absl::Status Record(const std::shared_ptr<SharedFile>& event) {
    event->Record();
    queue_.Add([event] { event->Fire(); });
    return Synchronize();
  }

  void Add(Region* region) {
    regions_.push_back(region);
    used_bytes_ += region->committed();
  }
  void Remove(Region* region) {
    (void)Synchronize();
    std::erase(regions_, region);
    used_bytes_ -= region->committed();
  }
  absl::Status Use(int64_t bytes) {
    if (used_bytes_ + bytes > memory_bytes_)
      return absl::ResourceExhaustedError(absl::StrCat("allocating ", bytes, " bytes of device memory, ",
                                                       memory_bytes_ - used_bytes_, " are free"));
    used_bytes_ += bytes;
    return absl::OkStatus();
  }

 private:
  const std::string uuid_ = NextUuid();
  const int64_t memory_bytes_;
  int64_t used_bytes_ = 0;
  mutable StreamQueue queue_;
  std::vector<Region*> regions_;
  absl::Status overdue_;
};

class EmulatedEvent final : public kernels::SharedEvent {
 public:
  EmulatedEvent(EmulatedRuntime* runtime, std::shared_ptr<SharedFile> file)
      : SharedEvent(file->handle()), runtime_(runtime), file_(std::move(file)) {}
  absl::Status Record() override { return runtime_->Record(file_); }
  absl::Status Await(std::chrono::milliseconds limit) override {
    runtime_->Await(file_, limit);
    return absl::OkStatus();
  }

 private:
  EmulatedRuntime* const runtime_;
  const std::shared_ptr<SharedFile> file_;
};

absl::StatusOr<std::unique_ptr<kernels::SharedEvent>> EmulatedRuntime::OpenEvent(absl::string_view handle) {
  absl::StatusOr<std::shared_ptr<SharedFile>> file = SharedFile::Open(handle);
  if (!file.ok()) return file.status();
  return std::make_unique<EmulatedEvent>(this, *std::move(file));
}
absl::StatusOr<std::unique_ptr<kernels::SharedEvent>> EmulatedRuntime::MakeEvent() {
  return std::make_unique<EmulatedEvent>(this, SharedFile::Create(0));
}

DeviceMemory::DeviceMemory(EmulatedRuntime* runtime, std::shared_ptr<const void> mapping,
                           std::span<std::byte> addresses, int64_t committed)
    : runtime_(runtime),
      mapping_(std::move(mapping)),
      region_(addresses.data(), static_cast<int64_t>(addresses.size()), committed) {
  base_ = region_.base();
  capacity_ = region_.capacity();
  runtime_->Add(&region_);
  Regions& regions = AllRegions();
  const std::lock_guard lock(regions.mutex);
  regions.all.push_back(&region_);
}

absl::Status DeviceMemory::Commit(int64_t end) {
  if (end > capacity()) return absl::ResourceExhaustedError(absl::StrCat(end, " bytes of ", capacity()));
  const absl::Status status = runtime_->Use(region_.Missing(end));
  if (status.ok()) region_.Commit(end);
  return status;
}

DeviceMemory::~DeviceMemory() {
  runtime_->Remove(&region_);
  Regions& regions = AllRegions();
  const std::lock_guard lock(regions.mutex);
  std::erase(regions.all, &region_);
}

// The CPU device's GEMMs, as late as a stream would.
class EmulatedGemm : public kernels::cuda::GemmBackend {
 public:
  absl::string_view path() const override { return "the CPU device's GEMMs"; }
  absl::Status Run(kernels::cuda::Stream stream, kernels::GemmKind kind, kernels::Type type, int64_t n,
                   int64_t k, std::span<const kernels::GemmGroup> groups) override {
    std::vector<kernels::GemmGroup> kept(groups.begin(), groups.end());
    static_cast<StreamQueue*>(stream)->Add([this, kind, type, n, k, work = std::move(kept)] {
      const absl::Status status = cpu_->GroupedGemm(kind, type, n, k, work);
      if (!status.ok()) Misuse(std::string(status.message()).c_str());
    });
    return absl::OkStatus();
  }

 private:
  const std::unique_ptr<kernels::Device> cpu_ = std::move(kernels::CreateCpuDevice(1)).value();
};

Region* RegionOf(const void* pointer) {
  Regions& regions = AllRegions();
  const std::lock_guard lock(regions.mutex);
  for (Region* region : regions.all)
    if (region->Has(pointer)) return region;
  return nullptr;
}

}  // namespace

std::unique_ptr<kernels::cuda::Runtime> MakeEmulatedRuntime() {
  return std::make_unique<EmulatedRuntime>(kEmulatedMemoryBytes);
}

std::unique_ptr<kernels::Device> MakeEmulatedDevice(int64_t memory_bytes) {
  return kernels::cuda::MakeCudaDevice(std::make_unique<EmulatedRuntime>(memory_bytes),
                                       std::make_unique<EmulatedGemm>());
}

void CopyAnywhere(void* to, const void* from, int64_t bytes) {
  Region* const destination = RegionOf(to);
  Region* const source = RegionOf(from);
  if (destination != nullptr) destination->Open();
  if (source != nullptr) source->Open();
  std::memcpy(to, from, bytes);
  if (source != nullptr) source->Close();
  if (destination != nullptr) destination->Close();
}

int64_t WorkDone() {
  return g_work;
}

}  // namespace lrmoe::emulator
