// What every implementation of the transport contract shares: the checks of the arguments, the wording of
// errors and the arithmetic of reductions, so that all implementations refuse and round alike.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "worker/transport/transport.h"

namespace lrmoe::transport {

// "rank 1, forward dispatch (step 3 layer 1 micro-batch 0)": how every error message begins.
std::string Where(const Call& call, int32_t rank);

// "rank 2" or "ranks 2, 3"; of more than eight, the first eight and how many more.
std::string RankList(const std::vector<int32_t>& ranks);

absl::Status MissingRanks(const Call& call, int32_t rank, const std::vector<int32_t>& missing);
absl::Status EpochIsDead(const Call& call, int32_t rank, absl::string_view reason);

// InvalidArgument unless sizes has one entry >= 0 per rank and they add up (in 64 bits, checked) to
// buffer_bytes. `what` names the argument: "send" or "recv".
absl::Status CheckSizes(const Call& call, int32_t rank, absl::string_view what,
                        std::span<const int64_t> sizes, int32_t num_ranks, size_t buffer_bytes);
// Both directions, and that the own parts agree.
absl::Status CheckAllToAllV(const Call& call, int32_t rank, int32_t num_ranks,
                            std::span<const std::byte> send, std::span<const int64_t> send_bytes,
                            std::span<const std::byte> recv, std::span<const int64_t> recv_bytes);
// As many parts as ranks in each direction, own parts that agree, and room for one more beside `started`.
absl::Status CheckStart(const Call& call, int32_t rank, int32_t num_ranks, SendParts send, RecvParts recv,
                        int started);
absl::Status CheckAllGather(const Call& call, int32_t rank, int32_t num_ranks, size_t send_bytes,
                            size_t recv_bytes);
absl::Status CheckRoot(const Call& call, int32_t rank, int32_t num_ranks, int32_t root);

// The parts of a buffer whose sizes were checked.
template <typename Byte>
void Split(std::span<Byte> buffer, std::span<const int64_t> sizes, std::vector<std::span<Byte>>& parts) {
  parts.clear();
  for (int64_t size : sizes) {
    parts.push_back(buffer.first(size));
    buffer = buffer.subspan(size);
  }
}

// accumulator[i] = accumulator[i] (reduction) values[i]. Integers wrap; a NaN on either side gives NaN.
void Accumulate(Reduction reduction, std::span<int64_t> accumulator, const int64_t* values);
void Accumulate(Reduction reduction, std::span<double> accumulator, const double* values);

}  // namespace lrmoe::transport
