// The janitor with real processes: whoever is killed, nothing is left behind.
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "worker/launcher/environment.h"
#include "worker/launcher/janitor.h"

namespace lrmoe::launcher {
namespace {

constexpr int kMaxWaitMs = 20000;

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    char name[] = "/tmp/lrmoe-test-XXXXXX";
    REQUIRE(mkdtemp(name) != nullptr);
    path_ = name;
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::vector<std::string> Shell(const std::string& script) {
  return {"sh", "-c", script};
}

std::vector<std::string> Environment(const std::string& socket = "/s") {
  return TrainerEnvironment(environ,
                            {.socket = socket, .rank = 1, .world_size = 2, .master_addr = "127.0.0.1"});
}

// A process that is not ours to wait for. Gone means: it exited, and nobody but init may still have to reap
// it.
struct Watched {
  explicit Watched(pid_t process) : pid(process), fd(static_cast<int>(syscall(SYS_pidfd_open, process, 0))) {}
  ~Watched() {
    if (fd >= 0) close(fd);
  }
  bool EndsInTime() const {
    if (fd < 0) return errno == ESRCH;
    pollfd wait{fd, POLLIN, 0};
    return poll(&wait, 1, kMaxWaitMs) == 1;
  }
  const pid_t pid;
  const int fd;
};

// Waits for a line in a FIFO: how a launched shell says that it is there.
std::vector<pid_t> ReadPids(const std::string& fifo) {
  std::ifstream in(fifo);
  std::string line;
  REQUIRE(std::getline(in, line));
  std::istringstream words(line);
  std::vector<pid_t> pids;
  for (pid_t pid; words >> pid;) pids.push_back(pid);
  return pids;
}

std::string MakeFifo(const TemporaryDirectory& directory) {
  const std::string path = directory.path() + "/fifo";
  REQUIRE(mkfifo(path.c_str(), 0600) == 0);
  return path;
}

TEST_CASE("the training process's environment is torchrun's, without the MPI launcher's", "[launcher]") {
  const char* inherited[] = {"PATH=/bin",
                             "OMPI_COMM_WORLD_RANK=1",
                             "PMIX_RANK=1",
                             "PMI_RANK=1",
                             "SLURM_PROCID=1",
                             "SLURM_JOB_ID=7",
                             "SLURM_STEP_ID=0",
                             "RANK=99",
                             "LRMOE_SOCKET=/old",
                             "EMPTY=",
                             "OMPIX=kept",
                             "PRTE_MCA_x=1",
                             "SLURM_NTASKS=2",
                             "WEIRD",
                             nullptr};
  const auto environment = TrainerEnvironment(inherited, {.socket = "/run/x/1.sock",
                                                          .rank = 1,
                                                          .world_size = 4,
                                                          .local_rank = 1,
                                                          .local_world_size = 2,
                                                          .master_addr = "head",
                                                          .master_port = 1234});
  CHECK(environment == std::vector<std::string>{"PATH=/bin", "SLURM_JOB_ID=7", "EMPTY=", "OMPIX=kept",
                                                "WEIRD", "LRMOE_SOCKET=/run/x/1.sock", "RANK=1",
                                                "WORLD_SIZE=4", "LOCAL_RANK=1", "LOCAL_WORLD_SIZE=2",
                                                "MASTER_ADDR=head", "MASTER_PORT=1234"});
}

TEST_CASE("a training process runs with its environment and its status comes back", "[launcher]") {
  TemporaryDirectory directory;
  setenv("OMPI_COMM_WORLD_RANK", "1", 1);
  auto janitor = Janitor::Start(Shell("env > " + directory.path() + "/env; exit 7"));
  REQUIRE(janitor.ok());
  REQUIRE((*janitor)->Launch(Environment("/tmp/x.sock")).ok());
  unsetenv("OMPI_COMM_WORLD_RANK");
  const auto started = (*janitor)->ReadEvent();
  REQUIRE(std::holds_alternative<TrainerStarted>(started));
  const auto event = (*janitor)->ReadEvent();
  const auto* ended = std::get_if<TrainerEnded>(&event);
  REQUIRE(ended != nullptr);
  CHECK(ExitStatus(*ended) == 7);
  CHECK(Describe(*ended) == "exited with status 7");
  std::ifstream file(directory.path() + "/env");
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  CHECK(absl::StrContains(text, "LRMOE_SOCKET=/tmp/x.sock\n"));
  CHECK(absl::StrContains(text, "RANK=1\n"));
  CHECK(!absl::StrContains(text, "OMPI_"));
}

TEST_CASE(
    "the training process leads a group of its own, with default signals and none of the worker's files",
    "[launcher]") {
  TemporaryDirectory directory;
  const int fd = open("/dev/null", O_RDONLY);  // not close-on-exec, as MPI's may be
  auto janitor = Janitor::Start(Shell("ls /proc/self/fd | wc -l > " + directory.path() +
                                      "/n; grep SigIgn /proc/self/status >> " + directory.path() +
                                      "/n; cut -d' ' -f5 /proc/$$/stat >> " + directory.path() +
                                      "/n; echo $$ >> " + directory.path() + "/n"));
  const int later = open("/dev/null", O_RDONLY);
  REQUIRE((*janitor)->Launch(Environment()).ok());
  (void)(*janitor)->ReadEvent();
  (void)(*janitor)->ReadEvent();
  close(fd);
  close(later);
  std::ifstream file(directory.path() + "/n");
  int files = 0, group = 0, pid = 0;
  std::string label, ignored;
  file >> files >> label >> ignored >> group >> pid;
  CHECK(files <= 5);  // 0, 1, 2, the pipe of wc, and the directory ls reads
  CHECK(ignored == "0000000000000000");
  CHECK(group == pid);
}

TEST_CASE("a command that does not exist is said to be so", "[launcher]") {
  auto janitor = Janitor::Start({"/nonexistent/program", "x"});
  REQUIRE((*janitor)->Launch(Environment()).ok());
  const auto event = (*janitor)->ReadEvent();
  const auto* failed = std::get_if<TrainerNotStarted>(&event);
  REQUIRE(failed != nullptr);
  CHECK(failed->error == ENOENT);
}

TEST_CASE("signals reach the training process", "[launcher]") {
  TemporaryDirectory directory;
  const std::string fifo = MakeFifo(directory);
  auto janitor =
      Janitor::Start(Shell("trap 'exit 5' TERM; echo $$ > " + fifo + "; while :; do sleep 0.01; done"));
  REQUIRE((*janitor)->Launch(Environment()).ok());
  (void)(*janitor)->ReadEvent();
  (void)ReadPids(fifo);
  (*janitor)->Signal(SIGTERM);
  const auto event = (*janitor)->ReadEvent();
  const auto* ended = std::get_if<TrainerEnded>(&event);
  REQUIRE(ended != nullptr);
  CHECK(ExitStatus(*ended) == 5);
}

TEST_CASE("a killed training process is named with its signal", "[launcher]") {
  auto janitor = Janitor::Start({"sleep", "1000"});
  REQUIRE((*janitor)->Launch(Environment()).ok());
  const auto started = (*janitor)->ReadEvent();
  kill(std::get<TrainerStarted>(started).pid, SIGKILL);
  const auto event = (*janitor)->ReadEvent();
  const auto* ended = std::get_if<TrainerEnded>(&event);
  REQUIRE(ended != nullptr);
  CHECK(Describe(*ended) == "was killed by signal 9 (Killed)");
  CHECK(ExitStatus(*ended) == 137);
}

// A tree: a child in the group, one in a session of its own, and that one's child, whose parent exits at
// once.
std::string Tree(const std::string& fifo) {
  return absl::StrCat(
      "sleep 1000 & a=$!; setsid sleep 1000 & b=$!; c=$(sh -c 'setsid sleep 1000 >/dev/null & echo $!'); "
      "echo $$ $a $b $c > ",
      fifo, "; wait");
}

TEST_CASE("the end of the janitor ends every descendant and removes the socket", "[launcher]") {
  TemporaryDirectory directory;
  const std::string fifo = MakeFifo(directory);
  const std::string socket = directory.path() + "/own/0.sock";
  std::filesystem::create_directory(directory.path() + "/own");
  std::ofstream{socket};
  auto janitor = Janitor::Start(Shell(Tree(fifo)));
  REQUIRE((*janitor)->RemoveAtEnd(socket, true).ok());
  REQUIRE((*janitor)->Launch(Environment()).ok());
  (void)(*janitor)->ReadEvent();
  std::vector<pid_t> pids = ReadPids(fifo);
  REQUIRE(pids.size() == 4);
  pids.push_back((*janitor)->pid());
  janitor->reset();
  for (pid_t pid : pids) CHECK(Watched(pid).EndsInTime());
  CHECK(!std::filesystem::exists(directory.path() + "/own"));
}

TEST_CASE("a killed worker leaves nothing behind", "[launcher]") {
  TemporaryDirectory directory;
  const std::string fifo = MakeFifo(directory);
  const std::string socket = directory.path() + "/own/0.sock";
  std::filesystem::create_directory(directory.path() + "/own");
  std::ofstream{socket};
  const pid_t worker = fork();
  if (worker == 0) {  // only system calls and the janitor from here
    auto janitor = Janitor::Start(Shell(Tree(fifo)));
    (void)(*janitor)->SetName("lrmoe-worker[0]");
    (void)(*janitor)->RemoveAtEnd(socket, true);
    (void)(*janitor)->Launch(Environment());
    (void)(*janitor)->ReadEvent();
    while (true) pause();
  }
  std::vector<std::unique_ptr<Watched>> processes;
  for (pid_t pid : ReadPids(fifo)) processes.push_back(std::make_unique<Watched>(pid));
  // The janitor: the other child of the worker.
  std::ifstream children(absl::StrCat("/proc/", worker, "/task/", worker, "/children"));
  pid_t janitor = 0;
  children >> janitor;
  REQUIRE(janitor > 0);
  processes.push_back(std::make_unique<Watched>(janitor));
  kill(worker, SIGKILL);
  waitpid(worker, nullptr, 0);
  for (const auto& process : processes) CHECK(process->EndsInTime());
  CHECK(!std::filesystem::exists(directory.path() + "/own"));
}

TEST_CASE("a killed janitor takes the training process with it and the worker learns of it", "[launcher]") {
  TemporaryDirectory directory;
  const std::string fifo = MakeFifo(directory);
  auto janitor = Janitor::Start(Shell("sleep 1000 & echo $$ $! > " + fifo + "; wait"));
  REQUIRE((*janitor)->Launch(Environment()).ok());
  (void)(*janitor)->ReadEvent();
  const auto pids = ReadPids(fifo);
  const Watched trainer(pids[0]), its_child(pids[1]);
  kill((*janitor)->pid(), SIGKILL);
  CHECK(std::holds_alternative<JanitorDied>((*janitor)->ReadEvent()));
  CHECK(trainer.EndsInTime());
  CHECK(!(*janitor)->Launch(Environment()).ok());
  janitor->reset();  // kills the rest of the group
  CHECK(its_child.EndsInTime());
}

}  // namespace
}  // namespace lrmoe::launcher
