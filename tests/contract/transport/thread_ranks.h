// Ranks as threads of the test program.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/contract/transport/conformance.h"
#include "worker/transport/inproc.h"

namespace lrmoe::transport {

class ThreadRanks : public Ranks {
 public:
  using Decorate = std::function<std::unique_ptr<Transport>(std::unique_ptr<Transport>)>;
  explicit ThreadRanks(Decorate decorate = nullptr) : decorate_(std::move(decorate)) {}

  std::vector<int32_t> sizes() const override { return {1, 2, 3, 4, 8}; }

  std::vector<std::string> Run(int32_t size, const RankBody& body) override {
    auto transports = Create(size);
    if (transports.empty()) return {"the transports could not be created"};
    if (decorate_) {
      for (auto& transport : transports) transport = decorate_(std::move(transport));
    }
    std::vector<Expectations> expectations(size);
    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < size; ++rank) {
      threads.emplace_back([&, rank] { body(*transports[rank], expectations[rank]); });
    }
    for (std::thread& thread : threads) thread.join();
    std::vector<std::string> failures;
    for (int32_t rank = 0; rank < size; ++rank) {
      for (const std::string& failure : expectations[rank].failures()) {
        failures.push_back("rank " + std::to_string(rank) + ": " + failure);
      }
    }
    return failures;
  }

 protected:
  // One transport per rank; none when that is impossible.
  virtual std::vector<std::unique_ptr<Transport>> Create(int32_t size) { return CreateInprocGroup(size); }

 private:
  Decorate decorate_;
};

}  // namespace lrmoe::transport
