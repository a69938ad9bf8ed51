// What the CUDA device says when something is missing or fails, and that it leaves nothing behind.
#include <catch2/catch.hpp>
#include <chrono>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cuda/device.h"
#include "tests/unit/cuda_production/fresh.h"
#include "worker/backend.h"
#include "worker/transport/inproc.h"

namespace lrmoe::fake_cuda {
namespace {

using kernels::cuda::CreateCudaDevice;
using kernels::cuda::GemmPathRule;

// Values of CUDA's and cuBLAS' enumerations.
constexpr int kOutOfMemory = 2, kInvalidValue = 1, kIllegalAddress = 700, kBlasAllocation = 3,
              kBlasExecution = 13;

std::string Text(const absl::Status& status) {
  return std::string(status.message());
}

}  // namespace

TEST_CASE("without a driver or a device there is no CUDA device, and it says why", "[cuda][failures]") {
  const FreshMachine fresh;
  const kernels::cuda::Inventory all = LookForDevices();
  CHECK(all.built);
  CHECK(all.error.empty());
  REQUIRE(all.devices.size() == 8);
  CHECK(all.devices[7].compute_capability == 90);
  CHECK(all.devices[7].memory_bytes == int64_t{8} << 30);
  CHECK(all.devices[6].uuid != all.devices[7].uuid);
  absl::Status status = CreateCudaDevice(8).status();
  CHECK(status.code() == absl::StatusCode::kNotFound);
  CHECK_THAT(Text(status), Catch::Contains("ordinal is 8; allowed: 0..7"));
  SetDeviceCount(0);
  CHECK(LookForDevices().error == "cudaErrorNoDevice");
  status = CreateCudaDevice(0).status();
  CHECK(status.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Text(status), Catch::Contains("cudaErrorNoDevice"));
  RemoveDriver();
  CHECK(LookForDevices().driver_version == 0);
  CHECK(LookForDevices().error == "cudaErrorInsufficientDriver");
  status = CreateCudaDevice(0).status();
  CHECK(status.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(Text(status), Catch::Contains("cudaErrorInsufficientDriver"));
}

TEST_CASE("a driver without a function that is needed is refused by the function's name",
          "[cuda][failures]") {
  for (const char* function : {"cuMemMap", "cuDeviceGetUuid", "cuMemGetAddressRange"}) {
    const FreshMachine fresh;
    Fail(function, kMissing);
    const absl::Status status = CreateCudaDevice(0).status();
    CHECK(status.code() == absl::StatusCode::kFailedPrecondition);
    CHECK_THAT(Text(status), Catch::Contains(std::string("the driver has no ") + function));
  }
}

TEST_CASE("whatever fails in the start of a device is named, and nothing is left of it", "[cuda][failures]") {
  for (const auto& [function, error] : {std::pair{"cudaSetDevice", kIllegalAddress},
                                        {"cudaGetDeviceProperties", kInvalidValue},
                                        {"cudaStreamCreateWithFlags", kOutOfMemory},
                                        {"cudaGetDriverEntryPointByVersion", kInvalidValue},
                                        {"cuDeviceGet", kInvalidValue},
                                        {"cuDeviceGetUuid", kInvalidValue},
                                        {"cuMemGetAllocationGranularity", kInvalidValue},
                                        {"cudaEventCreateWithFlags", kOutOfMemory},
                                        {"cudaMalloc", kOutOfMemory},
                                        {"cublasCreate", kBlasAllocation},
                                        {"cublasSetStream", kBlasExecution},
                                        {"cublasSetWorkspace", kBlasExecution}})
    for (const int nth : {1, 2, 3}) {
      const FreshMachine fresh;
      Fail(function, error, nth);
      const absl::StatusOr<std::unique_ptr<kernels::Device>> device = CreateCudaDevice(3);
      CAPTURE(function, nth, Text(device.status()));
      if (nth == 1) CHECK_FALSE(device.ok());
      if (device.ok()) continue;  // so often it is not called
      CHECK_FALSE(Text(device.status()).empty());
      if (error == kOutOfMemory || error == kBlasAllocation)
        CHECK(device.status().code() == absl::StatusCode::kResourceExhausted);
      REQUIRE(CreateCudaDevice(3).ok());  // the next attempt finds nothing in its way
    }
}

TEST_CASE("memory that is not there is ResourceExhausted, and the device goes on", "[cuda][failures]") {
  const FreshMachine fresh;
  SetMemory(int64_t{200} << 20);
  auto device = CreateCudaDevice(0);
  REQUIRE(device.ok());
  auto memory = (*device)->Reserve(int64_t{1} << 30);  // addresses cost nothing
  REQUIRE(memory.ok());
  CHECK((*memory)->Commit(int64_t{1} << 20).ok());
  const absl::Status too_much = (*memory)->Commit(int64_t{1} << 29);
  CHECK(too_much.code() == absl::StatusCode::kResourceExhausted);
  CHECK_THAT(Text(too_much), Catch::Contains("allocating 535822336 bytes of device memory"));
  for (const char* function : {"cuMemMap", "cuMemSetAccess"}) {
    Fail(function, kOutOfMemory);
    CHECK((*memory)->Commit(int64_t{2} << 20).code() == absl::StatusCode::kResourceExhausted);
  }
  Fail("cuMemAddressReserve", kOutOfMemory);
  CHECK((*device)->Reserve(1).status().code() == absl::StatusCode::kResourceExhausted);
  Fail("cudaHostAlloc", kOutOfMemory);
  CHECK((*device)->AllocatePinned(1).status().code() == absl::StatusCode::kResourceExhausted);
  CHECK((*memory)->Commit(int64_t{2} << 20).ok());
  // A kernel, whose launch would report an error that somebody left behind.
  auto* const values = reinterpret_cast<float*>((*memory)->base());
  (*device)->Fill(values, 0, 400);
  CHECK((*device)->SquaredNorm(100, values) == 0);
  CHECK((*device)->Wait().ok());
}

TEST_CASE("memory goes when the work that uses it is done", "[cuda][failures]") {
  const FreshMachine fresh;
  auto device = CreateCudaDevice(0);
  REQUIRE(device.ok());
  for (int round = 0; round < 4; ++round) {
    auto memory = (*device)->Reserve(1000), other = (*device)->Reserve(1000);
    auto pinned = (*device)->AllocatePinned(1000);
    REQUIRE((*memory)->Commit(1000).ok());
    REQUIRE((*other)->Commit(1000).ok());
    (*device)->Fill((*memory)->base(), 1, 1000);
    (*device)->Copy((*other)->base(), (*memory)->base(), 1000);
    (*device)->Download((*pinned)->base(), (*other)->base(), 1000);
    if (round == 0) pinned->reset();
    if (round == 1) other->reset();
    if (round == 2) memory->reset();
  }
  CHECK((*device)->Wait().ok());
}

TEST_CASE("an error of a call on the stream ends the device and is named", "[cuda][failures]") {
  for (const char* function : {"cudaMemcpyAsync", "cudaMemsetAsync", "cudaStreamSynchronize"}) {
    const FreshMachine fresh;
    auto device = CreateCudaDevice(0);
    REQUIRE(device.ok());
    auto memory = (*device)->Reserve(1000);
    REQUIRE((*memory)->Commit(1000).ok());
    Fail(function, kIllegalAddress);
    std::vector<std::byte> host(1000);
    (*device)->Fill((*memory)->base(), 1, 1000);
    (*device)->Download(host.data(), (*memory)->base(), 1000);
    const absl::Status status = (*device)->Wait();
    CHECK(status.code() == absl::StatusCode::kInternal);
    CHECK_THAT(Text(status), Catch::Contains("cudaErrorIllegalAddress"));
    CHECK((*device)->Wait() == status);
  }
}

// Memory that goes when some of a call's GEMMs have begun.
TEST_CASE("a GEMM that fails leaves no other one behind in memory that goes", "[cuda][failures]") {
  for (const auto& [rule, function, error, nth] :
       {std::tuple{GemmPathRule::kStreams, "cublasGemmEx", kBlasExecution, 5},
        {GemmPathRule::kGrouped, "cublasGemmGroupedBatchedEx", kBlasExecution, 1},
        {GemmPathRule::kGrouped, "cudaMemcpyAsync", kIllegalAddress, 1},
        {GemmPathRule::kGrouped, "cudaMallocAsync", kOutOfMemory, 1}}) {
    CAPTURE(function);
    const FreshMachine fresh;
    auto device = CreateCudaDevice(0, rule);
    REQUIRE(device.ok());
    {
      auto memory = (*device)->Reserve(100000);
      REQUIRE((*memory)->Commit(100000).ok());
      auto* const values = reinterpret_cast<float*>((*memory)->base());
      std::vector<kernels::GemmGroup> groups;
      for (int64_t i = 0; i < 8; ++i)
        groups.push_back({.a = values, .b = values + 1024, .c = values + 2048 + 64 * i, .rows = 4});
      Fail(function, error, nth);
      const absl::Status status =
          (*device)->GroupedGemm(kernels::GemmKind::kForward, kernels::Type::kFp32, 16, 8, groups);
      CHECK_FALSE(status.ok());
      CHECK_FALSE(Text(status).empty());
    }
    CHECK_FALSE((*device)->Wait().ok());
  }
}

TEST_CASE("one rank needs no NCCL, and its exchanges reach device memory", "[cuda][failures]") {
  const FreshMachine fresh;
  auto device = MakeDevice(2);
  REQUIRE(device.ok());
  auto transport = ConnectDevices(std::move(transport::CreateInprocGroup(1)[0]), 2, std::chrono::seconds(60));
  REQUIRE(transport.ok());
  auto memory = (*device)->Reserve(200);
  REQUIRE((*memory)->Commit(200).ok());
  std::byte* const base = (*memory)->base();
  (*device)->Fill(base, 7, 100);
  REQUIRE((*device)->Wait().ok());
  const std::vector<int64_t> sizes{100};
  CHECK((*transport)
            ->AllToAllV({"rows", {}, After(std::chrono::seconds(60))}, {base, 100}, sizes, {base + 100, 100},
                        sizes)
            .ok());
  std::vector<std::byte> got(100);
  (*device)->Download(got.data(), base + 100, 100);
  REQUIRE((*device)->Wait().ok());
  CHECK(got == std::vector<std::byte>(100, std::byte{7}));
}

}  // namespace lrmoe::fake_cuda
