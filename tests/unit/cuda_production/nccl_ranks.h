// Ranks as threads of the test program, each with a device of its own, over NCCL.
#pragma once

#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "tests/contract/transport/thread_ranks.h"
#include "worker/transport/inproc.h"
#include "worker/transport/nccl.h"

namespace lrmoe::fake_cuda {

using Transports = std::vector<std::unique_ptr<transport::Transport>>;

// What each rank gets, by rank; `device_of` gives a rank's device.
inline std::vector<absl::StatusOr<std::unique_ptr<transport::Transport>>> ConnectAll(
    int32_t size, const transport::NcclOptions& options,
    const std::function<int32_t(int32_t rank)>& device_of) {
  Transports controls = transport::CreateInprocGroup(size);
  std::vector<absl::StatusOr<std::unique_ptr<transport::Transport>>> connected(size);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      transport::NcclOptions own = options;
      own.device = device_of(rank);
      connected[rank] = transport::CreateNcclTransport(std::move(controls[rank]), own);
    });
  for (std::thread& thread : threads) thread.join();
  return connected;
}

// One rank per device; none when one of them could not connect.
inline Transports NcclTransports(int32_t size, bool stage_host_buffers) {
  Transports transports;
  for (auto& connected :
       ConnectAll(size, {.stage_host_buffers = stage_host_buffers}, [](int32_t rank) { return rank; })) {
    if (!connected.ok()) return {};
    transports.push_back(*std::move(connected));
  }
  return transports;
}

class NcclRanks : public transport::ThreadRanks {
 public:
  explicit NcclRanks(bool stage_host_buffers, std::vector<int32_t> sizes = {})
      : stage_host_buffers_(stage_host_buffers), sizes_(std::move(sizes)) {}
  std::vector<int32_t> sizes() const override { return sizes_; }

 protected:
  Transports Create(int32_t size) override { return NcclTransports(size, stage_host_buffers_); }

 private:
  const bool stage_host_buffers_;
  const std::vector<int32_t> sizes_;  // for the conformance suite
};

}  // namespace lrmoe::fake_cuda
