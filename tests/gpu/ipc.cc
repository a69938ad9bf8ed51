// Memory and events of another process, with two real processes: this program as the worker, and itself once
// more as the training process, over pipes. The other process's stream is held by a host function until the
// device here was told all its work, so that reading before the event shows as wrong values every time.
#include <cuda_runtime.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/device.h"
#include "kernels/interprocess.h"
#include "tests/gpu/checks.h"

namespace lrmoe::gpu {
namespace {

constexpr int64_t kWidth = 1024, kRows = 512;
constexpr int64_t kRowsBytes = kWidth * kRows * 4;
constexpr int64_t kAllocation = 3 * kRowsBytes;  // a part nobody uses, then in, then out
constexpr int kRounds = 8;

struct Hello {  // of the training process
  char uuid[kernels::kDeviceUuidBytes];
  cudaIpcMemHandle_t memory;
  cudaIpcEventHandle_t ready;
};

bool Send(int fd, const void* bytes, size_t size) {
  return write(fd, bytes, size) == static_cast<ssize_t>(size);
}
bool Receive(int fd, void* bytes, size_t size) {
  for (size_t got = 0; got < size;) {
    const ssize_t now = read(fd, static_cast<char*>(bytes) + got, size - got);
    if (now <= 0) return false;  // the other process is gone: no wait without an end
    got += static_cast<size_t>(now);
  }
  return true;
}

// Holds the stream until the worker says "go".
void CUDART_CB WaitForGo(void* in) {
  char go = 0;
  (void)Receive(*static_cast<int*>(in), &go, 1);
}

#define LRMOE_IPC_OR_FAIL(what)                                            \
  do {                                                                     \
    if (!(what)) {                                                         \
      std::fprintf(stderr, "lrmoe-gpu ipc-client: %s failed: %s\n", #what, \
                   cudaGetErrorName(cudaPeekAtLastError()));               \
      return 1;                                                            \
    }                                                                      \
  } while (false)

bool Ok(cudaError_t error) {
  return error == cudaSuccess;
}

std::string Text(const absl::Status& status) {
  return std::string(status.message());
}

class Child {
 public:
  Child() {
    int to[2], from[2];
    if (pipe(to) != 0 || pipe(from) != 0) return;
    pid_ = fork();
    if (pid_ == 0) {
      close(to[1]);
      close(from[0]);
      const std::string in = absl::StrCat(to[0]), out = absl::StrCat(from[1]);
      execl("/proc/self/exe", "lrmoe-gpu", "ipc-client", in.c_str(), out.c_str(), nullptr);
      _exit(127);
    }
    close(to[0]);
    close(from[1]);
    to_ = to[1];
    from_ = from[0];
  }
  ~Child() { (void)Wait(); }
  int to() const { return to_; }
  int from() const { return from_; }
  // Its exit status.
  int Wait() {
    if (pid_ <= 0) return status_;
    close(to_);
    close(from_);
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = 0;
    return status_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128;
  }

 private:
  pid_t pid_ = 0;
  int to_ = -1, from_ = -1, status_ = 127;
};

// Empty, or what went wrong.
std::string Run(kernels::Device& device, Child& child) {
  kernels::Interprocess& shared = *device.interprocess();
  Hello hello;
  if (!Receive(child.from(), &hello, sizeof(hello))) return "the other process did not start";
  if (shared.uuid() != std::string(hello.uuid, sizeof(hello.uuid))) return "UUIDs of one device differ";
  const std::string handle(reinterpret_cast<const char*>(&hello.memory), sizeof(hello.memory));
  if (shared.OpenMemory(handle, int64_t{1} << 40).ok())
    return "more bytes than the allocation has were opened";
  auto memory = shared.OpenMemory(handle, kAllocation);
  if (!memory.ok()) return Text(memory.status());
  auto ready = shared.OpenEvent({reinterpret_cast<const char*>(&hello.ready), sizeof(hello.ready)});
  if (!ready.ok()) return Text(ready.status());
  auto done = shared.MakeEvent();
  if (!done.ok()) return Text(done.status());
  if (!Send(child.to(), (*done)->handle().data(), kernels::kSharedHandleBytes))
    return "the other process is gone";
  std::byte* const in = (*memory)->base() + kRowsBytes;
  std::byte* const out = in + kRowsBytes;
  if (!device.Holds(in) || !device.Holds(out + kRowsBytes - 1)) return "opened memory is not the device's";
  std::vector<int32_t> reversed(kRows);
  for (int32_t row = 0; row < kRows; ++row) reversed[row] = static_cast<int32_t>(kRows) - 1 - row;
  for (int round = 0; round < kRounds; ++round) {
    char recorded = 0;
    if (!Receive(child.from(), &recorded, 1)) return "the other process is gone";
    if (absl::Status status = (*ready)->Await(std::chrono::seconds(60)); !status.ok()) return Text(status);
    device.GatherRows(kernels::Type::kFp32, kWidth, in, reversed, out);
    if (absl::Status status = (*done)->Record(); !status.ok()) return Text(status);
    if (!Send(child.to(), "go", 2))
      return "the other process is gone";  // g: its stream goes on; o: the answer
    if (absl::Status status = device.Wait(); !status.ok()) return Text(status);
  }
  memory->reset();  // closed before the other process frees it
  ready->reset();
  if (!Send(child.to(), "x", 1)) return "the other process is gone";
  const int status = child.Wait();
  return status == 0 ? "" : absl::StrCat("the other process saw wrong values or failed: status ", status);
}

}  // namespace

testing::CheckResult CheckIpc() {
  testing::CheckResult result{"rows and events of another process", kRounds, 0, ""};
  Child child;
  auto device = kernels::cuda::CreateCudaDevice(0);
  result.failure = device.ok() ? Run(**device, child) : Text(device.status());
  return result;
}

int RunIpcClient(int in, int out) {
  char* memory = nullptr;
  cudaStream_t stream = nullptr;
  cudaEvent_t ready = nullptr, done = nullptr;
  cudaDeviceProp properties;
  Hello hello;
  LRMOE_IPC_OR_FAIL(Ok(cudaSetDevice(0)) && Ok(cudaGetDeviceProperties(&properties, 0)));
  std::memcpy(hello.uuid, properties.uuid.bytes, sizeof(hello.uuid));
  LRMOE_IPC_OR_FAIL(Ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)));
  LRMOE_IPC_OR_FAIL(Ok(cudaMalloc(&memory, kAllocation)) && Ok(cudaIpcGetMemHandle(&hello.memory, memory)));
  LRMOE_IPC_OR_FAIL(Ok(cudaEventCreateWithFlags(&ready, cudaEventDisableTiming | cudaEventInterprocess)));
  LRMOE_IPC_OR_FAIL(Ok(cudaIpcGetEventHandle(&hello.ready, ready)));
  LRMOE_IPC_OR_FAIL(Send(out, &hello, sizeof(hello)));
  cudaIpcEventHandle_t handle;
  LRMOE_IPC_OR_FAIL(Receive(in, &handle, sizeof(handle)) && Ok(cudaIpcOpenEventHandle(&done, handle)));
  char* const rows = memory + kRowsBytes;
  std::vector<float> sent(kWidth * kRows), received(kWidth * kRows);
  for (int round = 0; round < kRounds; ++round) {
    for (size_t i = 0; i < sent.size(); ++i)
      sent[i] = static_cast<float>(i % 8191 + 1) * static_cast<float>(round + 1);
    LRMOE_IPC_OR_FAIL(Ok(cudaMemset(rows, 0xFF, 2 * kRowsBytes)) && Ok(cudaDeviceSynchronize()));
    LRMOE_IPC_OR_FAIL(Ok(cudaLaunchHostFunc(stream, WaitForGo, &in)));
    LRMOE_IPC_OR_FAIL(Ok(cudaMemcpyAsync(rows, sent.data(), kRowsBytes, cudaMemcpyHostToDevice, stream)));
    LRMOE_IPC_OR_FAIL(Ok(cudaEventRecord(ready, stream)) && Send(out, "r", 1));
    // The answer may come after "go" only, which the host function takes first.
    LRMOE_IPC_OR_FAIL(Ok(cudaStreamSynchronize(stream)));
    char answer = 0;
    LRMOE_IPC_OR_FAIL(Receive(in, &answer, 1) && answer == 'o');
    LRMOE_IPC_OR_FAIL(Ok(cudaStreamWaitEvent(stream, done, 0)));
    LRMOE_IPC_OR_FAIL(
        Ok(cudaMemcpyAsync(received.data(), rows + kRowsBytes, kRowsBytes, cudaMemcpyDeviceToHost, stream)));
    LRMOE_IPC_OR_FAIL(Ok(cudaStreamSynchronize(stream)));
    for (int64_t row = 0; row < kRows; ++row)
      LRMOE_IPC_OR_FAIL(std::memcmp(&received[row * kWidth], &sent[(kRows - 1 - row) * kWidth], kWidth * 4) ==
                        0);
  }
  char closed = 0;
  LRMOE_IPC_OR_FAIL(Receive(in, &closed, 1));
  LRMOE_IPC_OR_FAIL(Ok(cudaEventDestroy(done)) && Ok(cudaFree(memory)));
  return 0;
}

}  // namespace lrmoe::gpu
