#include "controller/rpc/listener.h"

#include <sys/stat.h>

#include <chrono>
#include <mutex>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/server_builder.h"
#include "proto/convert.h"

namespace lrmoe::rpc {
namespace {

// A peer that answers no ping is gone: a stopped process, a pulled cable (a killed one closes its
// connection). With the reconnect grace that makes ten seconds until its job is told.
constexpr int kKeepaliveMs = 3000;
constexpr int kKeepaliveTimeoutMs = 5000;

absl::Status CheckAddress(const std::string& address) {
  constexpr absl::string_view kAllowed = "host:port with port 0..65535, [v6-address]:port, or unix:path";
  if (absl::StartsWith(address, "unix:")) {
    constexpr size_t kMaxPath = 107;  // sockaddr_un
    const std::string path = address.substr(5);
    if (path.empty() || path.size() > kMaxPath)
      return absl::InvalidArgumentError(
          absl::StrCat("listen is \"", address, "\"; allowed: unix: and a path of 1..", kMaxPath, " bytes"));
    return absl::OkStatus();
  }
  const size_t colon = address.rfind(':');
  int port = -1;
  if (colon == std::string::npos || colon == 0 || !absl::SimpleAtoi(address.substr(colon + 1), &port) ||
      port < 0 || port > 65535)
    return absl::InvalidArgumentError(
        absl::StrCat("listen is \"", address, "\"; allowed: ", std::string(kAllowed)));
  return absl::OkStatus();
}

void SetUpOnce() {
  static std::once_flag once;
  std::call_once(once, [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });
}

}  // namespace

absl::Status Validate(const ListenerOptions& options) {
  if (options.max_message_bytes < 4096 || options.max_message_bytes > 64 << 20)
    return absl::InvalidArgumentError(
        absl::StrCat("max_message_bytes is ", options.max_message_bytes, "; allowed: 4096..", 64 << 20));
  return CheckAddress(options.address);
}

absl::StatusOr<std::unique_ptr<Listener>> Listener::Start(const ListenerOptions& options, Server* server) {
  LRMOE_RETURN_IF_ERROR(Validate(options));
  SetUpOnce();
  std::unique_ptr<Listener> listener(new Listener(server));
  const bool local = absl::StartsWith(options.address, "unix:");
  int port = 0;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(options.address, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&listener->controller_);
  builder.RegisterService(&listener->admin_);
  builder.SetMaxReceiveMessageSize(options.max_message_bytes);
  builder.SetMaxSendMessageSize(kMaxControllerMessageBytes);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT,
                             0);  // a second controller on the port must fail, not share it
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // as many as it takes
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 500);
  server->Start(&listener->controller_);
  const mode_t mask = local ? umask(0077) : 0;
  listener->grpc_ = builder.BuildAndStart();
  if (local) umask(mask);
  if (listener->grpc_ == nullptr || (!local && port == 0))
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", options.address, ": in use, or not of this host"));
  listener->address_ = local ? options.address
                             : absl::StrCat(options.address.substr(0, options.address.rfind(':')), ":", port);
  return listener;
}

Listener::~Listener() {
  Stop("controller stopping");
}

void Listener::Stop(const std::string& reason) {
  server_->Stop(reason);
  if (grpc_ == nullptr) return;
  // What was sent last needs a moment to go out; whoever does not take it is cut off.
  grpc_->Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(1));
  grpc_->Wait();
  grpc_.reset();
}

}  // namespace lrmoe::rpc
