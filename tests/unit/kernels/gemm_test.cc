#include "tests/unit/kernels/twin.h"

namespace lrmoe::kernels {
namespace {

constexpr GemmKind kKinds[] = {GemmKind::kForward, GemmKind::kInputGradient, GemmKind::kWeightGradient};

struct Sizes {
  int64_t a, b, c;
};
Sizes SizesOf(GemmKind kind, int64_t n, int64_t k, int64_t rows) {
  switch (kind) {
    case GemmKind::kForward:
    case GemmKind::kInputGradient:
    case GemmKind::kPacked:
      return {rows * k, n * k, rows * n};
    case GemmKind::kWeightGradient:
      break;
  }
  return {rows * n, rows * k, n * k};
}

struct Operands {
  int64_t rows;
  Elements a, b, c;
  bool overwrite;
};

// One group with random operands; c is poisoned, or holds an earlier sum where the product is added to it.
Operands RandomGroup(GemmKind kind, Type type, int64_t n, int64_t k, int64_t rows, Random& random) {
  const Sizes size = SizesOf(kind, n, k, rows);
  const bool weight_gradient = kind == GemmKind::kWeightGradient;
  const bool overwrite = weight_gradient && random.Below(2) == 1;
  Elements c = weight_gradient && !overwrite ? Elements::Uniform(Type::kFp32, size.c, random)
                                             : Elements(weight_gradient ? Type::kFp32 : type, size.c);
  return {rows, Elements::Uniform(type, size.a, random), Elements::Uniform(type, size.b, random),
          std::move(c), overwrite};
}

void CheckGroup(GemmKind kind, int64_t n, int64_t k, const Operands& before, const Operands& after) {
  REQUIRE(after.c.intact());
  const bool weight_gradient = kind == GemmKind::kWeightGradient;
  const int64_t m = weight_gradient ? n : before.rows, width = weight_gradient ? k : n;
  const int64_t depth = weight_gradient ? before.rows : k;
  if (before.rows == 0) {
    REQUIRE(after.c == before.c);
    return;
  }
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < width; ++j) {
      double want = weight_gradient && !before.overwrite ? before.c[i * width + j] : 0,
             magnitude = std::abs(want);
      for (int64_t l = 0; l < depth; ++l) {
        const double a = weight_gradient ? before.a[l * n + i] : before.a[i * k + l];
        const double b = kind == GemmKind::kForward ? before.b[j * k + l] : before.b[l * width + j];
        want += a * b;
        magnitude += std::abs(a * b);
      }
      if (!Close(after.c.type(), after.c[i * width + j], want, magnitude)) {
        CAPTURE(n, k, before.rows, i, j, want);
        REQUIRE(after.c[i * width + j] == want);
      }
    }
  }
}

std::vector<Operands> Run(Device& device, GemmKind kind, Type type, int64_t n, int64_t k,
                          std::vector<Operands> groups) {
  std::vector<GemmGroup> arguments;
  for (Operands& group : groups)
    arguments.push_back({group.a.ptr(), group.b.ptr(), group.c.ptr(), group.rows, group.overwrite});
  REQUIRE(device.GroupedGemm(kind, type, n, k, arguments).ok());
  return groups;
}

TEST_CASE("grouped GEMM equals plain loops in fp64", "[gemm]") {
  const std::vector<NamedDevice> devices = AllDevices();
  struct Shape {
    int64_t n, k;
    std::vector<int64_t> rows;
  };
  const std::vector<Shape> shapes = {
      {1, 1, {1, 0, 2}},      {3, 5, {7, 1, 0, 0, 33}}, {17, 8, {64, 3}},       {48, 33, {0}},
      {64, 32, {16, 300, 1}}, {530, 40, {5, 270}},      {40, 530, {5, 0, 270}}, {20, 1030, {3}},
      {1030, 20, {2, 0, 40}}, {31, 29, {600}},          {256, 64, {48, 49}},    {16, 16, {}},
  };
  Random random(1);
  for (const Shape& shape : shapes) {
    for (GemmKind kind : kKinds) {
      for (Type type : kTypes) {
        std::vector<Operands> groups;
        for (int64_t rows : shape.rows)
          groups.push_back(RandomGroup(kind, type, shape.n, shape.k, rows, random));
        const auto first = Run(*devices[0].device, kind, type, shape.n, shape.k, groups);
        for (size_t g = 0; g < groups.size(); ++g) CheckGroup(kind, shape.n, shape.k, groups[g], first[g]);
        for (const NamedDevice& named : devices) {
          CAPTURE(named.name, shape.n, shape.k, static_cast<int>(kind), static_cast<int>(type));
          const auto again = Run(*named.device, kind, type, shape.n, shape.k, groups);
          if (named.name.find("matmul") != std::string::npos) {
            for (size_t g = 0; g < groups.size(); ++g)
              CheckGroup(kind, shape.n, shape.k, groups[g], again[g]);
          } else {
            for (size_t g = 0; g < groups.size(); ++g) REQUIRE(again[g].c == first[g].c);
          }
        }
      }
    }
  }
}

TEST_CASE("grouped GEMM on random ragged groups", "[gemm]") {
  const std::vector<NamedDevice> devices = AllDevices();
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    const GemmKind kind = kKinds[random.Below(3)];
    const Type type = kTypes[random.Below(2)];
    const int64_t n = random.Between(1, 80), k = random.Between(1, 80);
    std::vector<Operands> groups;
    for (int64_t g = random.Between(1, 9); g > 0; --g) {
      const int64_t rows = random.Below(3) == 0 ? 0 : random.Between(1, 60);
      groups.push_back(RandomGroup(kind, type, n, k, rows, random));
    }
    const NamedDevice& named = devices[random.Below(devices.size())];
    CAPTURE(seed, named.name, n, k);
    const auto done = Run(*named.device, kind, type, n, k, groups);
    for (size_t g = 0; g < groups.size(); ++g) CheckGroup(kind, n, k, groups[g], done[g]);
    const auto again = Run(*named.device, kind, type, n, k, groups);
    for (size_t g = 0; g < groups.size(); ++g) REQUIRE(again[g].c == done[g].c);
  }
}

Elements Packed(Device& device, GemmKind kind, Type type, int64_t n, int64_t k, const Elements& plain) {
  Elements packed(type, n * k);
  device.PackWeights(kind, type, n, k, plain.ptr(), packed.ptr());
  REQUIRE(packed.intact());
  return packed;
}

// visit(device, its name, type) for each device and type of which it packs weights.
template <typename Visit>
void ForEachPacking(Visit visit) {
  const std::vector<NamedDevice> devices = AllDevices();
  for (const Type type : kTypes)
    for (const NamedDevice& named : devices)
      if (named.device->PacksWeights(type)) visit(*named.device, named.name, type);
}

TEST_CASE("a product with packed weights equals that with plain ones", "[gemm]") {
  ForEachPacking([](Device& device, const std::string& name, Type type) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      Random random(seed);
      const GemmKind kind = seed % 2 == 0 ? GemmKind::kForward : GemmKind::kInputGradient;
      const int64_t n = kPackedMultiple * random.Between(1, 6), k = kPackedMultiple * random.Between(1, 4);
      CAPTURE(name, static_cast<int>(type), seed, n, k);
      std::vector<Operands> groups, packed;
      for (int64_t g = random.Between(1, 4); g > 0; --g) {
        const int64_t rows = random.Below(4) == 0 ? 0 : random.Between(1, seed % 5 == 0 ? 300 : 40);
        groups.push_back(RandomGroup(kind, type, n, k, rows, random));
        packed.push_back(groups.back());
        packed.back().b = Packed(device, kind, type, n, k, groups.back().b);
      }
      const auto done = Run(device, GemmKind::kPacked, type, n, k, packed);
      for (size_t g = 0; g < groups.size(); ++g) CheckGroup(kind, n, k, groups[g], done[g]);
      const auto again = Run(device, GemmKind::kPacked, type, n, k, packed);
      for (size_t g = 0; g < groups.size(); ++g) REQUIRE(again[g].c == done[g].c);
    }
  });
}

TEST_CASE("threads do not change a product with packed weights", "[gemm]") {
  const auto one = CreateCpuDevice(1), four = CreateCpuDevice(4);
  for (const Type type : kTypes) {
    if (!(*one)->PacksWeights(type)) continue;
    constexpr int64_t kN = 1088, kK = 128;
    Random random(7);
    std::vector<Operands> groups;
    for (const int64_t rows : {300, 1, 0, 77}) {
      groups.push_back(RandomGroup(GemmKind::kForward, type, kN, kK, rows, random));
      groups.back().b = Packed(**four, GemmKind::kForward, type, kN, kK, groups.back().b);
    }
    const auto by_one = Run(**one, GemmKind::kPacked, type, kN, kK, groups);
    const auto by_four = Run(**four, GemmKind::kPacked, type, kN, kK, groups);
    for (size_t g = 0; g < groups.size(); ++g) CHECK(by_one[g].c == by_four[g].c);
  }
}

TEST_CASE("packed weights come back as they were, and turn into the other direction's", "[gemm]") {
  ForEachPacking([](Device& device, const std::string& name, Type type) {
    for (const auto& [n, k] : {std::pair<int64_t, int64_t>{64, 64}, {192, 64}, {128, 320}}) {
      CAPTURE(name, static_cast<int>(type), n, k);
      Random random(n + k);
      const Elements plain = Elements::Uniform(type, n * k, random);
      const Elements forward = Packed(device, GemmKind::kForward, type, n, k, plain);
      Elements back(type, n * k), turned(type, n * k);
      device.UnpackWeights(type, n, k, forward.ptr(), back.ptr());
      CHECK(back == plain);
      device.RepackWeights(type, n, k, forward.ptr(), turned.ptr());
      CHECK(turned == Packed(device, GemmKind::kInputGradient, type, k, n, plain));
      CHECK((back.intact() && turned.intact()));
    }
  });
}

TEST_CASE("grouped GEMM refuses bad arguments by name", "[gemm]") {
  auto device = CreateCpuDevice(1);
  REQUIRE(device.ok());
  CHECK_FALSE((*device)->gemm_path().empty());
  float one = 1;
  const GemmGroup good{&one, &one, &one, 1};
  GemmGroup negative = good, null_b = good;
  negative.rows = -1;
  null_b.b = nullptr;
  const auto status = [&](int64_t n, GemmGroup group) {
    return (*device)->GroupedGemm(GemmKind::kForward, Type::kFp32, n, 1, std::span(&group, 1));
  };
  CHECK(status(1, good).ok());
  CHECK(status(0, good).code() == absl::StatusCode::kInvalidArgument);
  CHECK(status(1, negative).code() == absl::StatusCode::kInvalidArgument);
  CHECK(status(1, null_b).code() == absl::StatusCode::kInvalidArgument);
  null_b.rows = 0;
  CHECK(status(1, null_b).ok());
  CHECK((*device)->GroupedGemm(GemmKind::kPacked, Type::kFp32, 64, 63, {}).code() ==
        absl::StatusCode::kInvalidArgument);
}

TEST_CASE("the number of threads is checked", "[device]") {
  CHECK_FALSE(CreateCpuDevice(0).ok());
  CHECK_FALSE(CreateCpuDevice(257).ok());
  CHECK(CreateCpuDevice(2).ok());
}

}  // namespace
}  // namespace lrmoe::kernels
