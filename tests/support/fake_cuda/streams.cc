// Streams and events: who waits makes the work happen. Half of the time no more of it than he waits for, half
// of the time first what is on all streams, in any order of these.
#include <sched.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

#include "common/random.h"
#include "tests/support/fake_cuda/state.h"

void CUstream_st::Add(std::function<void()> work) {
  using namespace lrmoe::fake_cuda;  // NOLINT: a class of CUDA's
  const Lock lock(Mutex());
  Known(this, "kernel launch");
  if (CurrentDevice() != device) Misuse("a kernel is launched on the stream of a device that is not current");
  if (!NoOlderError()) Misuse("an older error is pending, which the launch's check would take for its own");
  Enqueue(*this, [work = std::move(work)] {
    Touch();
    work();
    return true;
  });
}

namespace lrmoe::fake_cuda {
namespace {

std::shared_ptr<Stream> AddStream(int device) {
  auto stream = std::make_shared<Stream>(device);
  Its().streams[stream.get()] = stream;
  return stream;
}

// cudaStreamPerThread: one per thread and device. Nothing that the test counts.
Stream& OfThread() {
  thread_local std::map<int, std::shared_ptr<Stream>> streams;
  std::shared_ptr<Stream>& stream = streams[CurrentDevice()];
  if (stream == nullptr) stream = std::make_shared<Stream>(CurrentDevice());
  return *stream;
}

void PerhapsOthersFirst() {
  static Random random(1);
  if (random.Below(2) == 0) return;
  std::vector<std::shared_ptr<Stream>> others;
  for (const auto& [_, stream] : Its().streams) others.push_back(stream);
  for (size_t left = others.size(); left > 0; --left) {
    std::swap(others[random.Below(left)], others[left - 1]);
    Advance(*others[left - 1], others[left - 1]->added);
  }
}

void Wait(Lock& lock, const char* function, const std::function<bool()>& done) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  {
    const Access access;
    PerhapsOthersFirst();
  }
  while (true) {
    {
      const Access access;
      if (done()) return;
    }
    if (std::chrono::steady_clock::now() > until)
      Misuse(std::string(function) + ": a wait that does not end");
    lock.unlock();
    sched_yield();
    lock.lock();
  }
}

}  // namespace

void Misuse(const std::string& what) {
  std::fprintf(stderr, "fake cuda: %s\n", what.c_str());
  std::abort();
}

Stream& Known(cudaStream_t stream, const char* function) {
  if (stream == cudaStreamPerThread) return OfThread();
  if (!Its().streams.contains(stream)) Misuse(std::string(function) + ": no such stream, or one destroyed");
  return *stream;
}
CUevent_st& Known(cudaEvent_t event, const char* function) {
  if (!Its().events.contains(event)) Misuse(std::string(function) + ": no such event, or one destroyed");
  return *event;
}

void Enqueue(Stream& stream, FakeStep step) {
  stream.steps.push_back(std::move(step));
  ++stream.added;
}

bool Advance(Stream& stream, uint64_t end) {
  while (stream.done < end) {
    if (stream.running) return false;  // it waits, through others, for itself
    stream.running = true;
    const bool done = stream.steps.front()();
    stream.running = false;
    if (!done) return false;
    stream.steps.pop_front();
    ++stream.done;
  }
  return true;
}

bool Reached(Mark& mark) {
  if (!mark.fired && mark.stream != nullptr) Advance(*mark.stream, mark.end);
  return mark.fired;
}

void Finish(Stream& stream, Lock& lock, const char* function) {
  const uint64_t end = stream.added;
  const std::shared_ptr<Stream> kept = stream.shared_from_this();
  Wait(lock, function, [&] { return Advance(*kept, end); });
}

void FinishDevice(int device, Lock& lock, const char* function) {
  Wait(lock, function, [device] {
    bool done = true;
    for (const auto& [_, stream] : std::map(Its().streams))
      if (stream->device == device) done &= Advance(*stream, stream->added);
    return done;
  });
}

}  // namespace lrmoe::fake_cuda

using namespace lrmoe::fake_cuda;  // NOLINT: what follows are CUDA's own functions

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  const Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  if (flags != cudaStreamNonBlocking) Misuse("a stream that waits for the legacy one; not in this fake");
  *stream = AddStream(CurrentDevice()).get();
  return cudaSuccess;
}

// What it still has to do it does; as far as that is possible, here.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const Lock lock(Mutex());
  Stream& gone = Known(stream, __func__);
  const std::shared_ptr<Stream> kept = gone.shared_from_this();
  {
    const Access access;
    Advance(gone, gone.added);
  }
  Its().streams.erase(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  Finish(Known(stream, __func__), lock, __func__);
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  const Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  if (flags != 0) return Return(cudaErrorInvalidValue);
  Stream& waits = Known(stream, __func__);
  const std::shared_ptr<Mark> mark = Known(event, __func__).state->last;
  if (mark != nullptr) Enqueue(waits, [mark] { return Reached(*mark); });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  const Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  if ((flags & cudaEventInterprocess) != 0 && (flags & cudaEventDisableTiming) == 0)
    return Return(cudaErrorInvalidValue);
  auto made = std::make_unique<CUevent_st>();
  made->device = CurrentDevice();
  made->flags = flags;
  made->state = std::make_shared<EventState>();
  *event = made.get();
  Its().events[*event] = std::move(made);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const Lock lock(Mutex());
  Known(event, __func__);
  Its().events.erase(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  CUevent_st& recorded = Known(event, __func__);
  Stream& on = Known(stream, __func__);
  if (recorded.device != on.device) return Return(cudaErrorInvalidResourceHandle);
  auto mark = std::make_shared<Mark>();
  Enqueue(on, [mark] {
    mark->fired = true;
    mark->stream.reset();
    return true;
  });
  mark->stream = on.shared_from_this();
  mark->end = on.added;
  recorded.state->last = std::move(mark);
  return cudaSuccess;
}

// The first question is always too early.
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  const std::shared_ptr<Mark> mark = Known(event, __func__).state->last;
  if (mark == nullptr || mark->fired) return cudaSuccess;
  if (!std::exchange(mark->asked, true)) return Return(cudaErrorNotReady);
  const Access access;
  PerhapsOthersFirst();
  return Return(Reached(*mark) ? cudaSuccess : cudaErrorNotReady);
}
