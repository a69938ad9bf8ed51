#include "worker/rpc/socket_server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server_builder.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace lrmoe::worker {
namespace {

// Requests carry descriptors, never tensors.
constexpr int kMaxRequestBytes = 64 << 10;
// What all connections together may hold in buffers, so that garbage cannot eat the worker's memory.
constexpr size_t kMaxBufferBytes = 64 << 20;
// Calls at a time per connection: one Attach, one collective, and room for tools.
constexpr int kMaxConcurrentStreams = 64;

absl::Status CannotServe(const std::string& path, absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat("socket ", path, ": ", what, ": ", std::strerror(errno)));
}

// Whether a process accepts connections at `path` now.
bool IsServed(const sockaddr_un& address) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool served = connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  close(fd);
  return served;
}

absl::StatusOr<sockaddr_un> SocketAddress(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.front() != '/' || path.size() >= sizeof(address.sun_path)) {
    return absl::InvalidArgumentError(absl::StrCat("socket: \"", path,
                                                   "\", allowed is an absolute path of at most ",
                                                   sizeof(address.sun_path) - 1, " bytes"));
  }
  path.copy(address.sun_path, path.size());
  return address;
}

// Another user who could rename files in the directory could put a socket of their own in our place.
absl::Status CheckDirectoryIsSafe(const std::string& path, const std::string& directory) {
  struct stat info {};
  if (stat(directory.c_str(), &info) != 0) return CannotServe(path, "its directory");
  const bool ours = info.st_uid == geteuid() || info.st_uid == 0;
  const bool shared = (info.st_mode & (S_IWGRP | S_IWOTH)) != 0 && (info.st_mode & S_ISVTX) == 0;
  if (S_ISDIR(info.st_mode) && ours && !shared) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("socket ", path, ": ", directory, " must be a directory that only this user can change"));
}

std::unique_ptr<grpc::Server> Build(const std::string& path, WorkerService* service) {
  static const bool kPlugins = [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  (void)kPlugins;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + path, grpc::InsecureServerCredentials());
  builder.RegisterService(service);
  builder.SetMaxReceiveMessageSize(kMaxRequestBytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxConcurrentStreams);
  builder.SetResourceQuota(grpc::ResourceQuota("worker socket").Resize(kMaxBufferBytes));
  return builder.BuildAndStart();
}

}  // namespace

absl::StatusOr<std::unique_ptr<SocketServer>> SocketServer::Start(const std::string& path,
                                                                  WorkerService* service) {
  LRMOE_ASSIGN_OR_RETURN(const sockaddr_un address, SocketAddress(path));
  std::unique_ptr<SocketServer> server(new SocketServer());
  const std::string directory = path.substr(0, path.find_last_of('/'));
  if (!directory.empty()) {
    if (mkdir(directory.c_str(), 0700) == 0) {
      server->made_directory_ = directory;
    } else if (errno != EEXIST) {
      return CannotServe(path, "making its directory");
    } else {
      LRMOE_RETURN_IF_ERROR(CheckDirectoryIsSafe(path, directory));
    }
  }
  if (IsServed(address)) {
    return absl::AlreadyExistsError(absl::StrCat("socket ", path, ": another process serves it"));
  }
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return CannotServe(path, "replacing it");
  const std::string lane_path = LanePath(path);
  const mode_t mask = umask(0177);
  absl::StatusOr<std::unique_ptr<Lane>> lane = nullptr;
  if (!lane_path.empty()) lane = Lane::Start(lane_path, service);
  service->SetLane(lane_path);
  if (lane.ok()) server->server_ = Build(path, service);
  umask(mask);
  LRMOE_RETURN_IF_ERROR(lane.status());
  server->lane_ = *std::move(lane);
  if (!server->server_) return CannotServe(path, "listening");
  server->path_ = path;
  return server;
}

std::string SocketServer::LanePath(const std::string& path) {
  const std::string lane = path + ".lane";
  return lane.size() < sizeof(sockaddr_un::sun_path) ? lane : "";
}

SocketServer::~SocketServer() {
  lane_.reset();
  Shutdown(std::chrono::milliseconds(0));
  server_.reset();
  if (!path_.empty()) unlink(path_.c_str());
  // Stays when others share it: other ranks' sockets.
  if (!made_directory_.empty()) rmdir(made_directory_.c_str());
}

void SocketServer::SetUnhealthy() {
  server_->GetHealthCheckService()->SetServingStatus(false);
}

void SocketServer::Shutdown(std::chrono::milliseconds grace) {
  if (server_) server_->Shutdown(std::chrono::system_clock::now() + grace);
}

}  // namespace lrmoe::worker
