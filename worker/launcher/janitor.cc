#include "worker/launcher/janitor.h"

#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/launcher/janitor_process.h"

namespace lrmoe::launcher {
namespace {

// The janitor's own limit for killing is shorter; this covers a machine under load.
constexpr int kMaxGoodbyeMs = 5000;

}  // namespace

absl::StatusOr<std::unique_ptr<Janitor>> Janitor::Start(const std::vector<std::string>& command) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    return absl::UnavailableError(absl::StrCat("janitor: socketpair: ", strerror(errno)));
  }
  const pid_t pid = fork();
  if (pid == 0) {
    close(ends[0]);
    RunJanitor(ends[1], command);
  }
  close(ends[1]);
  if (pid < 0) {
    close(ends[0]);
    return absl::UnavailableError(absl::StrCat("janitor: fork: ", strerror(errno)));
  }
  return std::unique_ptr<Janitor>(new Janitor(ends[0], pid));
}

Janitor::~Janitor() {
  (void)Tell(static_cast<uint8_t>(Packet::kDone), "");
  if (died_ && trainer_ > 0) kill(-trainer_, SIGKILL);  // what the kernel did not kill with the janitor
  // The janitor closes its end when it exits.
  pollfd wait{fd_, 0, 0};
  while (!died_ && (wait.revents & POLLHUP) == 0 && poll(&wait, 1, kMaxGoodbyeMs) > 0) {
  }
  waitpid(pid_, nullptr, WNOHANG);
  close(fd_);
}

absl::Status Janitor::Tell(uint8_t kind, const std::string& text) {
  if (text.size() > kMaxPacketText) {
    return absl::InvalidArgumentError(absl::StrCat("\"", text.substr(0, 40), "...\" has ", text.size(),
                                                   " bytes, allowed are ", kMaxPacketText));
  }
  std::string packet(1, static_cast<char>(kind));
  packet += text;
  if (send(fd_, packet.data(), packet.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(packet.size())) {
    return absl::UnavailableError(absl::StrCat("the janitor process ", pid_, " is gone: ", strerror(errno)));
  }
  return absl::OkStatus();
}

absl::Status Janitor::SetName(const std::string& who) {
  return Tell(static_cast<uint8_t>(Packet::kName), who);
}

absl::Status Janitor::RemoveAtEnd(const std::string& path, bool remove_directory) {
  LRMOE_RETURN_IF_ERROR(Tell(static_cast<uint8_t>(Packet::kFile), path));
  if (!remove_directory) return absl::OkStatus();
  return Tell(static_cast<uint8_t>(Packet::kDirectory), path.substr(0, path.find_last_of('/')));
}

absl::Status Janitor::KeepAtEnd(const std::string& path) {
  return Tell(static_cast<uint8_t>(Packet::kKeep), path);
}

absl::Status Janitor::Launch(const std::vector<std::string>& environment) {
  for (const std::string& entry : environment) {
    LRMOE_RETURN_IF_ERROR(Tell(static_cast<uint8_t>(Packet::kVariable), entry));
  }
  return Tell(static_cast<uint8_t>(Packet::kLaunch), "");
}

void Janitor::Signal(int signal) {
  const int32_t number = signal;
  (void)Tell(static_cast<uint8_t>(Packet::kSignal),
             std::string(reinterpret_cast<const char*>(&number), sizeof(number)));
}

JanitorEvent Janitor::ReadEvent() {
  char packet[1 + sizeof(int32_t)];
  ssize_t size = 0;
  do {
    size = recv(fd_, packet, sizeof(packet), 0);
  } while (size < 0 && errno == EINTR);
  if (size != sizeof(packet)) {
    died_ = true;
    return JanitorDied{};
  }
  int32_t number = 0;
  memcpy(&number, packet + 1, sizeof(number));
  switch (static_cast<Packet>(packet[0])) {
    case Packet::kStarted:
      trainer_ = number;
      return TrainerStarted{number};
    case Packet::kNotStarted:
      return TrainerNotStarted{number};
    default:
      return TrainerEnded{number};
  }
}

std::string Describe(const TrainerEnded& ended) {
  if (WIFSIGNALED(ended.wait_status)) {
    const int signal = WTERMSIG(ended.wait_status);
    return absl::StrCat("was killed by signal ", signal, " (", strsignal(signal), ")");
  }
  return absl::StrCat("exited with status ", WEXITSTATUS(ended.wait_status));
}

int ExitStatus(const TrainerEnded& ended) {
  return WIFSIGNALED(ended.wait_status) ? 128 + WTERMSIG(ended.wait_status) : WEXITSTATUS(ended.wait_status);
}

}  // namespace lrmoe::launcher
