// Valid domain values to start from: seeded, of every message.
#pragma once

#include "common/plan.h"
#include "common/random.h"
#include "common/session.h"

namespace lrmoe::test {

ModelSpec SampleModel();
// E experts on G ranks under contiguous ownership, some replicas, random rows that are conserved.
ExecutionPlan RandomPlan(Random& random, int32_t num_experts, int32_t num_ranks);
InvocationReport RandomReport(Random& random);
WorkerMessage RandomWorkerMessage(Random& random);
ControllerMessage RandomControllerMessage(Random& random);

}  // namespace lrmoe::test
