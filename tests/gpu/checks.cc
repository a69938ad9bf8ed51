#include "tests/gpu/checks.h"

#include <algorithm>
#include <cstdio>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/device.h"
#include "tests/contract/transport/thread_ranks.h"
#include "tests/support/device/engine_checks.h"
#include "worker/transport/inproc.h"
#include "worker/transport/nccl.h"

namespace lrmoe::gpu {
namespace {

using kernels::cuda::GemmPathRule;
using testing::CheckResult;
using testing::CheckSize;

class LoopbackRanks : public transport::ThreadRanks {
 public:
  std::vector<int32_t> sizes() const override { return {1, 2, 4}; }

 protected:
  std::vector<std::unique_ptr<transport::Transport>> Create(int32_t size) override { return Loopback(size); }
};

// One rank per device, host buffers staged so that NCCL carries everything.
class NcclRanks : public transport::ThreadRanks {
 public:
  explicit NcclRanks(int32_t devices) : devices_(devices) {}
  std::vector<int32_t> sizes() const override {
    std::vector<int32_t> sizes;
    for (int32_t size = 1; size <= devices_; size *= 2) sizes.push_back(size);
    return sizes;
  }

 protected:
  std::vector<std::unique_ptr<transport::Transport>> Create(int32_t size) override {
    auto controls = transport::CreateInprocGroup(size);
    std::vector<std::unique_ptr<transport::Transport>> transports(size);
    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < size; ++rank)
      threads.emplace_back([&, rank] {
        auto created = transport::CreateNcclTransport(std::move(controls[rank]),
                                                      {.device = rank, .stage_host_buffers = true});
        if (created.ok())
          transports[rank] = *std::move(created);
        else
          std::fprintf(stderr, "NCCL: %s\n", std::string(created.status().message()).c_str());
      });
    for (std::thread& thread : threads) thread.join();
    for (const auto& transport : transports)
      if (transport == nullptr) return {};
    return transports;
  }

 private:
  const int32_t devices_;
};

CheckResult Conformance(const std::string& name, transport::Ranks& ranks) {
  CheckResult result{name, 0, 0, ""};
  for (const transport::ConformanceCase& test : transport::ConformanceCases())
    for (const int32_t size : ranks.sizes()) {
      if (size < test.smallest_size) continue;
      for (int32_t seed = 0; seed < test.repetitions; ++seed) {
        ++result.cases;
        const std::vector<std::string> failures = ranks.Run(size, test.body(static_cast<uint64_t>(seed)));
        if (!failures.empty() && result.failure.empty())
          result.failure = absl::StrCat(test.name, ", ", size, " ranks: ", failures.front());
      }
    }
  return result;
}

void Take(const std::vector<CheckResult>& results, const std::string& prefix, std::vector<CheckResult>* all) {
  for (CheckResult result : results) {
    result.name = prefix + result.name;
    std::printf("%-52s %6lld cases  worst %.1e  %s%s\n", result.name.c_str(),
                static_cast<long long>(result.cases), result.worst,
                result.failure.empty() ? "ok" : "FAILED: ", result.failure.c_str());
    all->push_back(std::move(result));
  }
  std::fflush(stdout);
}

CheckResult CouldNotStart(const std::string& name, const absl::Status& status) {
  return {name, 1, 0, std::string(status.message())};
}

std::string ToJson(const std::vector<CheckResult>& results) {
  std::vector<std::string> items;
  for (const CheckResult& r : results)
    items.push_back(Object({"\"name\": " + Quoted(r.name), absl::StrCat("\"cases\": ", r.cases),
                            "\"worst\": " + Number(r.worst), "\"failure\": " + Quoted(r.failure)}));
  return Array(items);
}

}  // namespace

std::vector<std::unique_ptr<transport::Transport>> Loopback(int32_t num_ranks) {
  return transport::CreateInprocGroup(num_ranks, kernels::cuda::CopyBetweenPlaces);
}

bool RunChecks(CheckSize size, JsonMembers* json) {
  std::vector<CheckResult> all;
  for (const auto& [rule, name] :
       {std::pair{GemmPathRule::kStreams, "streams: "}, {GemmPathRule::kGrouped, "grouped call: "}}) {
    auto device = kernels::cuda::CreateCudaDevice(0, rule);
    if (!device.ok())
      Take({CouldNotStart("device", device.status())}, name, &all);
    else
      Take(testing::CheckDevice(**device, size, 1), name, &all);
  }
  auto device = kernels::cuda::CreateCudaDevice(0);
  if (!device.ok())
    Take({CouldNotStart("device", device.status())}, "", &all);
  else
    Take(testing::CheckPairs(**device, size, 1), "", &all);

  testing::EngineDevice engine{[](int32_t) { return kernels::cuda::CreateCudaDevice(0); }, Loopback,
                               size == CheckSize::kLarge ? 16 : 1};
  Take(testing::CheckLayers(engine,
                            size == CheckSize::kLarge ? std::vector<int32_t>{1, 4} : std::vector<int32_t>{2}),
       "engine: ", &all);
  if (size == CheckSize::kLarge) {
    Take({CheckIpc()}, "", &all);
    Take({testing::CheckCriteria(engine), testing::CheckRandomLayers(engine, 25, 1),
          testing::CheckSteps(engine)},
         "engine: ", &all);
    LoopbackRanks loopback;
    Take({Conformance("conformance over loopback", loopback)}, "", &all);
    NcclRanks nccl(static_cast<int32_t>(kernels::cuda::TakeInventory().devices.size()));
    Take({Conformance("conformance over NCCL", nccl)}, "", &all);
  }
  json->push_back("\"checks\": " + ToJson(all));
  return std::all_of(all.begin(), all.end(),
                     [](const CheckResult& r) { return r.failure.empty() && r.cases > 0; });
}

}  // namespace lrmoe::gpu
