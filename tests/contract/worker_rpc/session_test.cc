// Sessions of the C++ client with the real service: everything a training process does, and how sessions end.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <future>
#include <thread>

#include "absl/strings/match.h"
#include "common/random.h"
#include "tests/contract/worker_rpc/fixture.h"
#include "tests/contract/worker_rpc/raw_client.h"

namespace lrmoe::worker {
namespace {

template <typename T>
std::span<T> Part(client::Arena& arena, size_t offset, size_t count) {
  return {reinterpret_cast<T*>(arena.memory().data() + offset), count};
}

// The tensors of one invocation of T tokens in an arena.
struct Batch {
  explicit Batch(client::Arena& arena, int64_t t) : tokens(t) {
    const auto n = static_cast<size_t>(t);
    x = Part<float>(arena, 0, n * 16);
    y = Part<float>(arena, 4096, n * 16);
    ids = Part<int32_t>(arena, 8192, n * 2);
    alpha = Part<float>(arena, 12288, n * 2);
    dalpha = Part<float>(arena, 16384, n * 2);
    kept = Part<uint8_t>(arena, 20480, n * 2);
  }
  client::ForwardTensors forward() const {
    return {.num_tokens = tokens,
            .x = std::as_bytes(x),
            .expert_idx = ids,
            .alpha = alpha,
            .y = std::as_writable_bytes(y)};
  }
  client::BackwardTensors backward() const {
    return {.num_tokens = tokens,
            .dy = std::as_bytes(x),
            .dx = std::as_writable_bytes(y),
            .dalpha = dalpha,
            .kept = kept};
  }
  int64_t tokens;
  std::span<float> x, y, alpha, dalpha;
  std::span<int32_t> ids;
  std::span<uint8_t> kept;
};

// Arenas this process has open. Not all files: gRPC closes its sockets some time after a channel is gone.
int64_t OpenArenas() {
  int64_t arenas = 0;
  for (const auto& file : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    arenas += absl::StrContains(std::filesystem::read_symlink(file, gone).string(), "memfd:");
  }
  return arenas;
}

TEST_CASE("a training step reaches the engine with the right memory and comes back", "[worker_rpc]") {
  Worker worker;
  auto session = worker.Attach();
  CHECK(session->rank() == 0);
  CHECK(session->world_size() == 1);
  CHECK(session->owned_experts() == std::vector<int32_t>{0, 1});
  CHECK(worker.models == 1);
  auto arena = session->CreateArena(1 << 16);
  REQUIRE(arena.status() == absl::OkStatus());
  const Batch batch(**arena, 5);
  for (size_t i = 0; i < batch.x.size(); ++i) batch.x[i] = static_cast<float>(i) + 0.25f;
  for (size_t i = 0; i < batch.ids.size(); ++i) batch.ids[i] = static_cast<int32_t>(i % 2);

  const Invocation invocation{.step = 4, .layer = 2, .micro_batch = 1};
  const auto forward = session->Forward(invocation, batch.forward());
  REQUIRE(forward.status() == absl::OkStatus());
  CHECK(std::equal(batch.x.begin(), batch.x.end(), batch.y.begin()));
  CHECK(worker.engine->ids_seen == std::vector<int32_t>(batch.ids.begin(), batch.ids.end()));
  CHECK(forward->retention_rate == 0.5);
  CHECK(forward->planned_kept_rows == 3);
  CHECK(forward->planned_routed_rows == 6);
  CHECK(forward->policy == "lrmoe");
  CHECK(forward->report.routed_rows == 10);

  std::fill(batch.y.begin(), batch.y.end(), 0.0f);
  const auto backward = session->Backward(invocation, batch.backward());
  REQUIRE(backward.status() == absl::OkStatus());
  CHECK(std::equal(batch.x.begin(), batch.x.end(), batch.y.begin()));
  CHECK(batch.dalpha[9] == 1.0f);
  CHECK(batch.kept[9] == 1);
  CHECK(backward->retention_rate == 0.5);  // the plan of its forward
  CHECK(backward->report.invocation == invocation);

  CHECK(session->SquaredGradientNorm().value() == 2.5);
  CHECK(session->OptimizerStep({.step = 1, .lr = 0.5}).value() == ParameterVersion{3});
  CHECK(session->ZeroGradients() == absl::OkStatus());
  CHECK(session->Discard(invocation) == absl::OkStatus());
  CHECK(session->FinishLoad(1).value() == ParameterVersion{3});
  CHECK(session->SaveCheckpoint("/tmp/x", 9) == absl::OkStatus());
  const auto loaded = session->LoadCheckpoint("/tmp/x", -1);
  REQUIRE(loaded.status() == absl::OkStatus());
  CHECK(loaded->step == 7);
  CHECK(loaded->optimizer_step == 12);
  CHECK(worker.script.Calls() ==
        std::vector<std::string>{"create", "forward step 4 layer 2 micro-batch 1",
                                 "backward step 4 layer 2 micro-batch 1", "norm", "optimizer step 1 lr 0.5",
                                 "zero", "discard step 4 layer 2 micro-batch 1", "finish load 1",
                                 "save /tmp/x 9", "load checkpoint /tmp/x -1"});
}

TEST_CASE("no tokens need no memory", "[worker_rpc]") {
  Worker worker;
  auto session = worker.Attach();
  CHECK(session->Forward({.step = 1}, {}).status() == absl::OkStatus());
  CHECK(session->Backward({.step = 1}, {}).status() == absl::OkStatus());
}

TEST_CASE("expert weights go in and out", "[worker_rpc]") {
  Worker worker;
  auto session = worker.Attach();
  auto arena = session->CreateArena(1 << 16);
  REQUIRE(arena.status() == absl::OkStatus());
  const auto gate_up = Part<float>(**arena, 0, 16 * 16);
  const auto down = Part<float>(**arena, 4096, 16 * 8);
  std::fill(gate_up.begin(), gate_up.end(), 3.0f);
  REQUIRE(session->LoadExpert(0, 1, DataType::kFp32, std::as_bytes(gate_up), std::as_bytes(down)) ==
          absl::OkStatus());
  CHECK(worker.engine->w1_.size() == gate_up.size_bytes());
  CHECK(worker.engine->w2_.size() == down.size_bytes());
  REQUIRE(session->ReadGradients(2, 0, gate_up, down) == absl::OkStatus());
  CHECK(gate_up.front() == 1.5f);
  CHECK(down.back() == -2.0f);
  CHECK(worker.script.Calls().back() == "export layer 2 expert 0 gradient");
  CHECK(session->ReadWeights(2, 0, gate_up, down) == absl::OkStatus());
  CHECK(worker.script.Calls().back() == "export layer 2 expert 0 weights");
}

TEST_CASE("spans outside arenas and of the wrong size are refused before anything is sent", "[worker_rpc]") {
  Worker worker;
  auto session = worker.Attach();
  auto arena = session->CreateArena(1 << 16);
  Batch batch(**arena, 5);
  std::vector<float> elsewhere(80);
  auto tensors = batch.forward();
  tensors.x = std::as_bytes(std::span(elsewhere));
  CHECK(session->Forward({}, tensors).status() ==
        absl::InvalidArgumentError("x: does not lie in an arena of this session"));
  tensors = batch.forward();
  tensors.alpha = tensors.alpha.first(3);
  CHECK(session->Forward({}, tensors).status() ==
        absl::InvalidArgumentError("alpha: 12 bytes, its shape needs 40"));
}

TEST_CASE("one client at a time; the next one finds the engine as it was", "[worker_rpc]") {
  Worker worker;
  auto first = worker.Attach();
  auto options = worker.ClientOptions();
  options.name = "second";
  const auto refused = client::Session::Attach(options);
  CHECK(refused.status() == absl::AlreadyExistsError(
                                "client \"c++ client\" is attached to this worker; it serves one at a time"));
  first.reset();  // detaches
  auto again = worker.Attach();
  CHECK(again->health() == absl::OkStatus());
  CHECK(worker.models == 1);
  again.reset();

  options.model.shape.top_k = 1;
  const auto other = client::Session::Attach(options);
  CHECK(other.status().code() == absl::StatusCode::kFailedPrecondition);
  CHECK(absl::StrContains(std::string(other.status().message()), "top_k 2"));
  CHECK(absl::StrContains(std::string(other.status().message()), "top_k 1"));
  CHECK(worker.Attach()->health() == absl::OkStatus());
}

TEST_CASE("a client that goes without a word frees its session, arenas and contexts", "[worker_rpc]") {
  Worker worker;
  worker.Attach().reset();
  worker.script.Await("closed c++ client");
  worker.script.Clear();
  {
    // Only the Attach call and its connection: what the kernel closes when a process is killed.
    auto channel = grpc::CreateChannel("unix:" + worker.socket(), grpc::InsecureChannelCredentials());
    auto stub = v1::Worker::NewStub(channel);
    grpc::ClientContext context;
    v1::AttachRequest request = RawClient::AttachRequest();
    request.clear_client();
    auto reader = stub->Attach(&context, request);
    v1::SessionEvent event;
    REQUIRE(reader->Read(&event));
    v1::CreateArenaRequest create;
    create.set_session(event.attached().session());
    create.set_bytes(4096);
    v1::Arena arena;
    grpc::ClientContext arena_context;
    REQUIRE(stub->CreateArena(&arena_context, create, &arena).ok());
    CHECK(OpenArenas() == 1);
    context.TryCancel();
    while (reader->Read(&event)) {
    }
    (void)reader->Finish();
  }
  worker.script.Await("closed ");
  const auto next = worker.Attach();  // admitted only once the lost session is gone
  CHECK(next->health() == absl::OkStatus());
  CHECK(OpenArenas() == 0);
}

TEST_CASE("an engine error that ends the epoch reaches every call and the session", "[worker_rpc]") {
  Worker worker;
  auto session = worker.Attach();
  worker.script.Next(absl::UnavailableError("rank 1 is gone"));
  CHECK(session->ZeroGradients() == absl::UnavailableError("rank 1 is gone"));
  CHECK(session->ZeroGradients() == absl::UnavailableError("rank 1 is gone"));
  CHECK(client::Session::Attach(worker.ClientOptions()).status() == absl::UnavailableError("rank 1 is gone"));
  worker.service->Stop();
  CHECK(worker.death == std::vector<absl::Status>{absl::UnavailableError("rank 1 is gone")});
}

TEST_CASE("a timeout ends it too, other errors do not", "[worker_rpc]") {
  Worker worker;
  auto session = worker.Attach();
  worker.script.Next(absl::InvalidArgumentError("no"));
  CHECK(session->ZeroGradients() == absl::InvalidArgumentError("no"));
  CHECK(session->ZeroGradients() == absl::OkStatus());
  worker.script.Next(absl::DeadlineExceededError("rank 2 did not arrive"));
  CHECK(session->ZeroGradients() == absl::DeadlineExceededError("rank 2 did not arrive"));
  CHECK(session->ZeroGradients() == absl::UnavailableError("rank 2 did not arrive"));
}

TEST_CASE("an error behind an answer leaves the answer alone and ends the epoch", "[worker_rpc]") {
  Worker worker;
  auto session = worker.Attach();
  worker.script.NextAfterAnswer(absl::UnavailableError("rank 1 left its replicas stale"));
  CHECK(session->ZeroGradients() == absl::OkStatus());
  CHECK(session->ZeroGradients() == absl::UnavailableError("rank 1 left its replicas stale"));
  worker.service->Stop();
  CHECK(worker.death == std::vector<absl::Status>{absl::UnavailableError("rank 1 left its replicas stale")});
}

TEST_CASE("the end of the epoch answers waiting calls and tells an idle client", "[worker_rpc]") {
  Worker worker;
  auto session = worker.Attach();
  worker.script.Hold();
  auto running = std::async(std::launch::async, [&] { return session->ZeroGradients(); });
  worker.script.Await("zero");
  // The engine is inside the call; the controller aborts, the transport tears the call out with its own
  // words.
  worker.service->EndEpoch("the controller ended epoch 4: rank 1 left");
  worker.script.Next(absl::UnavailableError("aborted"));
  worker.script.Release();
  const absl::Status reason = absl::UnavailableError("the controller ended epoch 4: rank 1 left");
  CHECK(running.get() == reason);
  CHECK(session->SquaredGradientNorm().status() == reason);
  worker.service->Stop();
  CHECK(worker.death.empty());  // it was not the engine's discovery
}

TEST_CASE("engine creation that fails fails the attach and can be tried again", "[worker_rpc]") {
  Worker worker;
  worker.script.Next(absl::InvalidArgumentError("ranks disagree on the model"));
  CHECK(client::Session::Attach(worker.ClientOptions()).status() ==
        absl::InvalidArgumentError("ranks disagree on the model"));
  CHECK(worker.models == 0);
  CHECK(worker.Attach()->health() == absl::OkStatus());
  CHECK(worker.models == 1);
}

TEST_CASE("finishing offers again until the other ranks finish too", "[worker_rpc]") {
  Worker worker;
  CHECK(worker.service->Finish() == absl::OkStatus());  // nobody ever attached
  worker.Attach().reset();
  worker.script.Await("closed c++ client");
  worker.script.Clear();
  worker.script.Next(absl::FailedPreconditionError("rank 0: finish; rank 1: forward"));
  worker.script.Next(absl::FailedPreconditionError("rank 0: finish; rank 1: backward"));
  CHECK(worker.service->Finish() == absl::OkStatus());
  CHECK(worker.script.Calls() == std::vector<std::string>{"finish", "finish", "finish"});
  worker.script.Next(absl::UnavailableError("gone"));
  CHECK(worker.service->Finish() == absl::UnavailableError("gone"));
}

TEST_CASE("arenas are limited, sealed and leave nothing behind", "[worker_rpc]") {
  Worker worker({.max_arenas = 2, .max_total_bytes = 10000});
  auto session = worker.Attach();
  CHECK(session->CreateArena(0).status().code() == absl::StatusCode::kInvalidArgument);
  CHECK(session->CreateArena(10001).status().code() == absl::StatusCode::kResourceExhausted);
  CHECK(session->CreateArena(INT64_MAX).status().code() == absl::StatusCode::kResourceExhausted);
  {
    auto first = session->CreateArena(6000);
    REQUIRE(first.status() == absl::OkStatus());
    CHECK(session->CreateArena(4001).status().code() == absl::StatusCode::kResourceExhausted);
    auto second = session->CreateArena(4000);
    REQUIRE(second.status() == absl::OkStatus());
    CHECK(session->CreateArena(1).status().message() == "this session has 2 arenas, allowed are 2");
    (*first)->memory()[5999] = std::byte{1};
  }
  CHECK(OpenArenas() == 0);
  CHECK(session->CreateArena(10000).status() == absl::OkStatus());

  auto arena = Arena::Create(1, 5000);
  REQUIRE(arena.status() == absl::OkStatus());
  const int fd = open((*arena)->path().c_str(), O_RDWR | O_CLOEXEC);
  REQUIRE(fd >= 0);
  CHECK(ftruncate(fd, 0) != 0);  // would make the worker's next access fault
  close(fd);
}

TEST_CASE("the socket is the owner's alone, is replaced when stale, refused when served, removed at the end",
          "[worker_rpc]") {
  std::string socket, directory;
  {
    Worker worker;
    socket = worker.socket();
    directory = std::filesystem::path(socket).parent_path();
    struct stat info {};
    REQUIRE(stat(socket.c_str(), &info) == 0);
    CHECK((info.st_mode & 0777) == 0600);
    REQUIRE(stat(directory.c_str(), &info) == 0);
    CHECK((info.st_mode & 0777) == 0700);
    CHECK(SocketServer::Start(socket, worker.service.get()).status().code() ==
          absl::StatusCode::kAlreadyExists);
    CHECK(worker.Attach()->health() == absl::OkStatus());
    worker.server.reset();
    CHECK(!std::filesystem::exists(socket));
    CHECK(!std::filesystem::exists(directory));
  }
  Worker worker;
  const std::string stale = worker.directory.path() + "/stale.sock";
  {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    stale.copy(address.sun_path, stale.size());
    REQUIRE(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    close(fd);
  }
  CHECK(SocketServer::Start(stale, worker.service.get()).status() == absl::OkStatus());
  CHECK(SocketServer::Start("/tmp/" + std::string(200, 'x'), worker.service.get()).status().code() ==
        absl::StatusCode::kInvalidArgument);
  CHECK(SocketServer::Start("relative.sock", worker.service.get()).status().code() ==
        absl::StatusCode::kInvalidArgument);
}

TEST_CASE("garbage on the socket disturbs nobody", "[worker_rpc]") {
  Worker worker;
  auto session = worker.Attach();
  Random random(11);
  for (int i = 0; i < 30; ++i) {
    const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    worker.socket().copy(address.sun_path, worker.socket().size());
    REQUIRE(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
    std::string bytes = i % 2 == 0 ? "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" : "";
    for (int64_t n = random.Between(0, 4000); n > 0; --n)
      bytes.push_back(static_cast<char>(random.Below(256)));
    (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    close(fd);
  }
  CHECK(session->ZeroGradients() == absl::OkStatus());
}

int64_t ResidentKiB() {
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0, resident = 0;
  statm >> total >> resident;
  return resident * 4;
}

TEST_CASE("memory does not grow with the number of steps", "[worker_rpc]") {
  Worker worker;
  auto session = worker.Attach();
  auto arena = session->CreateArena(1 << 16);
  REQUIRE(arena.status() == absl::OkStatus());
  const Batch batch(**arena, 8);
  const auto run = [&](int64_t from, int64_t steps) {
    for (int64_t step = from; step < from + steps; ++step) {
      REQUIRE(session->Forward({.step = step}, batch.forward()).ok());
      // Every third forward gets no backward, as in an evaluation that forgot to say so.
      if (step % 3 != 0) REQUIRE(session->Backward({.step = step}, batch.backward()).ok());
      worker.script.Clear();
    }
  };
  run(1, 1000);
  const int64_t before = ResidentKiB();
  run(1001, 3000);
#ifdef __SANITIZE_ADDRESS__  // what was freed is kept for a while: tests/CMakeLists.txt limits how much
  CHECK(ResidentKiB() - before < 4096);
#else
  CHECK(ResidentKiB() - before < 1024);
#endif
}

}  // namespace
}  // namespace lrmoe::worker
