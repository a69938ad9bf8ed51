// A core that goes on after another one.
#include <catch2/catch.hpp>

#include "controller/core/core.h"

namespace lrmoe::core {
namespace {

Hello HelloOf(int32_t rank, Epoch epoch = Epoch{0}) {
  return {.rank_idx = rank, .world_size = 2, .job = "job", .node = "n", .replica_slots = 3, .epoch = epoch};
}

ModelSpec Model() {
  ModelSpec model{.num_layers = 2};
  model.shape = {.num_experts = 4, .top_k = 1, .hidden_size = 8, .intermediate_size = 8};
  return model;
}

void Join(Core& core, uint64_t first_session, Epoch epoch = Epoch{0}) {
  for (int32_t rank = 0; rank < 2; ++rank) {
    const SessionId session{first_session + static_cast<uint64_t>(rank)};
    core.Step(SessionOpened{session}, 1);
    core.Step(SessionMessage{session, HelloOf(rank, epoch)}, 1);
    core.Step(SessionMessage{session, Model()}, 1);
  }
}

EpochRecord Left() {
  Core core(CoreOptions{});
  Join(core, 1);
  return core.epoch_record();
}

TEST_CASE("restore: an epoch that was cut short is waited for, and its ranks resume it") {
  const EpochRecord left = Left();
  CHECK(left.epoch == Epoch{1});
  CHECK(left.state == EpochState::kRunning);
  CHECK(left.hellos == std::vector<Hello>{HelloOf(0), HelloOf(1)});
  CHECK(left.model == Model());

  Core core(CoreOptions{});
  core.Restore(left, Epoch{7}, 40);
  CHECK(core.epoch() == Epoch{1});
  CHECK(core.state() == EpochState::kWaiting);
  CHECK(core.reason() == "the controller was restarted; the epoch goes on when its ranks are back");
  CHECK(core.model() == Model());
  CHECK(core.current_step() == 40);
  CHECK(core.MissingRanks(0) == std::vector<int32_t>{0, 1});
  CHECK(core.NextTick() == INT64_MAX);
  Join(core, 1, Epoch{1});
  CHECK(core.epoch() == Epoch{1});
  CHECK(core.state() == EpochState::kRunning);
  CHECK(core.reason().empty());
}

TEST_CASE("restore: a new job gets a number that no epoch had") {
  for (const EpochState state : {EpochState::kRunning, EpochState::kEnded, EpochState::kAborted}) {
    EpochRecord left = Left();
    left.state = state;
    left.reason = "as it was";
    Core core(CoreOptions{});
    core.Restore(left, Epoch{7}, 40);
    if (state != EpochState::kRunning) {
      CHECK(core.state() == state);
      CHECK(core.reason() == "as it was");
      CHECK(core.MissingRanks(0).empty());
    }
    Join(core, 1);
    CHECK(core.epoch() == Epoch{7});
    CHECK(core.state() == EpochState::kRunning);
    CHECK(core.current_step() == 0);
  }
}

TEST_CASE("restore: nothing was left but numbers") {
  Core core(CoreOptions{});
  core.Restore({}, Epoch{17}, 0);
  CHECK(core.epoch() == Epoch{0});
  CHECK(core.members().empty());
  core.Step(Stop{"over"}, 1);
  Core other(CoreOptions{});
  other.Restore(Left(), Epoch{17}, 0);
  other.Step(Stop{"over"}, 1);  // no job to abort
  CHECK(other.state() == EpochState::kWaiting);
}

}  // namespace
}  // namespace lrmoe::core
