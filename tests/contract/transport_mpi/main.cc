// The conformance suite over MPI; started by mpirun, one process per rank. Every process runs the same test
// cases and agrees with the others about each outcome, so that all take the same path.
//   --lose-rank R  instead: the process of rank R is killed while the others wait for it.
//   --abort-job    instead: rank 0 ends the job with exit code 43 while the others wait.
//   --measure      instead: latency of the small operations and bandwidth of the exchange, one line of JSON
//   each.
#include <catch2/catch.hpp>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "common/check.h"
#include "tests/contract/transport/conformance.h"
#include "tests/support/run_tests.h"
#include "worker/transport/mpi.h"

namespace lrmoe::transport {
namespace {

MpiRuntime* runtime = nullptr;
Transport* agreement = nullptr;  // an epoch of its own, for the outcomes

Call Soon(absl::string_view operation) {
  return {operation, {}, After(std::chrono::seconds(60))};
}

class ProcessRanks : public Ranks {
 public:
  explicit ProcessRanks(const MpiOptions& options) : options_(options) {}

  std::vector<int32_t> sizes() const override { return {runtime->place().size}; }

  std::vector<std::string> Run(int32_t, const RankBody& body) override {
    auto transport = runtime->CreateTransport(options_);
    if (!transport.ok()) {
      std::fprintf(stderr, "%s\n", transport.status().ToString().c_str());
      runtime->AbortJob(1);
    }
    Expectations expectations;
    body(**transport, expectations);
    std::vector<std::string> failures = expectations.failures();
    int64_t total = static_cast<int64_t>(failures.size());
    const absl::Status status = agreement->AllReduce(Soon("outcome"), std::span(&total, 1), Reduction::kSum);
    if (!status.ok()) {
      std::fprintf(stderr, "%s\n", status.ToString().c_str());
      runtime->AbortJob(1);
    }
    if (total > 0 && failures.empty()) failures.push_back(std::to_string(total) + " failures on other ranks");
    return failures;
  }

 private:
  const MpiOptions options_;
};

TEST_CASE("mpi passes the conformance suite", "[transport]") {
  ProcessRanks ranks({});
  RunConformance(ranks);
}

TEST_CASE("mpi with a progress thread passes the conformance suite", "[transport]") {
  ProcessRanks ranks({.progress_thread = true});
  RunConformance(ranks);
}

TEST_CASE("mpi passes the conformance suite with messages in pieces", "[transport]") {
  ProcessRanks ranks({.max_message_bytes = 1000});
  RunConformance(ranks);
}

TEST_CASE("mpi knows its place", "[transport]") {
  const MpiPlace place = runtime->place();
  CHECK(place.local_size <= place.size);
  CHECK(place.local_rank < place.local_size);
  CHECK(agreement->rank() == place.rank);
  CHECK(agreement->size() == place.size);
  CHECK(StartMpi().status().code() == absl::StatusCode::kFailedPrecondition);
}

// Wants 5 GB per rank, so only when asked for.
TEST_CASE("mpi exchanges more than 2^31 bytes", "[.large]") {
  ProcessRanks ranks({});
  const std::vector<std::string> failures = ranks.Run(runtime->place().size, LargeExchange());
  for (const std::string& failure : failures) UNSCOPED_INFO(failure);
  CHECK(failures.empty());
}

// Returns the exit code; the process must not come to finalizing.
int LoseRank(int32_t lost) {
  if (runtime->place().rank == lost) std::raise(SIGKILL);
  const absl::Status status = agreement->Barrier({"alone", {.step = 1}, After(std::chrono::seconds(5))});
  std::fprintf(stderr, "noticed: %s\n", status.ToString().c_str());
  return absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status) ? 42 : 1;
}

double MicrosecondsPer(int repetitions, const std::function<absl::Status()>& operation) {
  for (int i = 0; i < repetitions / 10; ++i) LRMOE_CHECK(operation().ok());
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < repetitions; ++i) LRMOE_CHECK(operation().ok());
  const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - start;
  return elapsed.count() / repetitions;
}

void Measure() {
  Transport& t = *agreement;
  const int32_t n = t.size();
  auto report = [&](const char* name, int64_t bytes, double us) {
    if (t.rank() != 0) return;
    std::printf("{\"operation\": \"%s\", \"ranks\": %d, \"bytes\": %ld, \"us\": %.2f, \"gb_per_s\": %.3f}\n",
                name, n, static_cast<long>(bytes), us, static_cast<double>(bytes) / us / 1e3);
  };
  std::vector<std::byte> block(256), blocks(256 * n);
  std::vector<double> values(16);
  report("barrier", 0, MicrosecondsPer(3000, [&] { return t.Barrier(Soon("barrier")); }));
  report("all_gather", 256,
         MicrosecondsPer(3000, [&] { return t.AllGather(Soon("gather"), block, blocks); }));
  report("all_reduce", 128, MicrosecondsPer(3000, [&] {
           return t.AllReduce(Soon("reduce"), std::span<double>(values), Reduction::kSum);
         }));
  for (const int64_t part : {int64_t{1} << 12, int64_t{1} << 16, int64_t{1} << 20, int64_t{1} << 24}) {
    std::vector<std::byte> send(part * n, std::byte{1}), recv(part * n, std::byte{2});
    const std::vector<int64_t> sizes(n, part);
    const int repetitions = part > 1 << 22 ? 20 : 200;
    report("all_to_all_v", part * n, MicrosecondsPer(repetitions, [&] {
             return t.AllToAllV(Soon("exchange"), send, sizes, recv, sizes);
           }));
  }
}

int Run(int argc, char** argv) {
  auto started = StartMpi();
  if (!started.ok()) {
    std::fprintf(stderr, "%s\n", started.status().ToString().c_str());
    return 1;
  }
  runtime = started->get();
  auto transport = runtime->CreateTransport();
  if (!transport.ok()) runtime->AbortJob(1);
  agreement = transport->get();
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "--lose-rank") {
    const int code = LoseRank(std::atoi(argv[2]));
    std::_Exit(code);
  }
  if (mode == "--abort-job") {
    if (runtime->place().rank == 0) runtime->AbortJob(43);
    (void)agreement->Barrier(Soon("wait for the end"));
    std::_Exit(1);  // not reached: the job has ended
  }
  int failed = 0;
  if (mode == "--measure") {
    Measure();
  } else {
    failed = test::RunTests(argc, argv);
  }
  transport->reset();
  // The newest epoch decides whether MPI is finalized: it must be a live one.
  auto last = runtime->CreateTransport();
  if (!last.ok() || !(*last)->Barrier(Soon("end")).ok()) runtime->AbortJob(1);
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace lrmoe::transport

int main(int argc, char** argv) {
  return lrmoe::transport::Run(argc, argv);
}
