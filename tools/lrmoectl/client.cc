#include "tools/lrmoectl/client.h"

#include <arpa/inet.h>
#include <grpcpp/grpcpp.h>

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/units.h"
#include "lrmoe/v1/admin.grpc.pb.h"
#include "proto/convert.h"

namespace lrmoe::ctl {
namespace {

// gRPC servers refuse more frequent pings; a controller that ends is noticed at once, this is for one whose
// machine or network is gone while `plans watch` is quiet.
constexpr int kKeepalivePingMs = 310'000;
constexpr int kKeepaliveTimeoutMs = 20'000;

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(kMaxControllerMessageBytes);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);  // a controller is inside the cluster
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepalivePingMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

absl::Status ValidateAddress(absl::string_view address) {
  const auto bad = [address] {
    return absl::InvalidArgumentError(absl::StrCat(
        "controller is \"", address, "\"; allowed: host:port with a port from 1 to 65535, or unix:/path"));
  };
  if (address.substr(0, 5) == "unix:") return address.size() > 5 ? absl::OkStatus() : bad();
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos || colon == 0) return bad();
  const absl::string_view host = address.substr(0, colon);
  const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
  if (bracketed) {
    const std::string literal(
        host.substr(1, host.find('%') == absl::string_view::npos ? host.size() - 2 : host.find('%') - 1));
    in6_addr parsed;
    if (inet_pton(AF_INET6, literal.c_str(), &parsed) != 1) return bad();
  } else if (host.find_first_of(":/[] \t\n") != absl::string_view::npos) {
    return bad();
  }
  int port = 0;
  if (!absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 1 || port > 65535) return bad();
  return absl::OkStatus();
}

struct AdminClient::Connection {
  explicit Connection(const std::string& address)
      : channel(MakeChannel(address)), stub(v1::Admin::NewStub(channel)) {}

  // The gRPC outcome of one call as a status that a person can act on.
  absl::Status Explain(const grpc::Status& status, const std::string& address,
                       std::chrono::milliseconds timeout) {
    if (status.ok()) return absl::OkStatus();
    const bool connected = channel->GetState(false) == GRPC_CHANNEL_READY;
    switch (status.error_code()) {
      case grpc::StatusCode::UNAVAILABLE:
        return absl::UnavailableError(
            absl::StrCat("controller at ", address, " is not reachable: ", status.error_message()));
      case grpc::StatusCode::DEADLINE_EXCEEDED:
        if (!connected)
          return absl::UnavailableError(absl::StrCat(
              "controller at ", address, " is not reachable: no connection within ", ExactDuration(timeout)));
        return absl::DeadlineExceededError(
            absl::StrCat("controller at ", address, " did not answer within ", ExactDuration(timeout)));
      case grpc::StatusCode::UNIMPLEMENTED:
        return absl::UnimplementedError(
            absl::StrCat("the server at ", address, " does not offer the admin API of lrmoe-controller"));
      default:
        return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
    }
  }

  const std::shared_ptr<grpc::Channel> channel;
  const std::unique_ptr<v1::Admin::Stub> stub;

  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*, const Request&,
                                                                        Response*),
                                const Request& request, const AdminClient& client) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + client.timeout_);
    Response response;
    const grpc::Status status = (stub.get()->*method)(&context, request, &response);
    LRMOE_RETURN_IF_ERROR(Explain(status, client.address_, client.timeout_));
    return response;
  }
};

AdminClient::AdminClient(std::string address, std::chrono::milliseconds timeout)
    : address_(std::move(address)), timeout_(timeout), connection_(std::make_unique<Connection>(address_)) {}
AdminClient::~AdminClient() = default;

absl::StatusOr<v1::ControllerStatus> AdminClient::GetStatus() {
  return connection_->Call(&v1::Admin::Stub::GetStatus, v1::GetStatusRequest(), *this);
}

absl::StatusOr<v1::ListWorkersResponse> AdminClient::ListWorkers() {
  return connection_->Call(&v1::Admin::Stub::ListWorkers, v1::ListWorkersRequest(), *this);
}

absl::StatusOr<v1::ListLayersResponse> AdminClient::ListLayers() {
  return connection_->Call(&v1::Admin::Stub::ListLayers, v1::ListLayersRequest(), *this);
}

absl::StatusOr<v1::ListPlansResponse> AdminClient::ListPlans(const v1::ListPlansRequest& request) {
  return connection_->Call(&v1::Admin::Stub::ListPlans, request, *this);
}

absl::StatusOr<v1::PlanRecord> AdminClient::GetPlan(const v1::GetPlanRequest& request) {
  return connection_->Call(&v1::Admin::Stub::GetPlan, request, *this);
}

absl::StatusOr<v1::PolicySettings> AdminClient::GetPolicy() {
  return connection_->Call(&v1::Admin::Stub::GetPolicy, v1::GetPolicyRequest(), *this);
}

absl::StatusOr<v1::SetPolicyResponse> AdminClient::SetPolicy(const v1::SetPolicyRequest& request) {
  return connection_->Call(&v1::Admin::Stub::SetPolicy, request, *this);
}

absl::StatusOr<v1::SimulatePlanResponse> AdminClient::SimulatePlan(const v1::SimulatePlanRequest& request) {
  return connection_->Call(&v1::Admin::Stub::SimulatePlan, request, *this);
}

absl::StatusOr<v1::DrainResponse> AdminClient::Drain(const v1::DrainRequest& request) {
  return connection_->Call(&v1::Admin::Stub::Drain, request, *this);
}

absl::Status AdminClient::WatchPlans(const v1::WatchPlansRequest& request,
                                     std::optional<std::chrono::milliseconds> limit,
                                     const std::function<bool(const v1::PlanRecord&)>& on_plan) {
  // A quiet stream looks the same as no controller; one call with a deadline tells them apart first.
  LRMOE_RETURN_IF_ERROR(GetStatus().status());
  grpc::ClientContext context;
  if (limit.has_value()) context.set_deadline(std::chrono::system_clock::now() + *limit);
  const std::unique_ptr<grpc::ClientReader<v1::PlanRecord>> reader =
      connection_->stub->WatchPlans(&context, request);
  v1::PlanRecord record;
  while (reader->Read(&record)) {
    if (on_plan(record)) continue;
    context.TryCancel();
    while (reader->Read(&record)) {  // ends at once: the call is cancelled
    }
    reader->Finish();
    return absl::OkStatus();
  }
  const grpc::Status status = reader->Finish();
  if (limit.has_value() && status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED)
    return absl::OkStatus();
  if (status.ok())
    return absl::UnavailableError(absl::StrCat("controller at ", address_, " ended the stream"));
  return connection_->Explain(status, address_, timeout_);
}

}  // namespace lrmoe::ctl
