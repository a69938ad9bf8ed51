// What the cases of the conformance suite are made of.
#pragma once

#include <cstdint>
#include <vector>

#include "common/random.h"
#include "tests/contract/transport/conformance.h"

namespace lrmoe::transport {

using Bytes = std::vector<std::byte>;
inline constexpr std::byte kPoison{0xA5};

// Far enough that only a hang reaches it.
Call Far(absl::string_view operation);

// What `from` sends to `to` in exchange number `exchange`.
Bytes FilledBlock(int64_t exchange, int32_t from, int32_t to, int64_t size);

// sizes[from][to]
using Matrix = std::vector<std::vector<int64_t>>;
Matrix RandomSizes(Random& random, int32_t size);

// AllToAllV of these sizes, every byte checked.
void ExchangeAndCheck(Transport& t, Expectations& expect, const Matrix& sizes, int64_t exchange);

// Dead: every operation says so at once, and the arguments do not matter.
void ExpectDead(Transport& t, Expectations& expect);

// Brings the ranks together. A faster rank may leave the barrier and end the epoch while this one is still in
// it: then this rank learns of the end here, and has nothing left to do.
bool StartTogether(Transport& t, Expectations& expect);

// Exchanges that are started and finished later (conformance_started.cc).
std::vector<ConformanceCase> StartedCases();

}  // namespace lrmoe::transport
