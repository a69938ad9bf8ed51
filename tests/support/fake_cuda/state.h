// What the parts of the fake share. Everything here is guarded by one mutex, which every call holds while it
// runs; work of streams runs under it as well, in the thread that asked for it.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "tests/support/fake_cuda/fake_cuda.h"
#include "tests/support/stream_queue.h"

// One step of a stream: true when it is done, else it is tried again later.
using FakeStep = std::function<bool()>;

struct CUstream_st final : lrmoe::emulator::StreamQueue, std::enable_shared_from_this<CUstream_st> {
  explicit CUstream_st(int its_device) : device(its_device) {}
  void Add(std::function<void()> work) override;  // a kernel; takes the mutex

  const int device;
  std::deque<FakeStep> steps;
  uint64_t added = 0, done = 0;
  bool running = false;
};

namespace lrmoe::fake_cuda {

// A place in a stream that an event marks. Of another process: no stream, fires when told.
struct Mark {
  std::shared_ptr<CUstream_st> stream;
  uint64_t end = 0;
  bool fired = false;
  bool asked = false;
};
// An event's last record; shared by the processes that have the event.
struct EventState {
  std::shared_ptr<Mark> last;
};

}  // namespace lrmoe::fake_cuda

struct CUevent_st {
  int device = 0;
  unsigned flags = 0;
  std::shared_ptr<lrmoe::fake_cuda::EventState> state;
};

namespace lrmoe::fake_cuda {

using Stream = CUstream_st;
using Lock = std::unique_lock<std::mutex>;

[[noreturn]] void Misuse(const std::string& what);
std::mutex& Mutex();

enum class Kind : uint8_t { kMalloc, kPool, kMapped, kOpened, kPinned };

// A piece of memory with one fate.
struct Block {
  std::byte* base = nullptr;
  int64_t bytes = 0;   // that may be used
  int64_t mapped = 0;  // whole pages
  int device = 0;
  Kind kind = Kind::kMalloc;
  bool accessible = true;  // mapped memory: after cuMemSetAccess
};

struct State {
  bool driver = true;
  int devices = 8;
  int64_t memory_bytes = int64_t{8} << 30;
  std::map<int, int64_t> used_bytes;  // by device
  struct Failure {
    int error, nth;
  };
  std::map<std::string, Failure> failures;
  std::map<const std::byte*, Block> blocks;  // by base
  std::map<Stream*, std::shared_ptr<Stream>> streams;
  std::map<cudaEvent_t, std::unique_ptr<CUevent_st>> events;
  std::map<std::byte*, int64_t> reservations;
  struct Foreign {
    std::byte* theirs;
    int64_t bytes;
    int file, device;
    std::byte* opened;
  };
  std::map<std::string, Foreign> foreign;
  std::map<std::string, std::weak_ptr<EventState>> shared_events;
  std::map<std::string, std::shared_ptr<EventState>> foreign_events;  // kept by the other process
  int64_t blas_handles = 0, communicators = 0;
  Gemms gemms;
  int waiting = 0;    // Access objects
  bool open = false;  // the memory of devices
};
State& Its();

// The error that this call was told to fail with, 0: none. With the mutex.
int Injected(const char* function);
// Also the thread's last error, as cudaGetLastError gives it.
cudaError_t Return(cudaError_t error);
int CurrentDevice();
bool NoOlderError();
// What every call finds first: no driver, no device, or what was injected.
cudaError_t Enter(const char* function);

Stream& Known(cudaStream_t stream, const char* function);
CUevent_st& Known(cudaEvent_t event, const char* function);
void Enqueue(Stream& stream, FakeStep step);

// While it lives, steps run; the first that touches memory opens all of it. With the mutex.
class Access {
 public:
  Access();
  ~Access();
  Access(const Access&) = delete;
  Access& operator=(const Access&) = delete;
};
void Touch();  // before a step reads or writes
// Runs a stream up to its step number `end`; false when something is not done yet. Needs Access.
bool Advance(Stream& stream, uint64_t end);
bool Reached(Mark& mark);
// Until `stream` is done, giving others the mutex meanwhile. Aborts when that takes a minute: a device would
// hang.
void Finish(Stream& stream, Lock& lock, const char* function);
void FinishDevice(int device, Lock& lock, const char* function);

// The block that has this address; null: host memory.
Block* Find(const void* pointer);
// Whether [pointer, pointer + bytes) is usable memory of one device; misuse when only a part of it is.
bool OnDevice(const void* pointer, int64_t bytes, const char* what);
void ExpectOnDevice(const void* pointer, int64_t bytes, int device, const std::string& what);
// Maps and poisons a block. False: the device has not so much.
bool Allocate(int64_t bytes, int device, Kind kind, std::byte** base);
void Release(std::byte* base);
// Poisoned and closed, at a reserved address.
void AddBlock(const Block& block);
void Protect(const Block& block);

}  // namespace lrmoe::fake_cuda
