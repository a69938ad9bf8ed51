// The job goes on when the disk does not.
#include <signal.h>
#include <sys/resource.h>

#include "tests/unit/controller_store/fixture.h"

namespace lrmoe::store {
namespace {

// While it lives, files of this process cannot grow beyond `bytes`: writing fails as on a bad disk.
class SmallFiles {
 public:
  explicit SmallFiles(uint64_t bytes) {
    signal(SIGXFSZ, SIG_IGN);
    REQUIRE(getrlimit(RLIMIT_FSIZE, &before_) == 0);
    rlimit limit = before_;
    limit.rlim_cur = bytes;
    REQUIRE(setrlimit(RLIMIT_FSIZE, &limit) == 0);
  }
  ~SmallFiles() { setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_{};
};

TEST_CASE("store: a disk that fails is told of, counted, and used again when it works") {
  TemporaryDirectory directory;
  Run run(directory.state());
  REQUIRE(run.status.ok());
  const uint64_t first = run.Add(Made(0)).number;
  CHECK(run.Settled().lost == 0);
  {
    SmallFiles small(64 << 10);
    int64_t step = 1;
    while (run.Settled().error.empty()) {
      REQUIRE(step < 1000);
      for (int i = 0; i < 50; ++i) run.Add(Made(step++));
    }
    const StoreState state = run.store->state();
    CHECK_THAT(state.error, Catch::Contains("File too large") || Catch::Contains("full"));
    CHECK(state.lost > 0);
    Policy policy;
    policy.seed = 12;
    run.store->SetPolicy(policy);
    run.store->SetEpoch(SomeEpoch(9));
    run.Add(Made(step));
    CHECK(run.Settled().lost > state.lost);
  }
  // Policy and epoch are tried again; a report of a plan that was lost is lost as well.
  run.AddReport(0, Report(*All(run.history).front(), 1));
  const Deadline deadline = After(kPatience);
  while (!run.Settled().error.empty() && std::chrono::steady_clock::now() < deadline)
    std::this_thread::yield();
  const StoreState over = run.Settled();
  CHECK(over.error.empty());
  const uint64_t last = run.Add(Made(5000)).number;
  REQUIRE(run.Close().ok());
  CHECK(run.store->state().lost == over.lost);

  Run after(directory.state());
  REQUIRE(after.status.ok());
  CHECK(after.policy.seed == 12);
  CHECK(after.restored.epoch == SomeEpoch(9));
  const auto records = All(after.history);
  CHECK(records.front()->number == last);
  CHECK(records.back()->number == first);
  CHECK(records.size() + static_cast<size_t>(over.lost) == last + 1);  // all plans, and the one report
  CHECK(after.history.Add(Made(5001)).number == last + 1);
}

TEST_CASE("store: a disk that is full at the start is an error, not a surprise later") {
  TemporaryDirectory directory;
  std::filesystem::create_directory(directory.state());
  SmallFiles small(4096);
  const Run run(directory.state());
  CHECK_THAT(std::string(run.status.message()), Catch::Contains("lrmoe.db cannot be used: disk I/O error"));
}

TEST_CASE("store: the queue has limits, in records and in bytes") {
  for (const StoreOptions& options :
       {StoreOptions{.max_waiting = 10}, StoreOptions{.max_waiting_bytes = 10'000},
        StoreOptions{.max_waiting = 0}}) {
    TemporaryDirectory directory;
    Run run(directory.state(), {}, 100'000, options);
    REQUIRE(run.status.ok());
    int64_t added = 0;
    while (run.store->state().lost == 0) {  // faster than any disk
      REQUIRE(added < 50'000);
      run.Add(Made(added++));
    }
    CHECK_THAT(run.store->state().error,
               Catch::Contains("the disk is too slow: ") && Catch::Contains(" wait for it"));
    CHECK(run.store->state().waiting <= options.max_waiting);
    const int64_t lost = run.Settled().lost;
    if (options.max_waiting == 0) continue;
    run.Add(Made(added++));
    REQUIRE(run.Close().ok());
    CHECK(run.store->state().error.empty());  // the trouble is over
    CHECK(run.store->state().lost == lost);
    const Run after(directory.state(), {}, 100'000);
    CHECK(static_cast<int64_t>(after.history.num_kept()) == added - lost);
    CHECK(All(after.history).front()->number == static_cast<uint64_t>(added));
  }
}

}  // namespace
}  // namespace lrmoe::store
