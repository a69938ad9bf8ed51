// The conformance suite of the transport contract: written once, run over every implementation.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "worker/transport/transport.h"

namespace lrmoe::transport {

// Collects what went wrong on one rank; Catch2's assertions may only be used by one thread.
class Expectations {
 public:
  void Check(bool condition, const std::string& what) {
    if (!condition) failures_.push_back(what);
  }
  void Ok(const absl::Status& status, const std::string& what) {
    Check(status.ok(), what + ": " + status.ToString());
  }
  void Code(const absl::Status& status, absl::StatusCode code, const std::string& what) {
    Check(status.code() == code,
          what + ": expected " + absl::StatusCodeToString(code) + ", got " + status.ToString());
  }
  void Contains(const absl::Status& status, const std::string& part) {
    Check(std::string(status.message()).find(part) != std::string::npos,
          "\"" + part + "\" is missing in: " + status.ToString());
  }
  const std::vector<std::string>& failures() const { return failures_; }

 private:
  std::vector<std::string> failures_;
};

using RankBody = std::function<void(Transport&, Expectations&)>;

// Runs bodies on the ranks of fresh epochs.
class Ranks {
 public:
  virtual ~Ranks() = default;
  // The group sizes this implementation can be asked for.
  virtual std::vector<int32_t> sizes() const = 0;
  // Runs `body` on every rank of a new epoch of `size` ranks and returns the failures of all of them. No
  // transport is destroyed before all bodies are done.
  virtual std::vector<std::string> Run(int32_t size, const RankBody& body) = 0;
};

// One deterministic part of the contract; `seed` varies the random ones.
struct ConformanceCase {
  std::string name;
  std::function<RankBody(uint64_t seed)> body;
  int32_t smallest_size = 1;
  int32_t repetitions = 1;  // with different seeds
};
const std::vector<ConformanceCase>& ConformanceCases();

// More than 2^31 bytes from each rank to the next, so that offsets need 64 bits; wants 5 GB per rank.
RankBody LargeExchange();

// All cases over all sizes, with Catch2; the rest of the suite needs no test framework.
void RunConformance(Ranks& ranks);

}  // namespace lrmoe::transport
