// A training process for end-to-end tests: attaches to its worker, loads seeded experts and runs forward,
// backward and optimizer steps, printing "rank R step S" after each. Options pick how a rank ends.
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <span>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/random.h"
#include "worker/client/session.h"

namespace lrmoe {
namespace {

struct Plan {
  int64_t steps = 1000000;
  int64_t stop_rank = -1, stop_step = 0;  // this rank leaves after this step
  int stop_status = 0;
  int64_t mistakes_step =
      0;                 // before this step rank 1 makes every kind of mistake; all ranks must get the error
  std::string wait_for;  // the other ranks wait for this file after their last step
};

constexpr int32_t kHidden = 16, kIntermediate = 8, kTopK = 2, kExperts = 4;
constexpr int64_t kTokens = 32;

ModelSpec Model() {
  return {.num_layers = 1,
          .shape = {.num_experts = kExperts,
                    .top_k = kTopK,
                    .hidden_size = kHidden,
                    .intermediate_size = kIntermediate,
                    .dtype = DataType::kFp32}};
}

int Fail(int64_t rank, const absl::Status& status) {
  std::cerr << "rank " << rank << " error: " << status << std::endl;
  return 9;
}

template <typename T>
std::span<T> Take(std::span<std::byte>& memory, size_t count) {
  const std::span<T> taken(reinterpret_cast<T*>(memory.data()), count);
  memory = memory.subspan((count * sizeof(T) + 63) / 64 * 64);
  return taken;
}

absl::Status LoadExperts(client::Session& session, std::span<std::byte> memory) {
  const auto gate_up = Take<float>(memory, size_t{2} * kIntermediate * kHidden);
  const auto down = Take<float>(memory, size_t{kHidden} * kIntermediate);
  for (const int32_t expert : session.owned_experts()) {
    Random random(static_cast<uint64_t>(expert) + 1);
    for (float& weight : gate_up) weight = static_cast<float>(random.Uniform() - 0.5);
    for (float& weight : down) weight = static_cast<float>(random.Uniform() - 0.5);
    const absl::Status status =
        session.LoadExpert(0, expert, DataType::kFp32, std::as_bytes(gate_up), std::as_bytes(down));
    if (!status.ok()) return status;
  }
  return session.FinishLoad(0).status();
}

// Rank 1 calls what the others do not, or with bad content. Every rank prints the error it got; none may
// succeed.
absl::Status MakeMistakes(client::Session& session, int64_t rank, int64_t step,
                          client::ForwardTensors tensors, std::span<int32_t> ids) {
  const auto expect_error = [rank](const char* mistake, const absl::Status& status) {
    std::cout << absl::StrCat("rank ", rank, " refused ", mistake, ": ", std::string(status.message()), "\n")
              << std::flush;
    return status.ok() ? absl::InternalError(absl::StrCat(mistake, " was accepted")) : absl::OkStatus();
  };
  const bool wrong = rank == 1;
  const Invocation good{.step = step};
  absl::Status status =
      expect_error("step", session.Forward(wrong ? Invocation{.step = step + 1} : good, tensors).status());
  if (!status.ok()) return status;
  status = expect_error("layer", session.Forward({.step = step, .layer = wrong ? 9 : 0}, tensors).status());
  if (!status.ok()) return status;
  status =
      expect_error("operation", wrong ? session.ZeroGradients() : session.Forward(good, tensors).status());
  if (!status.ok()) return status;
  const int32_t kept = ids[3];
  if (wrong) ids[3] = kExperts;
  status = expect_error("expert", session.Forward(good, tensors).status());
  ids[3] = kept;
  return status;
}

int Train(int64_t rank, const Plan& plan) {
  const char* socket = std::getenv("LRMOE_SOCKET");
  if (socket == nullptr) return Fail(rank, absl::NotFoundError("LRMOE_SOCKET is not set"));
  client::Options options;
  options.socket = socket;
  options.model = Model();
  auto attached = client::Session::Attach(options);
  if (!attached.ok()) return Fail(rank, attached.status());
  client::Session& session = **attached;
  auto arena = session.CreateArena(1 << 16);
  if (!arena.ok()) return Fail(rank, arena.status());
  if (const absl::Status loaded = LoadExperts(session, (*arena)->memory()); !loaded.ok())
    return Fail(rank, loaded);

  std::span<std::byte> memory = (*arena)->memory();
  const auto x = Take<float>(memory, kTokens * kHidden), y = Take<float>(memory, kTokens * kHidden);
  const auto dx = Take<float>(memory, kTokens * kHidden);
  const auto ids = Take<int32_t>(memory, kTokens * kTopK);
  const auto alpha = Take<float>(memory, kTokens * kTopK), dalpha = Take<float>(memory, kTokens * kTopK);
  Random random(static_cast<uint64_t>(rank) + 100);
  for (int64_t step = 1; step <= plan.steps; ++step) {
    for (float& value : x) value = static_cast<float>(random.Uniform() - 0.5);
    for (int64_t t = 0; t < kTokens; ++t) {
      ids[t * kTopK] = static_cast<int32_t>(random.Below(kExperts));
      ids[t * kTopK + 1] = static_cast<int32_t>((ids[t * kTopK] + 1 + random.Below(kExperts - 1)) % kExperts);
      alpha[t * kTopK] = 0.75f;
      alpha[t * kTopK + 1] = 0.25f;
    }
    const Invocation invocation{.step = step};
    const client::ForwardTensors tensors{.num_tokens = kTokens,
                                         .x = std::as_bytes(x),
                                         .expert_idx = ids,
                                         .alpha = alpha,
                                         .y = std::as_writable_bytes(y)};
    if (step == plan.mistakes_step) {
      if (const auto refused = MakeMistakes(session, rank, step, tensors, ids); !refused.ok())
        return Fail(rank, refused);
    }
    const auto forward = session.Forward(invocation, tensors);
    if (!forward.ok()) return Fail(rank, forward.status());
    const auto backward = session.Backward(
        invocation,
        {.num_tokens = kTokens, .dy = std::as_bytes(y), .dx = std::as_writable_bytes(dx), .dalpha = dalpha});
    if (!backward.ok()) return Fail(rank, backward.status());
    if (const auto updated = session.OptimizerStep({.step = step}); !updated.ok())
      return Fail(rank, updated.status());
    if (const auto zeroed = session.ZeroGradients(); !zeroed.ok()) return Fail(rank, zeroed);
    std::cout << absl::StrCat("rank ", rank, " step ", step, "\n") << std::flush;
    if (rank == plan.stop_rank && step == plan.stop_step) return plan.stop_status;
  }
  while (!plan.wait_for.empty() && rank != plan.stop_rank && access(plan.wait_for.c_str(), F_OK) != 0)
    usleep(10000);
  return 0;
}

}  // namespace
}  // namespace lrmoe

int main(int argc, char** argv) {
  lrmoe::Plan plan;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    int64_t number = 0;
    (void)absl::SimpleAtoi(argv[i + 1], &number);
    if (name == "--steps") plan.steps = number;
    if (name == "--stop-rank") plan.stop_rank = number;
    if (name == "--stop-step") plan.stop_step = number;
    if (name == "--stop-status") plan.stop_status = static_cast<int>(number);
    if (name == "--mistakes-step") plan.mistakes_step = number;
    if (name == "--wait-for") plan.wait_for = argv[i + 1];
  }
  const char* rank = std::getenv("RANK");
  int64_t number = 0;
  if (rank == nullptr || !absl::SimpleAtoi(rank, &number)) return 2;
  std::cout << absl::StrCat("rank ", number, " pid ", getpid(), "\n") << std::flush;
  return lrmoe::Train(number, plan);
}
