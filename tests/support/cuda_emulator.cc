#include "tests/support/cuda_emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <vector>

#include "common/random.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define LRMOE_FIBER_SANITIZER 1
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
// Left for the scheduler in the middle, at the end of a block for good: the thread sanitizer must not count
// on its return.
#define LRMOE_NEVER_RETURNS __attribute__((no_sanitize_thread))
#else
#define LRMOE_NEVER_RETURNS
#endif

// Where no sanitizer follows the stacks, fibers are kept from block to block and switched to without system
// calls.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LRMOE_FIBER_JUMPS 0
#else
#define LRMOE_FIBER_JUMPS 1
#endif

namespace lrmoe::emulator {
namespace {

constexpr size_t kStackBytes = 256 * 1024;  // sanitizers make frames large

struct Fiber {
  ucontext_t context;  // where it starts
  jmp_buf jump;        // where it goes on
  bool started = false;
  unsigned char* stack = nullptr;
  ThreadPlace place;
  enum class State : uint8_t { kReady, kBarrier, kWarp, kDone } state = State::kReady;
  uint64_t warp_generation = 0;  // waits for its warp to pass this one
  void* fake_stack = nullptr;    // the address sanitizer's
  void* followed = nullptr;      // the thread sanitizer's
};

struct Warp {
  uint64_t generation = 0;  // exchanges completed
  uint32_t arrived = 0;
  uint32_t mask = 0;
  WarpOperation operation = WarpOperation::kShuffle;
  uint64_t values[32];
  // Two, because a lane may deposit for the next exchange before another has read the last one's results.
  uint64_t results[2][32];
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::unique_ptr<unsigned char[]> shared;
  const std::function<void()>* thread = nullptr;
  size_t current = 0;
  unsigned at_barrier = 0;
  unsigned done = 0;
  ucontext_t scheduler;
  jmp_buf scheduler_jump;
  void* scheduler_fake_stack = nullptr;
  void* scheduler_followed = nullptr;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
};

thread_local Block* g_block = nullptr;

// Stacks are kept from kernel to kernel: mapping them anew costs more than most test kernels.
unsigned char* Stack(unsigned index) {
  thread_local std::vector<std::unique_ptr<unsigned char[]>> stacks;
  while (stacks.size() <= index) stacks.emplace_back(new unsigned char[kStackBytes]);
  return stacks[index].get();
}

#if defined(__SANITIZE_THREAD__)
// As the thread sanitizer sees a fiber: kept like its stack.
void* Followed(unsigned index) {
  struct Fibers {
    std::vector<void*> all;
    ~Fibers() {
      for (void* fiber : all) __tsan_destroy_fiber(fiber);
    }
  };
  thread_local Fibers fibers;
  while (fibers.all.size() <= index) fibers.all.push_back(__tsan_create_fiber(0));
  return fibers.all[index];
}
#endif

[[noreturn]] void Misuse(const char* what) {
  std::fprintf(stderr, "cuda emulator: %s\n", what);
  std::abort();
}

Fiber& Current() {
  if (g_block == nullptr) Misuse("device code called outside a kernel");
  return g_block->fibers[g_block->current];
}

// From a fiber to the scheduler, until the scheduler resumes it.
LRMOE_NEVER_RETURNS void SwitchToScheduler(Fiber& fiber) {
#if LRMOE_FIBER_SANITIZER
  __sanitizer_start_switch_fiber(fiber.state == Fiber::State::kDone ? nullptr : &fiber.fake_stack,
                                 g_block->scheduler_stack, g_block->scheduler_stack_bytes);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(g_block->scheduler_followed, 0);
#endif
#if LRMOE_FIBER_JUMPS
  if (_setjmp(fiber.jump) == 0) _longjmp(g_block->scheduler_jump, 1);
#else
  swapcontext(&fiber.context, &g_block->scheduler);
#endif
#if LRMOE_FIBER_SANITIZER
  __sanitizer_finish_switch_fiber(fiber.fake_stack, &g_block->scheduler_stack,
                                  &g_block->scheduler_stack_bytes);
#endif
}

LRMOE_NEVER_RETURNS void FiberMain() {
#if LRMOE_FIBER_SANITIZER
  __sanitizer_finish_switch_fiber(nullptr, &g_block->scheduler_stack, &g_block->scheduler_stack_bytes);
#endif
  while (true) {  // once per block
    (*g_block->thread)();
    Fiber& fiber = Current();
    fiber.state = Fiber::State::kDone;
    ++g_block->done;
    SwitchToScheduler(fiber);
  }
}

void Resume(Block& block, size_t index) {
  block.current = index;
  Fiber& fiber = block.fibers[index];
#if LRMOE_FIBER_SANITIZER
  __sanitizer_start_switch_fiber(&block.scheduler_fake_stack, fiber.stack, kStackBytes);
#endif
#if defined(__SANITIZE_THREAD__)
  block.scheduler_followed = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber.followed, 0);
#endif
#if LRMOE_FIBER_JUMPS
  if (_setjmp(block.scheduler_jump) == 0) {
    if (fiber.started) _longjmp(fiber.jump, 1);
    fiber.started = true;
    setcontext(&fiber.context);
  }
#else
  swapcontext(&block.scheduler, &fiber.context);
#endif
#if LRMOE_FIBER_SANITIZER
  __sanitizer_finish_switch_fiber(block.scheduler_fake_stack, nullptr, nullptr);
#endif
}

bool Ready(const Block& block, size_t index) {
  const Fiber& fiber = block.fibers[index];
  if (fiber.state == Fiber::State::kWarp) return block.warps[index / 32].generation > fiber.warp_generation;
  return fiber.state == Fiber::State::kReady;
}

void ReleaseBarrier(Block& block) {
  block.at_barrier = 0;
  for (Fiber& fiber : block.fibers)
    if (fiber.state == Fiber::State::kBarrier) fiber.state = Fiber::State::kReady;
}

// 0 .. n - 1, every time in another order, the same ones in each run of the program.
void Shuffle(size_t n, std::vector<size_t>& order) {
  thread_local Random random(1);
  order.resize(n);
  std::iota(order.begin(), order.end(), size_t{0});
  for (size_t i = n; i > 1; --i) std::swap(order[i - 1], order[random.Below(i)]);
}

void RunBlock(Block& block) {
  std::vector<size_t> order;
  while (block.done < block.fibers.size()) {
    bool progress = false;
    Shuffle(block.fibers.size(), order);
    for (const size_t i : order) {
      if (!Ready(block, i)) continue;
      block.fibers[i].state = Fiber::State::kReady;
      Resume(block, i);
      progress = true;
    }
    if (block.at_barrier > 0 && block.at_barrier + block.done == block.fibers.size()) {
      ReleaseBarrier(block);
      progress = true;
    }
    if (!progress) Misuse("deadlock: threads wait at a barrier or warp operation that others never reach");
  }
}

void StartBlock(Block& block, unsigned block_index, unsigned blocks, size_t shared_bytes) {
  // Exactly as large as asked for, so that the address sanitizer sees an access beyond it.
  block.shared = std::make_unique<unsigned char[]>(shared_bytes);
  std::memset(block.shared.get(), 0xFF, shared_bytes);
  block.warps.assign((block.fibers.size() + 31) / 32, Warp{});
  block.at_barrier = block.done = 0;
  for (size_t i = 0; i < block.fibers.size(); ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.state = Fiber::State::kReady;
    fiber.fake_stack = nullptr;
    fiber.place.thread_idx.x = static_cast<unsigned>(i);
    fiber.place.block_idx = {block_index, 0, 0};
    fiber.place.thread_idx.y = fiber.place.thread_idx.z = 0;
    fiber.place.block_dim = {static_cast<unsigned>(block.fibers.size()), 1, 1};
    fiber.place.grid_dim = {blocks, 1, 1};
    if (fiber.started) continue;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, FiberMain, 0);
  }
}

}  // namespace

const ThreadPlace& Place() {
  return Current().place;
}

int Lane() {
  return static_cast<int>(Place().thread_idx.x % 32);
}

unsigned char* SharedBytes() {
  return g_block->shared.get();
}

void SyncThreads() {
  Fiber& fiber = Current();
  fiber.state = Fiber::State::kBarrier;
  ++g_block->at_barrier;
  SwitchToScheduler(fiber);
}

const uint64_t* WarpExchange(WarpOperation operation, uint32_t mask, uint64_t value) {
  Fiber& fiber = Current();
  const uint32_t lane_bit = 1u << (g_block->current % 32);
  Warp& warp = g_block->warps[g_block->current / 32];
  if ((mask & lane_bit) == 0) Misuse("a thread calls a warp operation whose mask leaves it out");
  if (warp.arrived == 0) {
    warp.operation = operation;
    warp.mask = mask;
    std::memset(warp.values, 0, sizeof warp.values);
  } else if (warp.operation != operation || warp.mask != mask) {
    Misuse("threads of a warp meet in different operations or with different masks");
  }
  warp.values[g_block->current % 32] = value;
  warp.arrived |= lane_bit;
  const uint64_t generation = warp.generation;
  if (warp.arrived == mask) {
    std::memcpy(warp.results[generation % 2], warp.values, sizeof warp.values);
    warp.arrived = 0;
    ++warp.generation;
  } else {
    fiber.state = Fiber::State::kWarp;
    fiber.warp_generation = generation;
    SwitchToScheduler(fiber);
  }
  return warp.results[generation % 2];
}

void Launch(void* stream, unsigned blocks, unsigned threads, size_t shared_bytes,
            const std::function<void()>& thread) {
  if (stream == nullptr) return Run(blocks, threads, shared_bytes, thread);
  static_cast<StreamQueue*>(stream)->Add([=] { Run(blocks, threads, shared_bytes, thread); });
}

void Run(unsigned blocks, unsigned threads, size_t shared_bytes, const std::function<void()>& thread) {
  if (threads == 0 || threads > 1024) Misuse("threads per block outside 1..1024");
  if (shared_bytes > 227 * 1024) Misuse("more dynamic shared memory than any supported device has");
  if (g_block != nullptr) Misuse("kernels do not nest");
  Block block;
  block.thread = &thread;
  block.fibers.resize(threads);
  for (unsigned i = 0; i < threads; ++i) {
    block.fibers[i].stack = Stack(i);
#if defined(__SANITIZE_THREAD__)
    block.fibers[i].followed = Followed(i);
#endif
  }
  g_block = &block;
  std::vector<size_t> order;
  Shuffle(blocks, order);
  for (const size_t index : order) {
    StartBlock(block, static_cast<unsigned>(index), blocks, shared_bytes);
    RunBlock(block);
  }
  g_block = nullptr;
}

}  // namespace lrmoe::emulator
