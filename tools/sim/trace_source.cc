#include "tools/sim/trace_source.h"

#include <filesystem>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace lrmoe::sim {
namespace {

absl::Status InFile(const std::string& path, const absl::Status& status) {
  if (status.ok()) return status;
  return {status.code(), absl::StrCat(path, ": ", status.message())};
}

// Whether the first line names the format of tokens; a reader of the wrong one would refuse it anyway.
bool NamesTokens(std::istream& in) {
  in.seekg(0);
  char start[512] = {};
  in.read(start, sizeof(start) - 1);
  in.clear();
  in.seekg(0);
  const absl::string_view text = start;
  return absl::StrContains(text.substr(0, text.find('\n')), "\"routing-tokens\"");
}

}  // namespace

absl::StatusOr<TokenCounts> TokenCounts::Open(std::istream& in) {
  LRMOE_ASSIGN_OR_RETURN(TokenTraceReader reader, TokenTraceReader::Open(in));
  TokenCounts out(std::move(reader));
  const TokenTraceHeader& header = out.reader_.header();
  out.header_ = {header.model, header.num_experts, header.top_k, 0, 1024, {}};
  LRMOE_RETURN_IF_ERROR(out.Advance());
  TraceRecord record;
  LRMOE_ASSIGN_OR_RETURN(const bool any, out.ReadInvocation(record));
  if (any) out.first_ = std::move(record);
  out.header_.num_source_ranks = any ? out.first_->counts.num_sources() : 1;
  return out;
}

absl::Status TokenCounts::Advance() {
  LRMOE_ASSIGN_OR_RETURN(has_line_, reader_.Next(line_));
  return absl::OkStatus();
}

absl::StatusOr<bool> TokenCounts::ReadInvocation(TraceRecord& record) {
  if (!has_line_) return false;
  const Invocation invocation = line_.invocation;
  std::vector<std::vector<int64_t>> sources;
  while (has_line_ && line_.invocation == invocation) {
    if (line_.source_rank != static_cast<int32_t>(sources.size()))
      return absl::InvalidArgumentError(absl::StrCat("line ", reader_.num_read() + 1, ": source_rank is ",
                                                     line_.source_rank, "; allowed: ", sources.size(),
                                                     ", the next of ", ToString(invocation)));
    std::vector<int64_t>& counts = sources.emplace_back(header_.num_experts, 0);
    for (int32_t expert : line_.top_indices) ++counts[expert];
    LRMOE_RETURN_IF_ERROR(Advance());
  }
  const auto num_sources = static_cast<int32_t>(sources.size());
  if (header_.num_source_ranks > 0 && num_sources != header_.num_source_ranks)
    return absl::InvalidArgumentError(absl::StrCat(
        "line ", reader_.num_read() + has_line_, ": ", ToString(invocation), " has ", num_sources,
        " source ranks; allowed: ", header_.num_source_ranks, ", as the first invocation has"));
  record = {invocation, RoutedCounts(num_sources, header_.num_experts)};
  for (int32_t s = 0; s < num_sources; ++s) std::ranges::copy(sources[s], record.counts.source(s).begin());
  return true;
}

absl::StatusOr<bool> TokenCounts::Next(TraceRecord& record) {
  if (!first_) return ReadInvocation(record);
  record = *std::move(first_);
  first_.reset();
  return true;
}

absl::StatusOr<TraceSource> TraceSource::Open(const std::string& path) {
  TraceSource source;
  source.path_ = path;
  if (std::filesystem::is_directory(path)) return absl::InvalidArgumentError(path + " is a folder");
  source.file_ = std::make_unique<std::ifstream>(path, std::ios::binary | std::ios::ate);
  source.size_ = static_cast<double>(source.file_->tellg());
  if (!*source.file_) return absl::NotFoundError(absl::StrCat("cannot open ", path));
  std::istream& in = *source.file_;
  if (NamesTokens(in)) {
    auto tokens = TokenCounts::Open(in);
    if (!tokens.ok()) return InFile(path, tokens.status());
    source.tokens_.emplace(*std::move(tokens));
  } else {
    auto counts = TraceReader::Open(in);
    if (!counts.ok()) return InFile(path, counts.status());
    source.counts_.emplace(*std::move(counts));
  }
  return source;
}

const TraceHeader& TraceSource::header() const {
  return tokens_ ? tokens_->header() : counts_->header();
}

absl::StatusOr<bool> TraceSource::Next(TraceRecord& record) {
  auto more = tokens_ ? tokens_->Next(record) : counts_->Next(record);
  if (!more.ok()) return InFile(path_, more.status());
  return more;
}

double TraceSource::Progress() {
  if (size_ <= 0) return 1;
  const auto at = static_cast<double>(file_->rdbuf()->pubseekoff(0, std::ios::cur, std::ios::in));
  return at < 0 ? 1 : at / size_;
}

}  // namespace lrmoe::sim
