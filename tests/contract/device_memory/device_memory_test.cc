// Rows in the client's memory on the worker's device: who opens and closes it, in which order it is used, and
// that nothing but its place is different.
#include <cmath>
#include <future>

#include "tests/contract/device_memory/fixture.h"

namespace lrmoe::worker {
namespace {

struct Results {
  std::vector<float> y, dx, dalpha;
  std::vector<uint8_t> kept;
  bool operator==(const Results&) const = default;
};

std::vector<float> Copy(std::span<const float> values) {
  return {values.begin(), values.end()};
}

// One forward and backward with rows in the arena or in device memory; where they are not, there is NaN.
Results RunLayer(EngineWorker& worker, bool on_device) {
  DeviceClient client(worker);
  client.LoadExperts();
  client.FillPairs();
  if (on_device) client.Share();
  const auto in = on_device ? client.DeviceRows(DeviceClient::kIn) : client.Part<float>(0, 80);
  const auto out = on_device ? client.DeviceRows(DeviceClient::kOut) : client.Part<float>(320, 80);
  DeviceClient::Poison(client.Part<float>(0, 160));
  Results results;
  const auto fill = [&](uint64_t seed) {
    const std::vector<float> rows = DeviceClient::Rows(seed);
    std::copy(rows.begin(), rows.end(), in.begin());
    DeviceClient::Poison(out);
    client.RecordReady();
  };
  fill(7);
  grpc::Status status = client.Call(on_device ? client.DeviceForward() : client.Forward());
  CAPTURE(status.error_message());
  REQUIRE(status.ok());
  results.y = Copy(out);
  fill(8);
  status = client.Call(on_device ? client.DeviceBackward() : client.Backward());
  CAPTURE(status.error_message());
  REQUIRE(status.ok());
  results.dx = Copy(out);
  results.dalpha = Copy(client.Part<float>(640, 10));
  const auto kept = client.Part<uint8_t>(704, 10);
  results.kept.assign(kept.begin(), kept.end());
  if (on_device) {
    CHECK(client.memory->openings() == 1);
    CHECK(client.done->recorded() == 2);
    CHECK(client.done->fired() == 2);
    for (const float value : client.Part<float>(0, 160))
      CHECK(std::isnan(value));  // the arena was left alone
  }
  return results;
}

void CheckNear(const std::vector<float>& got, const std::vector<float>& want) {
  REQUIRE(got.size() == want.size());
  for (size_t i = 0; i < got.size(); ++i) CHECK(got[i] == Approx(want[i]).epsilon(1e-5).margin(1e-6));
}

void CheckRefused(const grpc::Status& status, grpc::StatusCode code, const std::string& text) {
  CHECK(status.error_code() == code);
  CHECK_THAT(status.error_message(), Catch::Contains(text));
}

constexpr auto kInvalid = grpc::StatusCode::INVALID_ARGUMENT;
constexpr auto kPrecondition = grpc::StatusCode::FAILED_PRECONDITION;
constexpr auto kNotFound = grpc::StatusCode::NOT_FOUND;

}  // namespace

TEST_CASE("rows in device memory give the same bits as rows in an arena, and the CPU's results",
          "[device_memory]") {
  EngineWorker cpu(On::kCpu), through_arena(On::kDevice), in_place(On::kDevice);
  const Results want = RunLayer(cpu, false), arena = RunLayer(through_arena, false);
  const Results device = RunLayer(in_place, true);
  CHECK(device == arena);
  CHECK(device.kept == want.kept);
  CHECK(std::count(want.kept.begin(), want.kept.end(), 0) > 0);
  CheckNear(device.y, want.y);
  CheckNear(device.dx, want.dx);
  CheckNear(device.dalpha, want.dalpha);
}

TEST_CASE("rows are read after the client's event has fired, while the worker's host goes on",
          "[device_memory]") {
  EngineWorker worker(On::kDevice), in_time(On::kDevice);
  const std::vector<float> want = RunLayer(in_time, true).y;
  DeviceClient client(worker);
  client.LoadExperts();
  client.FillPairs();
  client.Share();
  const std::vector<float> rows = DeviceClient::Rows(7);
  for (uint32_t round = 1; round <= 3; ++round) {
    v1::ForwardRequest request = client.DeviceForward();
    request.mutable_invocation()->set_step(round);
    DeviceClient::Poison(client.DeviceRows(DeviceClient::kIn));
    client.ready->Record();  // and the client's stream is not there yet
    auto call = std::async(std::launch::async, [&] { return client.Call(request); });
    CHECK(client.ready->WaitForWaiter(60s));
    CHECK(client.done->recorded() == round - 1);
    std::copy(rows.begin(), rows.end(), client.DeviceRows(DeviceClient::kIn).begin());
    client.ready->Fire();
    const grpc::Status status = call.get();
    CAPTURE(status.error_message());
    CHECK(status.ok());
    CHECK(client.done->recorded() == round);
    CHECK(client.done->WaitUntilFired(round, 60s));
    CHECK(Copy(client.DeviceRows(DeviceClient::kOut)) == want);
  }
}

TEST_CASE("an allocation is opened once and closed with its last release", "[device_memory]") {
  EngineWorker worker(On::kDevice);
  DeviceClient client(worker);
  const std::string& handle = client.memory->handle();
  uint64_t first = 0, second = 0, other = 0;
  REQUIRE(client.Import(handle, 5000, client.device_uuid, &first).ok());
  REQUIRE(client.Import(handle, 5000, client.device_uuid, &second).ok());
  CHECK(first == second);
  CHECK(client.memory->openings() == 1);
  CheckRefused(client.Import(handle, 4999, client.device_uuid, &other), kInvalid,
               "bytes: 4999, but device memory 1 is this allocation with 5000 bytes");
  const auto more = emulator::SharedFile::Create(4096);
  REQUIRE(client.Import(more->handle(), 4096, client.device_uuid, &other).ok());
  CHECK(other != first);
  const auto third = emulator::SharedFile::Create(64);
  uint64_t refused = 0;
  CheckRefused(client.Import(third->handle(), 64, client.device_uuid, &refused),
               grpc::StatusCode::RESOURCE_EXHAUSTED, "imported 2 allocations, allowed are 2");
  CHECK(third->openings() == 0);
  CHECK(client.Release(first).ok());
  CHECK(client.memory->openings() == 1);
  CHECK(client.Release(first).ok());
  CHECK(client.memory->openings() == 0);
  CheckRefused(client.Release(first), kNotFound, "device memory 1 is not one of this session's");
  REQUIRE(client.Import(handle, 5000, client.device_uuid, &second).ok());
  CHECK(second != first);
  CHECK(client.Release(other).ok());
  CHECK(more->openings() == 0);
}

TEST_CASE("a client that is killed leaves nothing open, and the next one is served", "[device_memory]") {
  EngineWorker worker(On::kDevice);
  ClientShares kept;  // of the killed process; its memory outlives it here to be looked at
  {
    DeviceClient client(worker);
    std::swap(client.memory, kept.memory);
    std::swap(client.ready, kept.ready);
    REQUIRE(client.Import(kept.memory->handle(), 5000, client.device_uuid, &client.memory_id).ok());
    REQUIRE(client.ShareEvents(kept.ready->handle(), client.device_uuid).ok());
    CHECK(kept.memory->openings() == 1);
    CHECK(kept.ready->openings() == 1);
  }
  CHECK(kept.memory->openings() == 0);
  CHECK(kept.ready->openings() == 0);
  DeviceClient next(worker);
  CheckRefused(next.Release(1), kNotFound, "device memory 1 is not one of this session's");
  next.LoadExperts();
  next.FillPairs();
  next.Share();
  std::ranges::copy(DeviceClient::Rows(7), next.DeviceRows(DeviceClient::kIn).begin());
  next.RecordReady();
  CHECK(next.Call(next.DeviceForward()).ok());
}

TEST_CASE("what is not this device's is refused, both sides named", "[device_memory]") {
  EngineWorker worker(On::kDevice);
  DeviceClient client(worker);
  uint64_t id = 0;
  const std::string& handle = client.memory->handle();
  const std::string mine = kernels::DeviceUuidText(client.device_uuid);
  std::string other = client.device_uuid;
  other.back() = '\x7f';
  CheckRefused(client.Import(handle, 5000, other, &id), kPrecondition,
               "device_uuid: " + kernels::DeviceUuidText(other) + ", but this worker computes on " + mine);
  CheckRefused(client.Import(handle, 5000, "", &id), kPrecondition, "\"\" (0 bytes), but this worker");
  CheckRefused(client.ShareEvents(client.ready->handle(), other), kPrecondition, mine);
  CheckRefused(client.Import(handle + "12", 5000, client.device_uuid, &id), kInvalid,
               "handle: 66 bytes, allowed are 64");
  CheckRefused(client.Import(handle, 5001, client.device_uuid, &id), kInvalid,
               "bytes: 5001, allowed are 1..5000");
  CheckRefused(client.Import(std::string(64, '\1'), 8, client.device_uuid, &id), kInvalid,
               "handle: names nothing");
  CheckRefused(client.ShareEvents("1234", client.device_uuid), kInvalid, "handle: 4 bytes, allowed are 64");
  CHECK(client.memory->openings() == 0);

  EngineWorker cpu(On::kCpu);
  DeviceClient on_cpu(cpu);
  CHECK(on_cpu.device_uuid.empty());
  CheckRefused(on_cpu.Import(handle, 5000, client.device_uuid, &id), kPrecondition,
               mine + ", but this worker computes on the CPU and takes tensors from its arenas only");
}

TEST_CASE("descriptors of device memory are checked like those of arenas", "[device_memory]") {
  EngineWorker worker(On::kDevice);
  DeviceClient client(worker);
  client.LoadExperts();
  client.FillPairs();
  REQUIRE(client.Import(client.memory->handle(), 5000, client.device_uuid, &client.memory_id).ok());
  client.RecordReady();
  CheckRefused(client.Call(client.DeviceForward()), kPrecondition,
               "x.device_memory: nothing orders its use; call ShareEvents first");
  REQUIRE(client.ShareEvents(client.ready->handle(), client.device_uuid).ok());
  CheckRefused(client.ShareEvents(client.ready->handle(), client.device_uuid),
               grpc::StatusCode::ALREADY_EXISTS, "shares its events already");
  using Spoil = void (*)(v1::ForwardRequest&);
  struct Case {
    std::string text;
    Spoil spoil;
  };
  const std::vector<Case> cases = {
      {"x.offset_bytes: 4736, allowed are multiples of 64 in 0..4680 (320 bytes in device memory 1 of 5000)",
       [](v1::ForwardRequest& r) { r.mutable_x()->set_offset_bytes(4736); }},
      {"x.offset_bytes: -64, allowed", [](v1::ForwardRequest& r) { r.mutable_x()->set_offset_bytes(-64); }},
      {"y.offset_bytes: 4112, allowed", [](v1::ForwardRequest& r) { r.mutable_y()->set_offset_bytes(4112); }},
      {"y is written and overlaps x", [](v1::ForwardRequest& r) { r.mutable_y()->set_offset_bytes(1536); }},
      {"x: names arena 1 and device memory 1, allowed is one of them",
       [](v1::ForwardRequest& r) { r.mutable_x()->set_arena(1); }},
      {"x.device_memory: device memory 9 is not",
       [](v1::ForwardRequest& r) { r.mutable_x()->set_device_memory(9); }},
      {"alpha.device_memory: 1, allowed is an arena: the host works on it",
       [](v1::ForwardRequest& r) {
         r.mutable_alpha()->clear_arena();
         r.mutable_alpha()->set_device_memory(1);
       }},
      {"x: 6400 bytes do not fit device memory 1 of 5000 bytes",
       [](v1::ForwardRequest& r) { r.mutable_x()->set_shape(0, 100); }},
  };
  for (const Case& bad : cases) {
    CAPTURE(bad.text);
    v1::ForwardRequest request = client.DeviceForward();
    bad.spoil(request);
    const grpc::Status status = client.Call(request);
    CHECK_FALSE(status.ok());
    CHECK_THAT(status.error_message(), Catch::Contains("rank 0") && Catch::Contains(bad.text));
  }
  v1::ForwardRequest last = client.DeviceForward();
  last.mutable_x()->set_offset_bytes(4672);  // the last place there is
  last.mutable_y()->set_offset_bytes(0);
  CHECK(client.Call(last).ok());
}

TEST_CASE("an event that never fires ends the epoch in time", "[device_memory]") {
  ClientShares kept;  // until the worker has let go of it
  EngineWorker worker(On::kDevice, 1ms);
  DeviceClient client(worker);
  std::swap(client.memory, kept.memory);
  client.LoadExperts();
  client.FillPairs();
  REQUIRE(client.Import(kept.memory->handle(), 5000, client.device_uuid, &client.memory_id).ok());
  REQUIRE(client.ShareEvents(client.ready->handle(), client.device_uuid).ok());
  client.ready->Record();
  CheckRefused(client.Call(client.DeviceForward()), grpc::StatusCode::DEADLINE_EXCEEDED,
               "event of another process did not fire within 1 ms");
  worker.AwaitDead();
  CheckRefused(client.Call(client.DeviceForward()), grpc::StatusCode::UNAVAILABLE, "did not fire");
}

}  // namespace lrmoe::worker
