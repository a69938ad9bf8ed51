#include "worker/rpc/lane.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "worker/rpc/grpc_status.h"

namespace lrmoe::worker {

// Answers come from the engine's thread, the end from the lane's.
class Lane::Client {
 public:
  explicit Client(int fd) : fd_(fd) {}
  ~Client() { close(fd_); }
  int fd() const { return fd_; }

  // A client that does not read its answers loses the connection.
  void Send(const v1::LaneReply& reply) {
    const std::string bytes = reply.SerializeAsString();
    if (send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) shutdown(fd_, SHUT_RDWR);
  }

 private:
  const int fd_;  // open for as long as an answer may come
};

absl::StatusOr<std::unique_ptr<Lane>> Lane::Start(const std::string& path, WorkerService* service) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("lane: \"", path, "\" has ", path.size(),
                                                   " bytes, allowed are 1..", sizeof(address.sun_path) - 1));
  }
  path.copy(address.sun_path, path.size());
  std::unique_ptr<Lane> lane(new Lane());
  lane->service_ = service;
  lane->buffer_.resize(kMaxMessageBytes + 1);
  lane->listening_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  lane->stop_ = eventfd(0, EFD_CLOEXEC);
  (void)unlink(path.c_str());
  if (lane->listening_ < 0 || lane->stop_ < 0 ||
      bind(lane->listening_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return absl::FailedPreconditionError(absl::StrCat("lane ", path, ": ", std::strerror(errno)));
  }
  lane->path_ = path;
  if (listen(lane->listening_, kMaxClients) != 0) {
    return absl::FailedPreconditionError(absl::StrCat("lane ", path, ": ", std::strerror(errno)));
  }
  lane->thread_ = std::thread([raw = lane.get()] { raw->Run(); });
  return lane;
}

Lane::~Lane() {
  if (thread_.joinable()) {
    const uint64_t one = 1;
    LRMOE_CHECK_EQ(write(stop_, &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
    thread_.join();
  }
  // Whose answers are still to come keeps its descriptor; its peer learns now that nothing comes.
  for (const auto& client : clients_) shutdown(client->fd(), SHUT_RDWR);
  if (listening_ >= 0) close(listening_);
  if (stop_ >= 0) close(stop_);
  if (!path_.empty()) unlink(path_.c_str());
}

void Lane::Run() {
  std::vector<pollfd> waits;
  while (true) {
    waits = {{stop_, POLLIN, 0}, {clients_.size() < kMaxClients ? listening_ : -1, POLLIN, 0}};
    for (const auto& client : clients_) waits.push_back({client->fd(), POLLIN, 0});
    // Without a deadline: the destructor is the only way out, and it writes to stop_.
    if (poll(waits.data(), waits.size(), -1) < 0) {
      LRMOE_CHECK_EQ(errno, EINTR);
      continue;
    }
    if (waits[0].revents != 0) return;
    std::vector<std::shared_ptr<Client>> over;
    for (size_t i = 0; i < clients_.size(); ++i)
      if (waits[i + 2].revents != 0 && !Serve(clients_[i])) over.push_back(clients_[i]);
    for (const auto& client : over) {
      shutdown(client->fd(), SHUT_RDWR);
      std::erase(clients_, client);
    }
    if (waits[1].revents != 0) Accept();
  }
}

void Lane::Accept() {
  const int fd = accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC);
  if (fd >= 0) clients_.push_back(std::make_shared<Client>(fd));  // else whoever came is gone again
}

bool Lane::Serve(const std::shared_ptr<Client>& client) {
  const ssize_t size = recv(client->fd(), buffer_.data(), buffer_.size(), MSG_DONTWAIT);
  if (size < 0) return errno == EAGAIN || errno == EINTR;
  struct Call {
    v1::LaneCall request;
    v1::LaneReply reply;
  };
  const auto call = std::make_shared<Call>();
  if (size == 0 || static_cast<size_t>(size) > kMaxMessageBytes ||
      !call->request.ParseFromArray(buffer_.data(), static_cast<int>(size))) {
    return false;
  }
  call->reply.set_number(call->request.number());
  auto answer = [client, call](const absl::Status& status) {
    if (!status.ok()) {
      const grpc::Status cut = ToGrpc(status);  // the same text as over gRPC
      call->reply.clear_result();
      call->reply.set_code(cut.error_code());
      call->reply.set_message(cut.error_message());
    }
    client->Send(call->reply);
  };
  if (call->request.has_forward()) {
    service_->RunForward(&call->request.forward(), call->reply.mutable_forward(), std::move(answer));
  } else if (call->request.has_backward()) {
    service_->RunBackward(&call->request.backward(), call->reply.mutable_backward(), std::move(answer));
  } else {
    answer(absl::InvalidArgumentError("call: unset, allowed are forward and backward"));
  }
  return true;
}

}  // namespace lrmoe::worker
