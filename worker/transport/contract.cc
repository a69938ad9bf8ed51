#include "worker/transport/contract.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace lrmoe::transport {

std::string Where(const Call& call, int32_t rank) {
  return absl::StrCat("rank ", rank, ", ", call.operation, " (", ToString(call.invocation), ")");
}

std::string RankList(const std::vector<int32_t>& ranks) {
  constexpr size_t kNamed = 8;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size() && i < kNamed; ++i) absl::StrAppend(&text, i ? ", " : "", ranks[i]);
  if (ranks.size() > kNamed) absl::StrAppend(&text, " and ", ranks.size() - kNamed, " more");
  return text;
}

absl::Status MissingRanks(const Call& call, int32_t rank, const std::vector<int32_t>& missing) {
  return absl::DeadlineExceededError(
      absl::StrCat(Where(call, rank), ": ", RankList(missing), " did not arrive before the deadline"));
}

absl::Status EpochIsDead(const Call& call, int32_t rank, absl::string_view reason) {
  return absl::UnavailableError(absl::StrCat(Where(call, rank), ": the epoch has ended: ", reason));
}

absl::Status CheckSizes(const Call& call, int32_t rank, absl::string_view what,
                        std::span<const int64_t> sizes, int32_t num_ranks, size_t buffer_bytes) {
  if (sizes.size() != static_cast<size_t>(num_ranks)) {
    return absl::InvalidArgumentError(absl::StrCat(Where(call, rank), ": ", what, "_bytes has ", sizes.size(),
                                                   " entries, must have one per rank: ", num_ranks));
  }
  int64_t total = 0;
  for (int32_t peer = 0; peer < num_ranks; ++peer) {
    if (sizes[peer] < 0) {
      return absl::InvalidArgumentError(absl::StrCat(Where(call, rank), ": ", what, "_bytes[", peer,
                                                     "] = ", sizes[peer], ", must be >= 0"));
    }
    if (__builtin_add_overflow(total, sizes[peer], &total)) {
      return absl::InvalidArgumentError(
          absl::StrCat(Where(call, rank), ": ", what, "_bytes sum to more than 2^63 - 1"));
    }
  }
  if (static_cast<uint64_t>(total) != buffer_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(Where(call, rank), ": ", what, "_bytes sum to ", total,
                                                   ", must equal the size of the ", what,
                                                   " buffer: ", buffer_bytes));
  }
  return absl::OkStatus();
}

absl::Status CheckAllToAllV(const Call& call, int32_t rank, int32_t num_ranks,
                            std::span<const std::byte> send, std::span<const int64_t> send_bytes,
                            std::span<const std::byte> recv, std::span<const int64_t> recv_bytes) {
  LRMOE_RETURN_IF_ERROR(CheckSizes(call, rank, "send", send_bytes, num_ranks, send.size()));
  LRMOE_RETURN_IF_ERROR(CheckSizes(call, rank, "recv", recv_bytes, num_ranks, recv.size()));
  if (send_bytes[rank] != recv_bytes[rank]) {
    return absl::InvalidArgumentError(
        absl::StrCat(Where(call, rank), ": send_bytes[", rank, "] = ", send_bytes[rank],
                     " to itself, must equal recv_bytes[", rank, "] = ", recv_bytes[rank]));
  }
  return absl::OkStatus();
}

absl::Status CheckStart(const Call& call, int32_t rank, int32_t num_ranks, SendParts send, RecvParts recv,
                        int started) {
  const auto wanted = static_cast<size_t>(num_ranks);
  if (send.size() != wanted || recv.size() != wanted) {
    const bool sending = send.size() != wanted;
    return absl::InvalidArgumentError(absl::StrCat(Where(call, rank), ": ", sending ? "send" : "recv",
                                                   " has ", sending ? send.size() : recv.size(),
                                                   " parts, must have one per rank: ", num_ranks));
  }
  if (send[rank].size() != recv[rank].size()) {
    return absl::InvalidArgumentError(absl::StrCat(Where(call, rank), ": send[", rank, "] has ",
                                                   send[rank].size(), " bytes to itself, must equal recv[",
                                                   rank, "]: ", recv[rank].size()));
  }
  if (started >= kMaxStarted) {
    return absl::InvalidArgumentError(absl::StrCat(
        Where(call, rank), ": ", started, " exchanges are started and not finished; allowed: ", kMaxStarted));
  }
  return absl::OkStatus();
}

absl::Status CheckAllGather(const Call& call, int32_t rank, int32_t num_ranks, size_t send_bytes,
                            size_t recv_bytes) {
  if (recv_bytes / num_ranks != send_bytes || recv_bytes % num_ranks != 0) {
    return absl::InvalidArgumentError(absl::StrCat(Where(call, rank), ": recv has ", recv_bytes,
                                                   " bytes, must be ", send_bytes, " for each of ", num_ranks,
                                                   " ranks"));
  }
  return absl::OkStatus();
}

absl::Status Transport::AllToAllV(const Call& call, std::span<const std::byte> send,
                                  std::span<const int64_t> send_bytes, std::span<std::byte> recv,
                                  std::span<const int64_t> recv_bytes) {
  LRMOE_RETURN_IF_ERROR(CheckAllToAllV(call, rank(), size(), send, send_bytes, recv, recv_bytes));
  std::vector<std::span<const std::byte>> send_parts;
  std::vector<std::span<std::byte>> recv_parts;
  Split(send, send_bytes, send_parts);
  Split(recv, recv_bytes, recv_parts);
  LRMOE_ASSIGN_OR_RETURN(const Ticket ticket, StartAllToAllV(call, send_parts, recv_parts));
  return Finish(ticket, call.deadline).status();
}

absl::Status CheckRoot(const Call& call, int32_t rank, int32_t num_ranks, int32_t root) {
  if (root < 0 || root >= num_ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat(Where(call, rank), ": root = ", root, ", must be 0..", num_ranks - 1));
  }
  return absl::OkStatus();
}

void Accumulate(Reduction reduction, std::span<int64_t> accumulator, const int64_t* values) {
  for (size_t i = 0; i < accumulator.size(); ++i) {
    int64_t& a = accumulator[i];
    const int64_t b = values[i];
    switch (reduction) {
      case Reduction::kSum:
        a = static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
        break;
      case Reduction::kMin:
        a = b < a ? b : a;
        break;
      case Reduction::kMax:
        a = b > a ? b : a;
        break;
    }
  }
}

void Accumulate(Reduction reduction, std::span<double> accumulator, const double* values) {
  for (size_t i = 0; i < accumulator.size(); ++i) {
    double& a = accumulator[i];
    const double b = values[i];
    switch (reduction) {
      case Reduction::kSum:
        a += b;
        break;
      case Reduction::kMin:
        a = (b < a || std::isnan(b)) && !std::isnan(a) ? b : a;
        break;
      case Reduction::kMax:
        a = (b > a || std::isnan(b)) && !std::isnan(a) ? b : a;
        break;
    }
  }
}

}  // namespace lrmoe::transport
