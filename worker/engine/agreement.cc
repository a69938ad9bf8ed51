#include "worker/engine/agreement.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace lrmoe::engine {
namespace {

// Crosses the wire as it lies in memory: all ranks run the same binary.
struct Record {
  int64_t step;
  int64_t num_tokens;
  uint64_t arguments_hash;
  int32_t layer;
  int32_t micro_batch;
  int32_t code;
  uint8_t operation;
  char arguments[kMaxArguments + 1];
  char message[kMaxMessage + 1];
};

uint64_t Fnv1a(const std::string& text) {
  uint64_t hash = 0xCBF29CE484222325ULL;
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001B3ULL;
  return hash;
}

void CopyText(const std::string& text, char* out, int limit) {
  std::memcpy(out, text.data(), std::min<size_t>(text.size(), limit));
}

Record MakeRecord(const Proposal& proposal) {
  Record record;
  std::memset(&record, 0, sizeof(record));
  record.step = proposal.invocation.step;
  record.layer = proposal.invocation.layer;
  record.micro_batch = proposal.invocation.micro_batch;
  record.num_tokens = proposal.num_tokens;
  record.arguments_hash = Fnv1a(proposal.arguments);
  record.operation = static_cast<uint8_t>(proposal.operation);
  record.code = static_cast<int32_t>(proposal.status.code());
  CopyText(proposal.arguments, record.arguments, kMaxArguments);
  CopyText(std::string(proposal.status.message()), record.message, kMaxMessage);
  return record;
}

bool NamesInvocation(uint8_t operation) {
  return operation == static_cast<uint8_t>(Operation::kForward) ||
         operation == static_cast<uint8_t>(Operation::kBackward) ||
         operation == static_cast<uint8_t>(Operation::kDiscard);
}

std::string Describe(int rank, const Record& record) {
  std::string out = absl::StrCat("rank ", rank, " calls ", Name(static_cast<Operation>(record.operation)));
  if (NamesInvocation(record.operation))
    absl::StrAppend(&out, " of ", ToString(Invocation{record.step, record.layer, record.micro_batch}));
  if (record.arguments[0] != 0) absl::StrAppend(&out, " (", record.arguments, ")");
  return out;
}

// A rank that refuses cannot state its arguments, so they are compared between healthy ranks only.
bool Same(const Record& a, const Record& b) {
  if (a.operation != b.operation) return false;
  if (a.step != b.step || a.layer != b.layer || a.micro_batch != b.micro_batch) return false;
  return a.code != 0 || b.code != 0 || a.arguments_hash == b.arguments_hash;
}

absl::Status Compare(const std::vector<Record>& records) {
  size_t first_healthy = 0;
  while (first_healthy < records.size() && records[first_healthy].code != 0) ++first_healthy;
  for (size_t r = 1; r < records.size(); ++r) {
    size_t other = 0;
    if (Same(records[0], records[r])) {
      if (first_healthy >= records.size() || Same(records[first_healthy], records[r])) continue;
      other = first_healthy;
    }
    return absl::InvalidArgumentError(
        absl::StrCat("ranks disagree: ", Describe(static_cast<int>(other), records[other]), ", ",
                     Describe(static_cast<int>(r), records[r])));
  }
  for (size_t r = 0; r < records.size(); ++r) {
    if (records[r].code == 0) continue;
    return absl::Status(static_cast<absl::StatusCode>(records[r].code),
                        absl::StrCat("rank ", r, ": ", records[r].message));
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view Name(Operation operation) {
  switch (operation) {
    case Operation::kForward:
      return "forward";
    case Operation::kBackward:
      return "backward";
    case Operation::kDiscard:
      return "discard";
    case Operation::kFinishLoad:
      return "finish load";
    case Operation::kOptimizerStep:
      return "optimizer step";
    case Operation::kGradientNorm:
      return "gradient norm";
    case Operation::kZeroGradients:
      return "zero gradients";
    case Operation::kSaveCheckpoint:
      return "save checkpoint";
    case Operation::kLoadCheckpoint:
      return "load checkpoint";
    case Operation::kFinish:
      return "finish";
    case Operation::kCreate:
      return "create engine";
    case Operation::kRefreshReplicas:
      return "refresh replicas";
  }
  return "unknown operation";
}

absl::StatusOr<Agreement> Agree(transport::Transport& transport, const Proposal& proposal,
                                Deadline deadline) {
  const Record mine = MakeRecord(proposal);
  std::vector<Record> records(transport.size());
  const transport::Call call{"agreement", proposal.invocation, deadline};
  LRMOE_RETURN_IF_ERROR(transport.AllGather(call, std::as_bytes(std::span(&mine, 1)),
                                            std::as_writable_bytes(std::span(records))));
  LRMOE_RETURN_IF_ERROR(Compare(records));
  Agreement agreement;
  agreement.num_tokens.reserve(records.size());
  for (const Record& record : records) agreement.num_tokens.push_back(record.num_tokens);
  return agreement;
}

}  // namespace lrmoe::engine
