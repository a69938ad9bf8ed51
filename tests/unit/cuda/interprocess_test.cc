// Memory and events that another process shares with the emulated device.
#include <sys/wait.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <csignal>
#include <cstring>
#include <thread>
#include <vector>

#include "common/check.h"
#include "kernels/interprocess.h"
#include "kernels/kernels.h"
#include "tests/support/emulated_cuda.h"
#include "tests/support/emulated_ipc.h"

namespace lrmoe::emulator {
namespace {

using namespace std::chrono_literals;  // NOLINT: tests
using kernels::Device;
using kernels::Memory;
using kernels::SharedEvent;

constexpr int64_t kValues = 3000;  // not a whole page

std::span<float> Values(const SharedFile& file) {
  return {reinterpret_cast<float*>(file.memory().data()), kValues};
}

std::string Text(const absl::Status& status) {
  return std::string(status.message());
}

// A process of its own that has memory and an event and records the event, without ever firing it. Killed in
// the end, if not before.
class Exporter {
 public:
  Exporter() {
    int ends[2];
    LRMOE_CHECK_EQ(pipe(ends), 0);
    pid_ = fork();
    LRMOE_CHECK_GE(pid_, 0);
    if (pid_ == 0) {
      const auto memory = SharedFile::Create(kValues * 4), event = SharedFile::Create(0);
      for (int64_t i = 0; i < kValues; ++i) Values(*memory)[i] = static_cast<float>(i);
      event->Record();
      const std::string handles = memory->handle() + event->handle();
      if (write(ends[1], handles.data(), handles.size()) != static_cast<ssize_t>(handles.size())) _exit(1);
      while (true) pause();
    }
    handles_.resize(2 * kernels::kSharedHandleBytes);
    LRMOE_CHECK_EQ(read(ends[0], handles_.data(), handles_.size()), static_cast<ssize_t>(handles_.size()));
    close(ends[0]);
    close(ends[1]);
  }
  ~Exporter() { Kill(); }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  std::string memory() const { return handles_.substr(0, kernels::kSharedHandleBytes); }
  std::string event() const { return handles_.substr(kernels::kSharedHandleBytes); }

 private:
  pid_t pid_ = 0;
  std::string handles_;
};

}  // namespace

TEST_CASE("memory of another process is the device's, at an address of its own, until it is closed",
          "[cuda][ipc]") {
  const auto device = MakeEmulatedDevice();
  const auto file = SharedFile::Create(kValues * 4);
  for (int64_t i = 0; i < kValues; ++i) Values(*file)[i] = static_cast<float>(i) + 0.5F;
  auto memory = device->interprocess()->OpenMemory(file->handle(), kValues * 4);
  REQUIRE(memory.status() == absl::OkStatus());
  CHECK(file->openings() == 1);
  std::byte* const base = (*memory)->base();
  CHECK(base != file->memory().data());
  CHECK(device->Holds(base + kValues * 4 - 1));
  CHECK_FALSE(device->Holds(base + kValues * 4));
  std::vector<float> read(kValues - 100), norms(10);
  auto own = std::move(device->Reserve(40)).value();
  REQUIRE(own->Commit(40).ok());
  device->Download(read.data(), base + 400, (kValues - 100) * 4);
  device->RowNorm2(kernels::Type::kFp32, 10, 4, base + 64, reinterpret_cast<float*>(own->base()));
  device->Download(norms.data(), own->base(), 40);
  device->Fill(base, 0, 400);
  REQUIRE(device->Wait() == absl::OkStatus());
  CHECK(read.front() == 100.5F);
  CHECK(read.back() == kValues - 0.5F);
  CHECK(norms[0] == 16.5F * 16.5F + 17.5F * 17.5F + 18.5F * 18.5F + 19.5F * 19.5F);
  CHECK(Values(*file)[99] == 0);
  CHECK(Values(*file)[100] == 100.5F);
  memory->reset();
  CHECK(file->openings() == 0);
  CHECK_FALSE(device->Holds(base));
}

TEST_CASE("what cannot be opened is refused and says why", "[cuda][ipc]") {
  const auto device = MakeEmulatedDevice();
  kernels::Interprocess& shared = *device->interprocess();
  CHECK(shared.uuid().size() == kernels::kDeviceUuidBytes);
  CHECK(shared.uuid() != MakeEmulatedDevice()->interprocess()->uuid());
  auto file = SharedFile::Create(4096);
  const std::string handle = file->handle();
  const auto failure = [&](absl::string_view named, int64_t bytes) {
    return Text(shared.OpenMemory(named, bytes).status());
  };
  CHECK_THAT(failure("short", 1), Catch::Contains("handle: 5 bytes, allowed are 64"));
  CHECK_THAT(failure(std::string(64, 'x'), 1), Catch::Contains("names nothing"));
  CHECK_THAT(failure(handle, 4097), Catch::Contains("bytes: 4097, allowed are 1..4096"));
  CHECK_THAT(failure(handle, 0), Catch::Contains("bytes: 0, allowed are 1..4096"));
  CHECK(file->openings() == 0);
  file.reset();
  file = SharedFile::Create(4096);  // under the same number
  CHECK_THAT(failure(handle, 4096), Catch::Contains("has let go of it"));
  CHECK_THAT(Text(shared.OpenEvent("").status()), Catch::Contains("handle: 0 bytes"));
}

TEST_CASE("the device reads another process's memory only after the event, and the host goes on",
          "[cuda][ipc]") {
  const auto device = MakeEmulatedDevice();
  const auto file = SharedFile::Create(kValues * 4), theirs = SharedFile::Create(0);
  auto memory = device->interprocess()->OpenMemory(file->handle(), kValues * 4);
  auto event = device->interprocess()->OpenEvent(theirs->handle());
  REQUIRE(event.status() == absl::OkStatus());
  REQUIRE((*event)->Await(60s) == absl::OkStatus());  // never recorded: nothing to wait for
  REQUIRE(device->Wait() == absl::OkStatus());
  std::vector<float> read(kValues, -1.0F);
  for (uint32_t round = 1; round <= 3; ++round) {
    theirs->Record();
    REQUIRE((*event)->Await(60s) == absl::OkStatus());
    device->Download(read.data(), (*memory)->base(), kValues * 4);
    absl::Status waited;
    std::thread worker([&] { waited = device->Wait(); });
    CHECK(theirs->WaitForWaiter(60s));
    std::fill_n(Values(*file).data(), kValues,
                static_cast<float>(round));  // the other stream gets on at last
    theirs->Fire();
    worker.join();
    CHECK(waited == absl::OkStatus());
    CHECK(read == std::vector<float>(kValues, static_cast<float>(round)));
  }
}

TEST_CASE("another process sees by the device's event that its work is done", "[cuda][ipc]") {
  const auto device = MakeEmulatedDevice();
  const auto file = SharedFile::Create(kValues * 4);
  auto memory = device->interprocess()->OpenMemory(file->handle(), kValues * 4);
  auto event = device->interprocess()->MakeEvent();
  REQUIRE(event.status() == absl::OkStatus());
  const auto seen = SharedFile::Open((*event)->handle());
  REQUIRE(seen.status() == absl::OkStatus());
  device->Fill((*memory)->base(), 7, kValues * 4);
  CHECK((*seen)->recorded() == 0);
  REQUIRE((*event)->Record() == absl::OkStatus());
  CHECK((*seen)->recorded() == 1);
  CHECK((*seen)->WaitUntilFired(1, 60s));
  CHECK(file->memory()[kValues * 4 - 1] == std::byte{7});
}

TEST_CASE("a process that dies before its event fires costs the device, not the worker's patience",
          "[cuda][ipc]") {
  const auto device = MakeEmulatedDevice();
  Exporter exporter;
  auto memory = device->interprocess()->OpenMemory(exporter.memory(), kValues * 4);
  REQUIRE(memory.status() == absl::OkStatus());
  auto event = device->interprocess()->OpenEvent(exporter.event());
  REQUIRE(event.status() == absl::OkStatus());
  std::vector<float> read(kValues);
  device->Download(read.data(), (*memory)->base(), kValues * 4);
  REQUIRE(device->Wait() == absl::OkStatus());
  CHECK(read[kValues - 1] == kValues - 1);
  exporter.Kill();
  CHECK_THAT(Text(device->interprocess()->OpenEvent(exporter.event()).status()),
             Catch::Contains("has let go of it"));
  device->Download(read.data(), (*memory)->base(), kValues * 4);
  CHECK(device->Wait() == absl::OkStatus());  // what is open stays readable
  REQUIRE((*event)->Await(1ms) == absl::OkStatus());
  const absl::Status late = device->Wait();
  CHECK(late.code() == absl::StatusCode::kDeadlineExceeded);
  CHECK_THAT(Text(late), Catch::Contains("did not fire within 1 ms"));
  CHECK(device->Wait() == late);
}

TEST_CASE("a UUID is written as CUDA's tools write it", "[cuda][ipc]") {
  std::string uuid;
  for (char c = 0; c < 16; ++c) uuid += c;
  CHECK(kernels::DeviceUuidText(uuid) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f");
  CHECK(kernels::DeviceUuidText("ab") == "\"6162\" (2 bytes)");
}

}  // namespace lrmoe::emulator
