#include "worker/engine/safetensors.h"

#include "tests/unit/checkpoint/fixture.h"

namespace lrmoe::engine {
namespace {

std::string File(uint64_t length, const std::string& header, size_t data_bytes) {
  std::string text(8, '\0');
  std::memcpy(text.data(), &length, 8);
  return text + header + std::string(data_bytes, 'x');
}
std::string File(const std::string& header, size_t data_bytes) {
  return File(header.size(), header, data_bytes);
}

TEST_CASE("safetensors files from elsewhere are validated", "[checkpoint]") {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/file";
  auto open = [&](const std::string& text) {
    WriteFileText(path, text);
    return SafetensorsFile::Open(path).status();
  };
  const std::string a = R"("a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]})";
  CHECK(open(File("{" + a + "}", 24)).ok());
  CHECK(open(File("{}", 0)).ok());
  CHECK(open(File("{" + a + R"(,"s":{"dtype":"I64","shape":[],"data_offsets":[24,32]}})", 32)).ok());
  CHECK(open(File(R"({"__metadata__":{"k":"v"},"z":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}   )", 0))
            .ok());

  const std::vector<std::pair<std::string, std::string>> bad = {
      {"too short", ""},
      {"too short", "1234567"},
      {"header length", File(100, "{}", 0)},
      {"header length", File(UINT64_MAX, "{}", 0)},
      {"header length", File(uint64_t{1} << 63, "{}", 0)},
      {"JSON object", File("", 0)},
      {"JSON object", File("[]", 0)},
      {"JSON object", File("{\"a\":", 0)},
      {"JSON object", File("{" + a + "," + a + "}", 24)},
      {"JSON object", File("{\"\xff\":1}", 0)},
      {"JSON object", File(std::string(1 << 20, '['), 0)},
      {"exactly", File(R"({"a":5})", 0)},
      {"exactly", File(R"({"a":{"dtype":"F32","shape":[1]}})", 4)},
      {"exactly", File(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"more":1}})", 4)},
      {"unknown dtype", File(R"({"a":{"dtype":"F33","shape":[1],"data_offsets":[0,4]}})", 4)},
      {"unknown dtype", File(R"({"a":{"dtype":7,"shape":[1],"data_offsets":[0,4]}})", 4)},
      {"not a list", File(R"({"a":{"dtype":"F32","shape":1,"data_offsets":[0,4]}})", 4)},
      {"no size", File(R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4)},
      {"no size", File(R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", 4)},
      {"no size", File(R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4]}})", 4)},
      {"overflows", File(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})", 0)},
      {"pair of sizes", File(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", 4)},
      {"pair of sizes", File(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}})", 4)},
      {"do not hold", File(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4)},
      {"do not hold", File(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})", 4)},
      {"behind the end", File("{" + a + "}", 23)},
      {"behind the end",
       File(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[9223372036854775806,9223372036854775807]}})",
            1)},
      {"bytes of data", File("{" + a + "}", 25)},
      {"overlap or leave a gap",
       File("{" + a + R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[23,27]}})", 27)},
      {"overlap or leave a gap",
       File("{" + a + R"(,"b":{"dtype":"U8","shape":[4],"data_offsets":[25,29]}})", 29)},
      {"overlap or leave a gap", File(R"({"b":{"dtype":"U8","shape":[4],"data_offsets":[1,5]}})", 5)},
  };
  for (const auto& [reason, text] : bad) {
    const absl::Status status = open(text);
    INFO(status.ToString() << " for " << text.substr(0, 200));
    CHECK(status.code() == absl::StatusCode::kDataLoss);
    CHECK_THAT(std::string(status.message()), Catch::Contains(path) && Catch::Contains(reason));
  }
}

TEST_CASE("random damage to a header never gives a file with other tensors in bad places", "[checkpoint]") {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/file";
  const std::vector<std::byte> bytes(96, std::byte{3});
  const std::vector<TensorToWrite> tensors{{"one", "F32", {4, 3}, [&] { return std::span(bytes).first(48); }},
                                           {"two", "BF16", {24}, [&] { return std::span(bytes).last(48); }}};
  REQUIRE(WriteSafetensors(path, tensors, {{"format", "pt"}}).ok());
  const std::string good = ReadFileText(path);
  Random random(3);
  for (int trial = 0; trial < 1000; ++trial) {
    std::string bad = good;
    for (uint64_t edits = 1 + random.Below(3); edits > 0; --edits) {
      const size_t at = random.Below(good.size() - 96);
      const char alphabet[] = "0123456789[]{},:\"\\-eF";
      bad[at] =
          random.Below(2) ? static_cast<char>(random.Next()) : alphabet[random.Below(sizeof alphabet - 1)];
    }
    WriteFileText(path, bad);
    const auto file = SafetensorsFile::Open(path);
    if (!file.ok()) {
      REQUIRE(file.status().code() == absl::StatusCode::kDataLoss);
      continue;
    }
    int64_t total = 0;
    for (const auto& [name, tensor] : file->tensors()) {
      REQUIRE(tensor.offset >= 0);
      REQUIRE(tensor.offset + tensor.bytes <= file->file().bytes());
      std::vector<std::byte> to(tensor.bytes);
      REQUIRE(file->Read(name, to).ok());
      total += tensor.bytes;
    }
    REQUIRE(total <= file->file().bytes());
  }
}

}  // namespace
}  // namespace lrmoe::engine
