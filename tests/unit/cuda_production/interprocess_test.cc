// CUDA IPC as it is built for production, over a fake whose other process is the test.
#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/cuda/device.h"
#include "kernels/interprocess.h"
#include "tests/unit/cuda_production/fresh.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#endif

namespace lrmoe::fake_cuda {
namespace {

using namespace std::chrono_literals;  // NOLINT: tests
using kernels::cuda::CreateCudaDevice;

constexpr int64_t kBytes = 12000;  // not a whole page
constexpr int kInvalidHandle = 400, kInvalidValue = 1;

std::string Text(const absl::Status& status) {
  return std::string(status.message());
}

void RequireSquare(kernels::Device& device, const std::byte* values, double want) {
  REQUIRE(device.SquaredNorm(100, reinterpret_cast<const float*>(values)) == want);
}

// What is left on purpose, the address sanitizer is not to report.
struct LeftForTheProcess {
#if defined(__SANITIZE_ADDRESS__)
  LeftForTheProcess() {
    __lsan_disable();
  }
  ~LeftForTheProcess() {
    __lsan_enable();
  }
#else
  ~LeftForTheProcess() {}
#endif
};

}  // namespace

TEST_CASE("memory of another process is the device's until it is closed", "[cuda][ipc]") {
  const FreshMachine fresh;
  auto device = CreateCudaDevice(2);
  REQUIRE(device.ok());
  kernels::Interprocess& shared = *(*device)->interprocess();
  CHECK(shared.uuid() == kernels::cuda::TakeInventory().devices[2].uuid);
  const ForeignMemory theirs(2, kBytes);
  std::fill(theirs.bytes().begin(), theirs.bytes().end(), std::byte{0});
  auto memory = shared.OpenMemory(theirs.handle(), kBytes);
  REQUIRE(memory.ok());
  CHECK((*memory)->base() != theirs.bytes().data());
  CHECK((*memory)->Commit(kBytes).ok());
  CHECK_FALSE((*memory)->Commit(kBytes + 1).ok());
  CHECK((*device)->Holds((*memory)->base() + kBytes - 1));
  CHECK_FALSE((*device)->Holds((*memory)->base() + kBytes));
  (*device)->Fill((*memory)->base(), 7, 100);
  RequireSquare(**device, (*memory)->base() + 400, 0);
  CHECK(theirs.bytes()[99] == std::byte{7});
  CHECK(theirs.bytes()[100] == std::byte{0});
  // What the device was told before is done before the memory goes.
  (*device)->Fill((*memory)->base(), 8, kBytes);
  memory->reset();
  CHECK(theirs.bytes()[kBytes - 1] == std::byte{8});
  CHECK(CountLive().opened == 0);
}

TEST_CASE("what CUDA cannot open is refused and says why, and the device goes on", "[cuda][ipc]") {
  const FreshMachine fresh;
  auto device = CreateCudaDevice(0);
  REQUIRE(device.ok());
  kernels::Interprocess& shared = *(*device)->interprocess();
  const ForeignMemory theirs(0, kBytes);
  const auto failure = [&](absl::string_view handle, int64_t bytes) {
    return shared.OpenMemory(handle, bytes).status();
  };
  CHECK(failure("short", 1).code() == absl::StatusCode::kInvalidArgument);
  CHECK_THAT(Text(failure("short", 1)), Catch::Contains("handle: 5 bytes, allowed are 64"));
  const absl::Status nobody = failure(std::string(64, 'x'), 1);
  CHECK(nobody.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Text(nobody), Catch::Contains("handle: opening memory: cudaErrorInvalidResourceHandle"));
  CHECK_THAT(Text(failure(theirs.handle(), kBytes + 1)), Catch::Contains("allowed are 1..12000"));
  CHECK_THAT(Text(failure(theirs.handle(), 0)), Catch::Contains("bytes: 0"));
  Fail("cuMemGetAddressRange", kInvalidValue);
  CHECK(failure(theirs.handle(), kBytes).code() == absl::StatusCode::kInternal);
  CHECK(CountLive().opened == 0);
  const absl::Status event = shared.OpenEvent(std::string(64, 'x')).status();
  CHECK(event.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Text(event), Catch::Contains("handle: opening an event: cudaErrorInvalidResourceHandle"));
  Fail("cudaIpcGetEventHandle", kInvalidHandle);
  CHECK_FALSE(shared.MakeEvent().ok());
  auto own = (*device)->Reserve(400);
  REQUIRE((*own)->Commit(400).ok());
  (*device)->Fill((*own)->base(), 0, 400);
  RequireSquare(**device, (*own)->base(), 0);  // a launch, which would find an error left behind
}

TEST_CASE("the device reads another process's memory only after its event", "[cuda][ipc]") {
  const FreshMachine fresh;
  auto device = CreateCudaDevice(0);
  REQUIRE(device.ok());
  kernels::Interprocess& shared = *(*device)->interprocess();
  const ForeignMemory theirs(0, kBytes);
  ForeignEvent their_event;
  auto memory = shared.OpenMemory(theirs.handle(), kBytes);
  auto event = shared.OpenEvent(their_event.handle());
  REQUIRE(memory.ok());
  REQUIRE(event.ok());
  CHECK((*event)->handle() == their_event.handle());
  REQUIRE((*event)->Await(60s).ok());  // never recorded: nothing to wait for
  REQUIRE((*device)->Wait().ok());
  for (int round = 1; round <= 3; ++round) {
    their_event.Record();
    REQUIRE((*event)->Await(600s).ok());
    std::vector<std::byte> read(kBytes);
    (*device)->Download(read.data(), (*memory)->base(), kBytes);
    std::thread other([&] {
      std::fill(theirs.bytes().begin(), theirs.bytes().end(), static_cast<std::byte>(round));
      their_event.Fire();
    });
    CHECK((*device)->Wait().ok());
    other.join();
    CHECK(read == std::vector<std::byte>(kBytes, static_cast<std::byte>(round)));
    (*device)->Fill((*memory)->base(), 0, 400);
    RequireSquare(**device, (*memory)->base(), 0);  // polling left no error for the launch
  }
}

TEST_CASE("another process sees by the device's event that its work is done", "[cuda][ipc]") {
  const FreshMachine fresh;
  auto device = CreateCudaDevice(0);
  REQUIRE(device.ok());
  const ForeignMemory theirs(0, kBytes);
  auto memory = (*device)->interprocess()->OpenMemory(theirs.handle(), kBytes);
  auto event = (*device)->interprocess()->MakeEvent();
  REQUIRE(event.ok());
  const ForeignEvent seen((*event)->handle());
  (*device)->Fill((*memory)->base(), 7, kBytes);
  REQUIRE((*event)->Record().ok());
  CHECK_FALSE(seen.Fired());
  REQUIRE((*device)->Wait().ok());
  CHECK(seen.Fired());
  CHECK(theirs.bytes()[kBytes - 1] == std::byte{7});
}

TEST_CASE("an event that never fires costs the device, not the worker's patience", "[cuda][ipc]") {
  Reset();
  {
    const LeftForTheProcess left;
    auto device = CreateCudaDevice(0);
    REQUIRE(device.ok());
    ForeignEvent their_event;
    auto event = (*device)->interprocess()->OpenEvent(their_event.handle());
    REQUIRE(event.ok());
    auto memory = (*device)->Reserve(400);
    REQUIRE((*memory)->Commit(400).ok());
    auto pinned = (*device)->AllocatePinned(400);
    their_event.Record();
    REQUIRE((*event)->Await(20ms).ok());
    event->reset();  // still waited for
    (*device)->Fill((*memory)->base(), 0, 400);
    const absl::Status late = (*device)->Wait();
    CHECK(late.code() == absl::StatusCode::kDeadlineExceeded);
    CHECK_THAT(Text(late), Catch::Contains("did not fire within 20 ms"));
    CHECK((*device)->Wait() == late);
  }
  // All that waits for a device when it is freed was left to the end of the process.
  CHECK(CountLive().pinned > 0);
  CHECK(CountLive().device_allocations > 0);
  EndProcess();
}

}  // namespace lrmoe::fake_cuda
