// A worker service over a real engine of one rank, on the CPU or an emulated device, and a client that has
// memory on that device.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/random.h"
#include "tests/contract/worker_rpc/raw_client.h"
#include "tests/support/emulated_cuda.h"
#include "tests/support/emulated_ipc.h"
#include "tests/support/engine/plan_rendezvous.h"
#include "worker/engine_adapter.h"
#include "worker/transport/inproc.h"

namespace lrmoe::worker {

enum class On : uint8_t { kCpu, kDevice };

// Keeps 60 % of the pairs.
class EngineWorker {
 public:
  explicit EngineWorker(On on, std::chrono::milliseconds event_timeout = 60s) {
    ServiceOptions options;
    options.arena_limits = {.max_arenas = 8, .max_total_bytes = 1 << 20};
    options.event_timeout = event_timeout;
    options.max_imports = 2;
    options.create_engine = [this, on](const ModelSpec& model) {
      absl::StatusOr<std::unique_ptr<kernels::Device>> device = nullptr;
      if (on == On::kDevice) device = emulator::MakeEmulatedDevice();
      return CreateEngine({.model = model, .poison_buffers = true}, transport_.get(), plans_.get(),
                          std::move(device));
    };
    options.on_closed = [this](const std::string&) { Note(&closed_); };
    options.on_model = [](const ModelSpec&) {};
    options.on_dead = [this](const absl::Status&) { Note(&dead_); };
    service_ = std::make_unique<WorkerService>(std::move(options));
    auto started = SocketServer::Start(socket(), service_.get());
    REQUIRE(started.status() == absl::OkStatus());
    server_ = *std::move(started);
  }
  ~EngineWorker() {
    service_->Stop();
    server_.reset();
  }
  std::string socket() const { return directory_.path() + "/worker/0.sock"; }
  // Until one more session is over and what was queued for it is done, or the epoch is.
  void AwaitClosed() { Take(&closed_); }
  void AwaitDead() { Take(&dead_); }

 private:
  void Note(int* events) {
    std::lock_guard lock(mutex_);
    ++*events;
    changed_.notify_all();
  }
  void Take(int* events) {
    std::unique_lock lock(mutex_);
    LRMOE_CHECK(changed_.wait_for(lock, 60s, [&] { return *events > 0; }));
    --*events;
  }

  TemporaryDirectory directory_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int closed_ = 0, dead_ = 0;  // guarded by mutex_
  std::unique_ptr<transport::Transport> transport_ =
      std::move(transport::CreateInprocGroup(1, [](std::byte* to, const std::byte* from, int64_t bytes) {
        emulator::CopyAnywhere(to, from, bytes);
        return absl::OkStatus();
      })[0]);
  testing::PlanRendezvous rendezvous_{1, 2, testing::ScriptedPlans{.seed = 3, .retention = 0.6}};
  std::unique_ptr<engine::PlanProvider> plans_ = rendezvous_.Provider(0);
  std::unique_ptr<WorkerService> service_;
  std::unique_ptr<SocketServer> server_;
};

// Memory and an event of the client's.
struct ClientShares {
  static constexpr int64_t kBytes = 5000;
  std::unique_ptr<emulator::SharedFile> memory = emulator::SharedFile::Create(kBytes);
  std::unique_ptr<emulator::SharedFile> ready = emulator::SharedFile::Create(0);
};

// 5 tokens, 2 of 2 experts, H 16, F 8 (RawClient). In the arena at Forward's and Backward's places; in the
// device memory x and dy at kIn, y and dx at kOut.
struct DeviceClient : ClientShares, RawClient {
  static constexpr int64_t kTokens = 5, kHidden = 16, kPairs = 10, kIn = 1280, kOut = 4096;

  explicit DeviceClient(EngineWorker& its_worker) : RawClient(its_worker.socket()), worker(its_worker) {
    const int fd = open(arena.path().c_str(), O_RDWR | O_CLOEXEC);
    REQUIRE(fd >= 0);
    base = static_cast<std::byte*>(mmap(nullptr, arena.bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
    REQUIRE(base != MAP_FAILED);
    close(fd);
  }
  ~DeviceClient() {
    Kill();
    munmap(base, arena.bytes());
  }
  // Its connection ends, as when its process is killed; returns when the worker is done with it.
  void Kill() {
    context.TryCancel();
    worker.AwaitClosed();
  }

  template <typename T>
  std::span<T> Part(int64_t offset, size_t count) {
    return {reinterpret_cast<T*>(base + offset), count};
  }
  std::span<float> DeviceRows(int64_t offset) {
    return {reinterpret_cast<float*>(memory->memory().data() + offset), kTokens * kHidden};
  }
  static void Poison(std::span<float> values) {
    std::fill(values.begin(), values.end(), std::numeric_limits<float>::quiet_NaN());
  }

  grpc::Status Import(const std::string& handle, int64_t bytes, const std::string& uuid, uint64_t* id) {
    v1::ImportDeviceMemoryRequest request;
    request.set_session(session);
    request.set_device_uuid(uuid);
    request.set_handle(handle);
    request.set_bytes(bytes);
    v1::DeviceMemory imported;
    const grpc::Status status = Call(&v1::Worker::Stub::ImportDeviceMemory, request, &imported);
    *id = imported.device_memory();
    return status;
  }
  grpc::Status Release(uint64_t id) {
    v1::ReleaseDeviceMemoryRequest request;
    request.set_session(session);
    request.set_device_memory(id);
    v1::ReleaseDeviceMemoryResponse response;
    return Call(&v1::Worker::Stub::ReleaseDeviceMemory, request, &response);
  }
  grpc::Status ShareEvents(const std::string& handle, const std::string& uuid) {
    v1::ShareEventsRequest request;
    request.set_session(session);
    request.set_device_uuid(uuid);
    request.set_handle(handle);
    v1::ShareEventsResponse response;
    const grpc::Status status = Call(&v1::Worker::Stub::ShareEvents, request, &response);
    if (status.ok()) done = *emulator::SharedFile::Open(response.handle());
    return status;
  }
  // All of the above, as they should be.
  void Share() {
    REQUIRE(Import(memory->handle(), kBytes, device_uuid, &memory_id).ok());
    REQUIRE(ShareEvents(ready->handle(), device_uuid).ok());
  }

  void LoadExperts() {
    Random random(5);
    for (int32_t expert = 0; expert < 2; ++expert) {
      for (float& w : Part<float>(4096, 16 * 16 + 16 * 8)) w = static_cast<float>(random.Uniform() - 0.5);
      v1::LoadExpertRequest request;
      request.set_session(session);
      request.set_expert(expert);
      *request.mutable_gate_up() = Tensor(v1::DATA_TYPE_FP32, {16, 16}, 4096);
      *request.mutable_down() = Tensor(v1::DATA_TYPE_FP32, {16, 8}, 4096 + 1024);
      v1::LoadExpertResponse response;
      REQUIRE(Call(&v1::Worker::Stub::LoadExpert, request, &response).ok());
    }
    v1::FinishLoadRequest request;
    request.set_session(session);
    v1::FinishLoadResponse response;
    REQUIRE(Call(&v1::Worker::Stub::FinishLoad, request, &response).ok());
  }

  static std::vector<float> Rows(uint64_t seed) {
    Random random(seed);
    std::vector<float> rows(kTokens * kHidden);
    for (float& value : rows) value = static_cast<float>(random.Uniform() * 2 - 1);
    return rows;
  }
  // Ids and weights, in the arena.
  void FillPairs() {
    for (int64_t p = 0; p < kPairs; ++p) {
      Part<int32_t>(640, kPairs)[p] = static_cast<int32_t>((p + p / 4) % 2);
      Part<float>(704, kPairs)[p] = 0.1F * static_cast<float>(p + 1);
    }
  }
  v1::Tensor OnDevice(int64_t offset) const {
    v1::Tensor tensor;
    tensor.set_device_memory(memory_id);
    tensor.set_offset_bytes(offset);
    tensor.set_dtype(v1::DATA_TYPE_FP32);
    for (const int64_t size : {kTokens, kHidden}) tensor.add_shape(size);
    return tensor;
  }
  v1::ForwardRequest DeviceForward() const {
    v1::ForwardRequest request = Forward();
    *request.mutable_x() = OnDevice(kIn);
    *request.mutable_y() = OnDevice(kOut);
    return request;
  }
  v1::BackwardRequest DeviceBackward() const {
    v1::BackwardRequest request = Backward();
    *request.mutable_dy() = OnDevice(kIn);
    *request.mutable_dx() = OnDevice(kOut);
    return request;
  }
  // The stream gets there at once.
  void RecordReady() {
    ready->Record();
    ready->Fire();
  }

  EngineWorker& worker;
  std::byte* base = nullptr;  // the arena
  std::unique_ptr<emulator::SharedFile> done;
  uint64_t memory_id = 0;
};

}  // namespace lrmoe::worker
