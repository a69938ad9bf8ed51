#include "common/trace.h"

#include <catch2/catch.hpp>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "common/random.h"
#include "common/token_trace.h"
#include "tests/unit/sim/damage.h"

namespace lrmoe {
namespace {

const char kHeader[] =
    R"({"format":"routing-counts","version":1,"model":"m","num_experts":3,"top_k":2,"num_source_ranks":2,)"
    R"("num_layers":2,"origin":"here"})"
    "\n";
const char kFirst[] = R"({"step":0,"layer":0,"counts":[[1,2,3],[4,5,6]]})"
                      "\n";
const char kSecond[] = R"({"step":4,"layer":1,"micro_batch":2,"counts":[[0,0,0],[1099511627776,5,6]]})"
                       "\n";

absl::StatusOr<std::vector<TraceRecord>> ReadAll(const std::string& text) {
  std::istringstream in(text);
  auto reader = TraceReader::Open(in);
  if (!reader.ok()) return reader.status();
  std::vector<TraceRecord> out;
  TraceRecord record;
  while (true) {
    const auto more = reader->Next(record);
    if (!more.ok()) return more.status();
    if (!*more) return out;
    out.push_back(record);
    CHECK(reader->num_read() == static_cast<int64_t>(out.size()));
  }
}

TEST_CASE("a trace is read as written", "[trace]") {
  std::istringstream in(absl::StrCat(kHeader, kFirst, kSecond));
  const auto reader = TraceReader::Open(in);
  REQUIRE(reader.ok());
  CHECK(reader->header() == TraceHeader{"m", 3, 2, 2, 2, {{"origin", "here"}}});
  const auto records = ReadAll(absl::StrCat(kHeader, kFirst, kSecond));
  CAPTURE(records.status().ToString());
  REQUIRE(records.ok());
  REQUIRE(records->size() == 2);
  CHECK((*records)[0].counts.at(1, 0) == 4);
  CHECK((*records)[0].invocation == Invocation{0, 0, 0});
  CHECK((*records)[1].invocation == Invocation{4, 1, 2});
  CHECK((*records)[1].counts.at(1, 0) == int64_t{1} << 40);
}

TEST_CASE("a complete last line needs no line break", "[trace]") {
  const std::string text = absl::StrCat(kHeader, kFirst);
  CHECK(ReadAll(text.substr(0, text.size() - 1))->size() == 1);
  CHECK(ReadAll(kHeader)->empty());
}

TEST_CASE("the writer writes what the reader reads", "[trace]") {
  Random random(3);
  for (int trial = 0; trial < 50; ++trial) {
    const TraceHeader header{"a \"model\"\n",
                             static_cast<int32_t>(random.Between(1, 20)),
                             1,
                             static_cast<int32_t>(random.Between(1, 5)),
                             static_cast<int32_t>(random.Between(1, 3)),
                             {{"licence", "none"}, {"note", "\xc3\xa4"}}};
    std::ostringstream out;
    auto writer = TraceWriter::Create(out, header);
    REQUIRE(writer.ok());
    std::vector<TraceRecord> written;
    for (int64_t i = 0; i < 6; ++i) {
      TraceRecord record{{i / 2, header.num_layers - 1, static_cast<int32_t>(i % 2)},
                         RoutedCounts(header.num_source_ranks, header.num_experts)};
      for (int32_t s = 0; s < header.num_source_ranks; ++s)
        for (int64_t& n : record.counts.source(s)) n = random.Between(0, int64_t{1} << random.Below(41));
      REQUIRE(writer->Write(record).ok());
      written.push_back(std::move(record));
    }
    std::istringstream in(out.str());
    const auto reader = TraceReader::Open(in);
    CAPTURE(reader.status().ToString(), out.str());
    REQUIRE(reader.ok());
    CHECK(reader->header() == header);
    CHECK(*ReadAll(out.str()) == written);
  }
}

TEST_CASE("the writer refuses what the header does not allow", "[trace]") {
  const TraceHeader header{"m", 2, 1, 1, 1, {}};
  std::ostringstream out;
  TraceHeader bad = header;
  bad.top_k = 3;
  CHECK_THAT(std::string(TraceWriter::Create(out, bad).status().message()),
             Catch::Contains("top_k is 3; allowed: 1..2"));
  bad = header;
  bad.num_layers = 0;
  CHECK_THAT(std::string(TraceWriter::Create(out, bad).status().message()),
             Catch::Contains("num_layers is 0; allowed: an integer from 1 to 1024"));
  bad = header;
  bad.remarks = {{"version", "2"}};
  CHECK_FALSE(TraceWriter::Create(out, bad).ok());
  auto writer = TraceWriter::Create(out, header);
  TraceRecord record{{0, 0, 0}, RoutedCounts(1, 2)};
  record.counts.at(0, 1) = -1;
  CHECK_THAT(std::string(writer->Write(record).message()), Catch::Contains("counts[0][1] is -1"));
  record.counts.at(0, 1) = 1;
  record.invocation.layer = 1;
  CHECK_THAT(std::string(writer->Write(record).message()), Catch::Contains("layer is 1"));
  record = {{0, 0, 0}, RoutedCounts(2, 2)};
  CHECK_THAT(std::string(writer->Write(record).message()), Catch::Contains("2 sources of 2 experts"));
  out.setstate(std::ios::badbit);
  CHECK(writer->Write({{0, 0, 0}, RoutedCounts(1, 2)}).code() == absl::StatusCode::kDataLoss);
}

TEST_CASE("every mistake in a trace is named with line, field, value and range", "[trace]") {
  const auto header_with = [](const char* part, const char* replacement) {
    std::string text = kHeader;
    text.replace(text.find(part), std::string(part).size(), replacement);
    return text;
  };
  const std::string good = absl::StrCat(kHeader, kFirst);
  for (const auto& [text, part] : std::vector<std::pair<std::string, std::string>>{
           {"", "line 1 is missing"},
           {"\n", "line 1: not JSON"},
           {"[1]\n", "line 1: the header is [1]; allowed: an object"},
           {std::string(100000, ' '), "line 1: the line has more than 65536 bytes"},
           {std::string(60000, '['), "line 1 is truncated"},
           {std::string(60000, '[') + "\n", "nested more than 32 deep"},
           {header_with("\"model\":\"m\",", ""), "line 1: key \"model\" is missing from the header"},
           {header_with("\"m\"", "7"), "line 1: model is 7; allowed: a text"},
           {header_with("counts", "tokens"), "format is \"routing-tokens\"; allowed: \"routing-counts\""},
           {header_with("\"version\":1", "\"version\":2"), "version is 2; allowed: 1"},
           {header_with("\"num_experts\":3", "\"num_experts\":0"),
            "num_experts is 0; allowed: an integer from 1 to"},
           {header_with("\"num_experts\":3", "\"num_experts\":4097"), "num_experts is 4097"},
           {header_with("\"top_k\":2", "\"top_k\":4"), "top_k is 4; allowed: 1..3"},
           {header_with("\"num_layers\":2", "\"num_layers\":2.5"), "num_layers is 2.5"},
           {header_with("\"num_source_ranks\":2", "\"num_source_ranks\":1025"), "num_source_ranks is 1025"},
           {header_with("\"origin\"", "\"model\""), "key \"model\" appears twice"},
           {good + "\n", "line 3: not JSON"},
           {good + "{\"step\":1,\"layer\":0}\n", "line 3: key \"counts\" is missing from the invocation"},
           {good + "{\"step\":1,\"layer\":0,\"count\":[]}\n", "line 3: unknown key \"count\""},
           {good + "{\"step\":-1,\"layer\":0,\"counts\":[]}\n",
            "line 3: step is -1; allowed: an integer from 0"},
           {good + "{\"step\":1,\"layer\":2,\"counts\":[]}\n", "layer is 2; allowed: an integer from 0 to 1"},
           {good + "{\"step\":1,\"layer\":0,\"micro_batch\":-3,\"counts\":[]}\n", "micro_batch is -3"},
           {good + kFirst, "line 3: micro_batch is 0; allowed: above 0, the last of layer 0 in step 0"},
           {absl::StrCat(kHeader, kSecond, R"({"step":3,"layer":1,"counts":[[1,2,3],[4,5,6]]})", "\n"),
            "line 3: step is 3; allowed: at least 4, the last of layer 1"},
           {good + "{\"step\":1,\"layer\":0,\"counts\":[[1,2,3]]}\n",
            "counts is a list of 1 values; allowed: 2, one per source rank"},
           {good + "{\"step\":1,\"layer\":0,\"counts\":[[1,2,3],[1,2]]}\n",
            "counts[1] is a list of 2 values; allowed: 3, one per expert"},
           {good + "{\"step\":1,\"layer\":0,\"counts\":[[1,2,3],7]}\n", "counts[1] is 7; allowed: a list"},
           {good + "{\"step\":1,\"layer\":0,\"counts\":[[1,2,3],[1,-2,3]]}\n",
            "line 3: counts[1][1] is -2; allowed: an integer from 0 to 1099511627776"},
           {good + "{\"step\":1,\"layer\":0,\"counts\":[[1,2,3],[1,2.0,3]]}\n", "counts[1][1] is 2.0"},
           {good + "{\"step\":1,\"layer\":0,\"counts\":[[1,2,3],[1,2,1099511627777]]}\n", "counts[1][2] is"},
           {good + std::string(3000, ' ') + "\n", "line 3: the line has more than"},
           {good + "{\"step\":1,\"lay", "line 3 is truncated after 14 bytes; 1 invocations were read"}}) {
    CAPTURE(text.substr(0, 400));
    const auto records = ReadAll(text);
    CHECK(records.status().code() == absl::StatusCode::kInvalidArgument);
    CHECK_THAT(std::string(records.status().message()), Catch::Contains(part));
  }
}

TEST_CASE("a trace cut anywhere is read up to the cut or refused with what was read", "[trace]") {
  const std::string text = absl::StrCat(kHeader, kFirst, kSecond);
  const size_t first = std::string(kHeader).size(), second = first + std::string(kFirst).size();
  for (size_t size = 1; size < text.size(); ++size) {
    CAPTURE(size);
    const auto records = ReadAll(text.substr(0, size));
    // At a line break, or just before one, the cut leaves whole lines.
    const bool whole =
        size + 1 == first || size == first || size + 1 == second || size == second || size + 1 == text.size();
    CHECK(records.ok() == whole);
    const int read = size < second ? 0 : 1;
    if (!whole)
      CHECK_THAT(std::string(records.status().message()),
                 Catch::EndsWith(absl::StrCat("bytes; ", read, " invocations were read")));
  }
}

TEST_CASE("damaged traces are read or refused, never worse", "[trace]") {
  Random random(17);
  const std::string base = absl::StrCat(kHeader, kFirst, kSecond);
  int read = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    const auto records = ReadAll(test::Damaged(base, random));
    read += records.ok();
    if (records.ok()) continue;
    CHECK(records.status().code() == absl::StatusCode::kInvalidArgument);
    CHECK_THAT(std::string(records.status().message()), Catch::StartsWith("line "));
  }
  CHECK(read > 100);
}

// A trace that is made while it is read.
class EndlessLines : public std::streambuf {
 public:
  explicit EndlessLines(int64_t num_lines) : left_(num_lines) { Show(kHeader); }

 private:
  void Show(std::string text) {
    text_ = std::move(text);
    setg(text_.data(), text_.data(), text_.data() + text_.size());
  }
  int_type underflow() override {
    if (left_-- == 0) return traits_type::eof();
    Show(absl::StrCat("{\"step\":", step_++, ",\"layer\":0,\"counts\":[[1,2,3],[4,5,6]]}\n"));
    return traits_type::to_int_type(text_[0]);
  }
  int64_t left_, step_ = 0;
  std::string text_;
};

TEST_CASE("a long trace streams", "[trace]") {
  EndlessLines lines(100000);
  std::istream in(&lines);
  auto reader = TraceReader::Open(in);
  REQUIRE(reader.ok());
  TraceRecord record;
  const int64_t* place = nullptr;
  bool moved = false;
  while (*reader->Next(record)) {
    if (place != nullptr) moved |= place != record.counts.source(0).data();
    place = record.counts.source(0).data();
  }
  CHECK(reader->num_read() == 100000);
  CHECK_FALSE(moved);  // the record's memory is used again
}

const char kTokens[] =
    R"({"format":"routing-tokens","version":1,"model":"m","num_experts":4,"top_k":2})"
    "\n"
    R"({"step":0,"layer":1,"source_rank":0,"num_tokens":2,"top_indices":[[0,3],[2,1]],"top_weights":[[0.5,0.5],[1,0]]})"
    "\n";

absl::StatusOr<std::vector<TokenTraceRecord>> ReadTokens(const std::string& text) {
  std::istringstream in(text);
  auto reader = TokenTraceReader::Open(in);
  if (!reader.ok()) return reader.status();
  std::vector<TokenTraceRecord> out;
  TokenTraceRecord record;
  while (true) {
    const auto more = reader->Next(record);
    if (!more.ok()) return more.status();
    if (!*more) return out;
    out.push_back(record);
  }
}

TEST_CASE("a token trace is read as written", "[trace]") {
  const auto records = ReadTokens(kTokens);
  CAPTURE(records.status().ToString());
  REQUIRE(records.ok());
  REQUIRE(records->size() == 1);
  CHECK(records->front().top_indices == std::vector<int32_t>{0, 3, 2, 1});
  CHECK(records->front().top_weights == std::vector<float>{0.5F, 0.5F, 1, 0});
}

TEST_CASE("every mistake in a token trace is named with line, field, value and range", "[trace]") {
  for (const auto& [before, after, part] : std::vector<std::array<std::string, 3>>{
           {"routing-tokens", "routing-counts", "format is \"routing-counts\""},
           {"\"version\":1", "\"version\":\"1\"", "version is \"1\""},
           {"\"top_k\":2", "\"top_k\":5", "line 1: top_k is 5; allowed: an integer from 1 to 4"},
           {"\"layer\":1", "\"layer\":1024", "line 2: layer is 1024"},
           {"\"source_rank\":0", "\"source_rank\":-1", "source_rank is -1"},
           {"\"num_tokens\":2", "\"num_tokens\":3",
            "top_indices is a list of 2 values; allowed: 3, one per token"},
           {"\"num_tokens\":2,", "", "key \"num_tokens\" is missing from the invocation"},
           {"\"num_tokens\":2", "\"tokens\":2", "unknown key \"tokens\""},
           {"[0,3]", "[0,4]", "line 2: top_indices[0][1] is 4; allowed: an integer from 0 to 3"},
           {"[2,1]", "[2,2]", "top_indices[1][1] is 2; allowed: distinct experts within a token"},
           {"[2,1]", "[2,1,0]", "top_indices[1] is a list of 3 values; allowed: 2"},
           {"[1,0]", "[1,-0.5]", "top_weights[1][1] is -0.5"},
           {"[1,0]", "[1,1e39]", "top_weights[1][1] is 1e+39"},
           {"[1,0]", "[1,\"a\"]", "top_weights[1][1] is \"a\""}}) {
    std::string text = kTokens;
    text.replace(text.find(before), before.size(), after);
    CAPTURE(text);
    const auto records = ReadTokens(text);
    CHECK(records.status().code() == absl::StatusCode::kInvalidArgument);
    CHECK_THAT(std::string(records.status().message()), Catch::Contains(part));
  }
  const std::string text = kTokens;
  CHECK_THAT(std::string(ReadTokens(text.substr(0, text.size() - 9)).status().message()),
             Catch::Contains("truncated") && Catch::Contains("; 0 invocations were read"));
}

TEST_CASE("damaged token traces are read or refused, never worse", "[trace]") {
  Random random(23);
  int read = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    const auto records = ReadTokens(test::Damaged(kTokens, random));
    read += records.ok();
    if (records.ok()) continue;
    CHECK(records.status().code() == absl::StatusCode::kInvalidArgument);
    CHECK_THAT(std::string(records.status().message()), Catch::StartsWith("line "));
  }
  CHECK(read > 100);
}

}  // namespace
}  // namespace lrmoe
