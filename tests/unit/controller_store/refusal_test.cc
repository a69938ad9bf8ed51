// What is no state directory of ours is refused, and left as it is.
#include <sqlite3.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/unit/controller_store/fixture.h"

namespace lrmoe::store {
namespace {

using Catch::Contains;

void Execute(const std::string& path, const char* sql) {
  sqlite3* database = nullptr;
  REQUIRE(sqlite3_open(path.c_str(), &database) == SQLITE_OK);
  CHECK(sqlite3_exec(database, sql, nullptr, nullptr, nullptr) == SQLITE_OK);
  sqlite3_close(database);
}

// A directory with 200 plans, closed in order.
void Fill(const TemporaryDirectory& directory) {
  Run run(directory.state());
  REQUIRE(run.status.ok());
  for (int64_t step = 0; step < 200; ++step) run.Add(Made(step));
  run.store->SetEpoch(SomeEpoch());
  REQUIRE(run.Close().ok());
}

std::string Refusal(const TemporaryDirectory& directory) {
  const std::string before = ReadFile(directory.database());
  const Run run(directory.state());
  CHECK_FALSE(run.status.ok());
  CHECK(ReadFile(directory.database()) == before);
  return std::string(run.status.message());
}

TEST_CASE("store: files of others are refused") {
  TemporaryDirectory directory;
  std::filesystem::create_directory(directory.state());
  for (const std::string& text :
       {std::string("notes of last week\n"), std::string(), std::string(5000, '\0')}) {
    WriteFile(directory.database(), text);
    CHECK_THAT(Refusal(directory), Contains(directory.database() + " is no database of lrmoe-controller") &&
                                       Contains("left as it is"));
  }
  std::filesystem::remove(directory.database());
  Execute(directory.database(), "CREATE TABLE mine(x); INSERT INTO mine VALUES(1)");
  CHECK_THAT(Refusal(directory), Contains("is no database of lrmoe-controller"));
}

TEST_CASE("store: a newer format is refused") {
  TemporaryDirectory directory;
  Fill(directory);
  Execute(directory.database(), "PRAGMA user_version = 7");
  CHECK_THAT(Refusal(directory), Contains("has format 7; this version reads formats up to 1"));
}

TEST_CASE("store: a damaged file is refused, wherever the damage is") {
  TemporaryDirectory directory;
  Fill(directory);
  const std::string sound = ReadFile(directory.database());
  REQUIRE(sound.size() > 40000);
  const auto refusal_of = [&](std::string text) {
    WriteFile(directory.database(), text);
    return Refusal(directory);
  };
  CHECK_THAT(refusal_of(sound.substr(0, sound.size() / 2)),
             Contains("is damaged") && Contains("move it away"));
  for (const size_t at : {size_t{4096}, sound.size() / 4096 / 2 * 4096}) {
    std::string text = sound;
    text.replace(at, 4096, std::string(4096, '\xee'));
    CHECK_THAT(refusal_of(text), Contains("is damaged"));
  }
  WriteFile(directory.database(), sound);
  CHECK(Run(directory.state()).history.num_kept() == 200);

  WriteFile(directory.database(), sound);
  Execute(directory.database(), "UPDATE plans SET plan = x'ffff' WHERE number = 7");
  CHECK_THAT(Refusal(directory), Contains("is damaged (a plan cannot be read)"));
  Execute(directory.database(), "UPDATE plans SET plan = x'' WHERE number = 7");
  CHECK_THAT(Refusal(directory), Contains("is damaged (a plan is not valid: "));
  WriteFile(directory.database(), sound);
  Execute(directory.database(), "UPDATE controller SET epoch_state = 9");
  CHECK_THAT(Refusal(directory), Contains("is damaged (epoch_state is 9)"));
  WriteFile(directory.database(), sound);
  Execute(directory.database(), "DROP TABLE reports");
  CHECK_THAT(Refusal(directory), Contains("no such table: reports"));
}

TEST_CASE("store: a log without its database is not taken for a new one's") {
  TemporaryDirectory directory;
  Fill(directory);
  std::filesystem::rename(directory.database(), directory.database() + "-wal");
  const Run run(directory.state());
  CHECK_THAT(std::string(run.status.message()), Contains("there is only " + directory.database() + "-wal"));
  CHECK_FALSE(std::filesystem::exists(directory.database()));
}

TEST_CASE("store: what a controller that died while making the database left is no obstacle") {
  TemporaryDirectory directory;
  std::filesystem::create_directory(directory.state());
  WriteFile(directory.database() + ".new", "half");
  WriteFile(directory.database() + ".new-journal", "half");
  CHECK(Run(directory.state()).status.ok());
  CHECK_FALSE(std::filesystem::exists(directory.database() + ".new"));
}

TEST_CASE("store: one controller per directory, and the other one is named") {
  TemporaryDirectory directory;
  Run first(directory.state());
  REQUIRE(first.status.ok());
  first.Add(Made(1));
  const Run second(directory.state());
  CHECK(second.status.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(std::string(second.status.message()),
             Contains("state_dir is \"" + directory.state() + "\"; another lrmoe-controller uses it (pid " +
                      std::to_string(getpid()) + " on "));
  REQUIRE(first.Close().ok());
  const Run third(directory.state());
  CHECK(third.status.ok());
  CHECK(third.history.num_kept() == 1);
}

TEST_CASE("store: a directory that cannot be had") {
  TemporaryDirectory directory;
  const auto refusal = [](const std::string& path) { return std::string(Run(path).status.message()); };
  CHECK_THAT(refusal(directory.path() + "/a/b"),
             Contains("/a/b\"; it cannot be made: No such file or directory"));
  WriteFile(directory.path() + "/file", "");
  CHECK_THAT(refusal(directory.path() + "/file"), Contains("/file\"; it is no directory"));
  std::filesystem::create_directory(directory.state());
  std::filesystem::create_directory(directory.state() + "/lock");
  CHECK_THAT(refusal(directory.state()), Contains("/state/lock cannot be written: Is a directory"));
  std::filesystem::remove(directory.state() + "/lock");
  std::filesystem::permissions(directory.state(),
                               std::filesystem::perms::owner_read | std::filesystem::perms::owner_exec);
  if (geteuid() != 0) {
    CHECK_THAT(refusal(directory.state()), Contains("/state/lock cannot be written: Permission denied"));
    return;
  }
  // Root may write anywhere, so somebody else tries.
  const pid_t child = fork();
  if (child == 0) {
    const bool other = chmod(directory.path().c_str(), 0755) == 0 && setuid(65534) == 0;
    _exit(other && refusal(directory.state()).find("Permission denied") != std::string::npos ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
}

}  // namespace
}  // namespace lrmoe::store
