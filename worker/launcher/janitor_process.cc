#include "worker/launcher/janitor_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>

namespace lrmoe::launcher {
namespace {

// After SIGKILL, processes are gone as soon as the kernel gets to them; more only covers those stuck in it.
constexpr int kMaxReapMs = 3000;

class JanitorProcess {
 public:
  JanitorProcess(int fd, const std::vector<std::string>& command) : fd_(fd), worker_(getppid()) {
    for (const std::string& argument : command) command_.push_back(const_cast<char*>(argument.c_str()));
    command_.push_back(nullptr);
  }

  void SetUp() {
    setsid();
    prctl(PR_SET_NAME, "lrmoe-janitor");
    // Descendants of the training process that lose their parent become the janitor's: none escapes it.
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE}) ::signal(signal, SIG_IGN);
    sigset_t child;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child, nullptr);
    child_fd_ = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
    // Whatever else was open is the worker's business.
    const int low = std::min(fd_, child_fd_), high = std::max(fd_, child_fd_);
    CloseRange(3, low - 1);
    CloseRange(low + 1, high - 1);
    CloseRange(high + 1, std::numeric_limits<int>::max());
  }

  void Serve() {
    while (!done_) {
      pollfd waits[] = {{fd_, POLLIN, 0}, {child_fd_, POLLIN, 0}};
      // Without a limit: the worker's end of the socket closes at the latest when it dies.
      if (poll(waits, 2, -1) < 0 && errno != EINTR) break;
      if (waits[1].revents != 0) Reap();
      if (waits[0].revents != 0 && !ReadPacket()) break;
    }
  }

  [[noreturn]] void CleanUpAndExit() {
    if (!done_) {
      // The worker did not say goodbye. Its own log cannot tell; this is the line that names it.
      char line[512];
      const int length = snprintf(line, sizeof(line), "%s: worker process %d died%s\n", name_.c_str(),
                                  worker_, trainer_ > 0 ? "; ending its training process" : "");
      if (length > 0) (void)!write(STDERR_FILENO, line, static_cast<size_t>(length));
    }
    if (group_ > 0) kill(-group_, SIGKILL);
    KillDescendants();
    for (const std::string& path : files_) unlink(path.c_str());
    for (const std::string& path : directories_) rmdir(path.c_str());
    _exit(0);
  }

 private:
  static void CloseRange(int first, int last) {
    if (first <= last) close_range(static_cast<unsigned>(first), static_cast<unsigned>(last), 0);
  }

  bool ReadPacket() {
    static char buffer[1 + kMaxPacketText];
    const ssize_t size = recv(fd_, buffer, sizeof(buffer), MSG_DONTWAIT);
    if (size < 0) return errno == EAGAIN || errno == EINTR;
    if (size == 0) return false;
    const std::string text(buffer + 1, static_cast<size_t>(size) - 1);
    switch (static_cast<Packet>(buffer[0])) {
      case Packet::kName:
        name_ = text;
        break;
      case Packet::kFile:
        files_.push_back(text);
        break;
      case Packet::kKeep:
        std::erase(files_, text);
        break;
      case Packet::kDirectory:
        directories_.push_back(text);
        break;
      case Packet::kVariable:
        environment_.push_back(text);
        break;
      case Packet::kLaunch:
        Launch();
        break;
      case Packet::kSignal: {
        int32_t signal = 0;
        if (text.size() == sizeof(signal)) memcpy(&signal, text.data(), sizeof(signal));
        if (group_ > 0 && signal > 0) kill(-group_, signal);
        break;
      }
      case Packet::kDone:
        done_ = true;
        break;
      default:
        break;
    }
    return true;
  }

  void Tell(Packet kind, int32_t number) {
    char packet[1 + sizeof(number)];
    packet[0] = static_cast<char>(kind);
    memcpy(packet + 1, &number, sizeof(number));
    (void)!send(fd_, packet, sizeof(packet), MSG_NOSIGNAL);
  }

  void Launch() {
    int report[2];  // carries errno when exec fails, closes when it works
    if (pipe2(report, O_CLOEXEC) != 0) return Tell(Packet::kNotStarted, errno);
    const pid_t janitor = getpid();
    const pid_t pid = fork();
    if (pid == 0) {
      close(report[0]);
      Exec(report[1], janitor);
    }
    close(report[1]);
    int32_t error = pid < 0 ? errno : 0;
    if (pid > 0) {
      setpgid(pid, pid);  // here and in the child: whoever is first
      if (read(report[0], &error, sizeof(error)) != sizeof(error)) error = 0;
    }
    close(report[0]);
    if (error != 0) return Tell(Packet::kNotStarted, error);
    trainer_ = group_ = pid;
    Tell(Packet::kStarted, pid);
  }

  [[noreturn]] void Exec(int report, pid_t janitor) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != janitor) _exit(127);  // it died before the line above
    for (int signal : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE}) ::signal(signal, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    std::vector<char*> environment;
    for (std::string& entry : environment_) environment.push_back(entry.data());
    environment.push_back(nullptr);
    execvpe(command_[0], command_.data(), environment.data());
    const int32_t error = errno;
    (void)!write(report, &error, sizeof(error));
    _exit(127);
  }

  void Reap() {
    signalfd_siginfo info;
    while (read(child_fd_, &info, sizeof(info)) > 0) {
    }
    int status = 0;
    for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG)) > 0;) {
      if (pid != trainer_) continue;
      trainer_ = 0;  // group_ stays: others may be in it
      Tell(Packet::kEnded, status);
    }
  }

  static std::vector<pid_t> Children() {
    std::vector<pid_t> children;
    std::ifstream list("/proc/thread-self/children");
    for (pid_t pid; list >> pid;) children.push_back(pid);
    return children;
  }

  // Killing a child makes its own children this process's: repeat until there are none.
  void KillDescendants() {
    for (int waited_ms = 0; waited_ms < kMaxReapMs;) {
      while (waitpid(-1, nullptr, WNOHANG) > 0) {
      }
      const std::vector<pid_t> children = Children();
      if (children.empty()) return;
      for (pid_t pid : children) kill(pid, SIGKILL);
      pollfd wait{child_fd_, POLLIN, 0};
      if (poll(&wait, 1, 20) == 0) waited_ms += 20;
      signalfd_siginfo info;
      (void)!read(child_fd_, &info, sizeof(info));
    }
  }

  const int fd_;
  const pid_t worker_;
  int child_fd_ = -1;
  std::vector<char*> command_;
  std::vector<std::string> environment_;
  std::string name_ = "lrmoe-worker";
  std::vector<std::string> files_, directories_;
  pid_t trainer_ = 0;  // while it runs
  pid_t group_ = 0;    // its process group, from its start on
  bool done_ = false;
};

}  // namespace

void RunJanitor(int fd, const std::vector<std::string>& command) {
  JanitorProcess janitor(fd, command);
  janitor.SetUp();
  janitor.Serve();
  janitor.CleanUpAndExit();
}

}  // namespace lrmoe::launcher
