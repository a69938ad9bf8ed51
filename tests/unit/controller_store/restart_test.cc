// One controller after another on the same directory.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/unit/controller_store/fixture.h"

namespace lrmoe::store {
namespace {

TEST_CASE("store: a fresh directory is made, private, and its end leaves one file and the lock") {
  TemporaryDirectory directory;
  Policy configured;
  configured.seed = 5;
  Run run(directory.state(), configured);
  REQUIRE(run.status.ok());
  CHECK(run.policy == configured);
  CHECK(run.restored.epoch == core::EpochRecord{});
  CHECK(run.restored.next_epoch == Epoch{1});
  CHECK(run.history.num_kept() == 0);
  CHECK(std::filesystem::status(directory.state()).permissions() == std::filesystem::perms::owner_all);
  CHECK(run.store->state().directory == directory.state());
  CHECK(run.Close().ok());
  CHECK(run.Close().ok());  // again does nothing
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(directory.state()))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  CHECK(names == std::vector<std::string>{"lock", "lrmoe.db"});
}

TEST_CASE("store: everything is as it was after an orderly end") {
  TemporaryDirectory directory;
  Run before(directory.state());
  REQUIRE(before.status.ok());
  for (int64_t step = 0; step < 50; ++step) {
    before.Add(Made(step, 0));
    before.Add(Made(step, 1));
    if (step % 10 == 3) before.Add(Failed(step));
    for (int32_t rank = 0; rank < 2; ++rank) before.AddReport(rank, Report(Made(step, 1), 1.0 + rank));
  }
  before.AddReport(1, Report(Made(49, 1), 8.5));  // replaces
  before.Add(Made(0, 0));                         // planned again: two records of one invocation
  before.AddReport(0, Report(Made(0, 0), 2.5));
  core::EpochRecord running = SomeEpoch();
  running.state = core::EpochState::kRunning;
  before.store->SetEpoch(running);
  before.store->SetEpoch(SomeEpoch());
  REQUIRE(before.Close().ok());
  before.store->SetPolicy({});  // not taken any more

  Run after(directory.state());
  REQUIRE(after.status.ok());
  CheckSame(before.history, after.history);
  CHECK(after.history.num_made() == 101);
  CHECK(after.history.num_infeasible() == 5);
  CHECK(after.restored.epoch == SomeEpoch());
  CHECK(after.restored.next_epoch == Epoch{4});
  CHECK(after.Add(Made(51)).number == 107);
  REQUIRE(after.Close().ok());

  Run third(directory.state());
  CheckSame(after.history, third.history);
}

TEST_CASE("store: the disk keeps what the history keeps") {
  TemporaryDirectory directory;
  Run before(directory.state(), {}, 10);
  for (int64_t step = 0; step < 1000; ++step) {
    before.Add(Made(step));
    before.AddReport(0, Report(Made(step), 1));
  }
  REQUIRE(before.Close().ok());
  Run same(directory.state(), {}, 10);
  CheckSame(before.history, same.history);
  REQUIRE(same.Close().ok());
  Run wider(directory.state(), {}, 1000);
  CHECK(wider.history.num_kept() == 10);  // no more than that was there
  REQUIRE(wider.Close().ok());
  Run narrower(directory.state(), {}, 3);
  CHECK(narrower.history.num_kept() == 3);
  CHECK(narrower.history.Find({999, 0, 1})->number == 1000);
  CHECK(narrower.history.num_made() == 1000);
  narrower.Add(Made(1000));
  REQUIRE(narrower.Close().ok());
  Run last(directory.state());
  CHECK(last.history.num_kept() == 3);
}

// Adds without end, and tells through `ready` that much is written.
[[noreturn]] void RunUntilKilled(const std::string& directory, int ready) {
  Run run(directory);
  run.store->SetEpoch(SomeEpoch(5));
  Policy policy;
  policy.seed = 77;
  run.store->SetPolicy(policy);
  bool told = false;
  for (int64_t step = 0;; ++step) {
    run.Add(Made(step));
    run.AddReport(0, Report(Made(step), 1));
    if (told || step < 500) continue;
    if (run.Settled().lost == 0) told = write(ready, "x", 1) == 1;
  }
}

TEST_CASE("store: a controller that is killed loses at most its last batch") {
  TemporaryDirectory directory;
  uint64_t number = 0;
  for (int round = 0; round < 3; ++round) {
    int ready[2];
    REQUIRE(pipe(ready) == 0);
    const pid_t child = fork();
    if (child == 0) RunUntilKilled(directory.state(), ready[1]);
    REQUIRE(child > 0);
    close(ready[1]);
    char told = 0;
    CHECK(read(ready[0], &told, 1) == 1);
    close(ready[0]);
    kill(child, SIGKILL);
    CHECK(waitpid(child, nullptr, 0) == child);

    Run after(directory.state());
    REQUIRE(after.status.ok());
    const auto records = All(after.history);
    REQUIRE(records.size() >= 500);
    for (size_t i = 1; i < records.size(); ++i) CHECK(records[i]->number + 1 == records[i - 1]->number);
    CHECK(records.front()->number >= number + 501);
    number = records.front()->number;
    CHECK(after.history.num_made() >= static_cast<int64_t>(number));
    CHECK(after.restored.epoch == SomeEpoch(5));
    CHECK(after.restored.next_epoch == Epoch{22});  // numbers that may have been used are skipped
    CHECK(after.policy.seed == 77);
    REQUIRE(after.Close().ok());
  }
  Run orderly(directory.state());
  CHECK(orderly.restored.next_epoch == Epoch{6});
}

TEST_CASE("store: an end that nobody waits for comes by itself") {
  TemporaryDirectory directory;
  {
    Run run(directory.state());
    for (int64_t step = 0; step < 2000; ++step) run.Add(Made(step));
    const absl::Status closed = run.store->Close(Deadline::min());  // no time at all
    if (!closed.ok()) {
      CHECK(closed.code() == absl::StatusCode::kDeadlineExceeded);
      CHECK_THAT(std::string(closed.message()), Catch::Contains("plans and reports are not written"));
    }
  }
  Run after(directory.state(), {}, 5000);
  CHECK(after.history.num_kept() == 1000);
}

}  // namespace
}  // namespace lrmoe::store
