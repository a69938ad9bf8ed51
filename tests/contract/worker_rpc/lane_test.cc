// The lane: the same answers as over gRPC, and nobody is disturbed by what else comes through it.
#include "worker/rpc/lane.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <thread>

#include "common/random.h"
#include "tests/contract/worker_rpc/fixture.h"
#include "tests/contract/worker_rpc/raw_client.h"

namespace lrmoe::worker {
namespace {

// A client's end of a lane.
class LaneEnd {
 public:
  explicit LaneEnd(const std::string& path) : fd_(socket(AF_UNIX, SOCK_SEQPACKET, 0)) {
    timeval patience{60, 0};  // a test that hangs, fails
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, path.size());
    REQUIRE(connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
  }
  ~LaneEnd() { close(fd_); }

  bool Send(const std::string& bytes) {
    return send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
  }
  void Send(uint64_t number, const v1::ForwardRequest& request) {
    v1::LaneCall call;
    call.set_number(number);
    *call.mutable_forward() = request;
    REQUIRE(Send(call.SerializeAsString()));
  }
  void Send(uint64_t number, const v1::BackwardRequest& request) {
    v1::LaneCall call;
    call.set_number(number);
    *call.mutable_backward() = request;
    REQUIRE(Send(call.SerializeAsString()));
  }
  v1::LaneReply Receive() {
    std::string bytes(1 << 16, '\0');
    const ssize_t size = recv(fd_, bytes.data(), bytes.size(), 0);
    REQUIRE(size > 0);
    v1::LaneReply reply;
    REQUIRE(reply.ParseFromArray(bytes.data(), static_cast<int>(size)));
    return reply;
  }
  // Whether the worker ends the connection, whatever it sends before.
  bool IsEnded() {
    char byte;
    ssize_t size;
    while ((size = recv(fd_, &byte, 1, 0)) > 0) {
    }
    return size == 0 || errno == ECONNRESET;
  }

 private:
  const int fd_;
};

template <typename Request>
v1::LaneReply Ask(LaneEnd& lane, uint64_t number, const Request& request) {
  lane.Send(number, request);
  v1::LaneReply reply = lane.Receive();
  CHECK(reply.number() == number);
  return reply;
}

TEST_CASE("lane: answers as gRPC does", "[lane]") {
  Worker worker;
  RawClient client(worker);
  CHECK(client.lane == worker.socket() + ".lane");
  LaneEnd lane(client.lane);
  v1::ForwardResponse forward;
  REQUIRE(client.Call(&v1::Worker::Stub::Forward, client.Forward(), &forward).ok());
  v1::LaneReply reply = Ask(lane, 7, client.Forward());
  CHECK(reply.code() == 0);
  CHECK(reply.forward().SerializeAsString() == forward.SerializeAsString());
  v1::BackwardResponse backward;
  REQUIRE(client.Call(&v1::Worker::Stub::Backward, client.Backward(), &backward).ok());
  REQUIRE(Ask(lane, 8, client.Forward()).code() == 0);
  reply = Ask(lane, 9, client.Backward());
  CHECK(reply.code() == 0);
  CHECK(reply.backward().SerializeAsString() == backward.SerializeAsString());
  CHECK(reply.backward().summary().policy() == "lrmoe");
  CHECK(client.Call(client.Forward()).ok());  // both ways in turn
}

TEST_CASE("lane: the same errors as gRPC", "[lane]") {
  Worker worker;
  RawClient client(worker);
  LaneEnd lane(client.lane);
  v1::ForwardRequest bad_shape = client.Forward(), stranger = client.Forward();
  bad_shape.mutable_x()->set_shape(1, 17);
  stranger.set_session(client.session + 1);
  for (const v1::ForwardRequest& bad : {bad_shape, stranger, v1::ForwardRequest()}) {
    const grpc::Status status = client.Call(bad);
    const v1::LaneReply reply = Ask(lane, 1, bad);
    CHECK(reply.code() == static_cast<uint32_t>(status.error_code()));
    CHECK(reply.message() == status.error_message());
    CHECK(reply.result_case() == v1::LaneReply::RESULT_NOT_SET);
  }
  worker.script.Next(absl::FailedPreconditionError(std::string(5000, 'x')));
  CHECK(Ask(lane, 2, client.Forward()).message().size() < 2100);
  REQUIRE(lane.Send(v1::LaneCall().SerializeAsString() + std::string("\x08\x05", 2)));
  const v1::LaneReply unset = lane.Receive();
  CHECK(unset.number() == 5);
  CHECK(unset.code() == static_cast<uint32_t>(absl::StatusCode::kInvalidArgument));
  CHECK(Ask(lane, 3, client.Forward()).code() == 0);
}

TEST_CASE("lane: garbage ends its own connection only", "[lane]") {
  Worker worker;
  RawClient client(worker);
  LaneEnd good(client.lane);
  Random random(5);
  for (int i = 0; i < 50; ++i) {
    std::string bytes(static_cast<size_t>(random.Between(1, 4000)), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random.Below(256));
    bytes.back() = '\xff';  // an unfinished number: never a whole message
    LaneEnd bad(client.lane);
    REQUIRE(bad.Send(bytes));
    CHECK(bad.IsEnded());
  }
  LaneEnd large(client.lane);
  REQUIRE(large.Send(std::string(Lane::kMaxMessageBytes + 1, '\0')));
  CHECK(large.IsEnded());
  CHECK(Ask(good, 1, client.Forward()).code() == 0);
}

TEST_CASE("lane: a client that leaves before its answer, or never reads, disturbs nobody", "[lane]") {
  Worker worker;
  RawClient client(worker);
  worker.script.Hold();
  {
    LaneEnd leaving(client.lane);
    leaving.Send(1, client.Forward());
    worker.script.Await("forward step 1 layer 0 micro-batch 0");
  }
  LaneEnd flooding(client.lane);
  for (uint64_t number = 0; number < 200; ++number) {
    flooding.Send(number, client.Forward());  // more than the engine's queue holds
  }
  v1::LaneReply reply = flooding.Receive();
  CHECK(reply.code() == static_cast<uint32_t>(absl::StatusCode::kResourceExhausted));
  worker.script.Release();
  LaneEnd lane(client.lane);
  for (reply = Ask(lane, 1, client.Forward()); reply.code() != 0; reply = Ask(lane, 1, client.Forward()))
    CHECK(reply.code() == static_cast<uint32_t>(absl::StatusCode::kResourceExhausted));
}

TEST_CASE("lane: a fifth connection waits for one to go", "[lane]") {
  Worker worker;
  RawClient client(worker);
  std::vector<std::unique_ptr<LaneEnd>> ends;
  for (size_t i = 0; i < Lane::kMaxClients; ++i) ends.push_back(std::make_unique<LaneEnd>(client.lane));
  for (auto& end : ends) CHECK(Ask(*end, 1, client.Forward()).code() == 0);
  LaneEnd waiting(client.lane);
  waiting.Send(2, client.Forward());
  ends.pop_back();
  CHECK(waiting.Receive().number() == 2);
}

TEST_CASE("lane: the end of the epoch and of the worker", "[lane]") {
  auto worker = std::make_unique<Worker>();
  std::string path;
  {
    RawClient client(*worker);
    path = client.lane;
    struct stat info {};
    REQUIRE(stat(path.c_str(), &info) == 0);
    CHECK((info.st_mode & 0777) == 0600);
    LaneEnd lane(path);
    worker->script.Hold();
    lane.Send(1, client.Forward());
    worker->script.Await("forward step 1 layer 0 micro-batch 0");
    worker->service->EndEpoch("rank 1 was lost");
    worker->script.Release();
    CHECK(lane.Receive().number() == 1);
    const v1::LaneReply after = Ask(lane, 2, client.Forward());
    CHECK(after.code() == static_cast<uint32_t>(absl::StatusCode::kUnavailable));
    CHECK(after.message() == "rank 1 was lost");
    worker->server.reset();
    CHECK(lane.IsEnded());
  }
  CHECK(!std::filesystem::exists(path));
}

}  // namespace
}  // namespace lrmoe::worker
