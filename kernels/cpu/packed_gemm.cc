#include "kernels/cpu/packed_gemm.h"

#include <string>

#include "kernels/precondition.h"

namespace lrmoe::kernels::cpu {
namespace {

using dnnl::memory;

constexpr int64_t kSlice = kPackedMultiple;

memory::data_type TypeOf(Type type) {
  return type == Type::kBf16 ? memory::data_type::bf16 : memory::data_type::f32;
}

// B[k, n]: blocks of 64 columns, in them blocks of 32 (bf16, in pairs) or 16 rows. Sizes that are multiples
// of kPackedMultiple leave no block incomplete, so the form takes as many bytes as the plain matrix.
memory::desc PackedForm(Type type, int64_t k, int64_t n) {
  return {{k, n},
          TypeOf(type),
          type == Type::kBf16 ? memory::format_tag::BA16a64b2a : memory::format_tag::BA16a64b};
}

memory::desc Plain(Type type, int64_t rows, int64_t columns, const memory::dims& strides) {
  return {{rows, columns}, TypeOf(type), strides};
}

dnnl::matmul::primitive_desc Describe(const dnnl::engine& engine, const PackedGemm::Product& p,
                                      const memory::desc& weights) {
  return {{Plain(p.type, p.m, p.k, {p.k, 1}), weights, Plain(p.type, p.m, p.n, {p.n, 1})}, engine};
}

// oneDNN falls back to loops a hundred times slower.
bool IsFast(const dnnl::matmul::primitive_desc& described) {
  return std::string(described.impl_info_str()).rfind("brg", 0) == 0;
}

const void* Ahead(const void* base, int64_t elements, Type type) {
  return static_cast<const char*>(base) + elements * SizeOf(type);
}
void* Ahead(void* base, int64_t elements, Type type) {
  return static_cast<char*>(base) + elements * SizeOf(type);
}

// The handles of prepared memory are inputs and outputs alike.
void Point(memory& at, const void* pointer) {
  at.set_data_handle(const_cast<void*>(pointer));
}

}  // namespace

bool PackedGemm::Supports(Type type) {
  try {
    const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    const Product product{type, 32, kSlice * 4, kSlice * 2};
    const memory::desc any({product.k, product.n}, TypeOf(type), memory::format_tag::any);
    const auto chosen = Describe(engine, product, any);
    return chosen.weights_desc() == PackedForm(type, product.k, product.n) && IsFast(chosen);
  } catch (const dnnl::error&) {
    return false;  // no such kernel in this oneDNN
  }
}

PackedGemm::Prepared PackedGemm::MakeProduct(const Product& p) const {
  const auto described = Describe(engine_, p, PackedForm(p.type, p.k, p.n));
  if (!IsFast(described)) throw dnnl::error(dnnl_unimplemented, "no fast kernel for packed weights");
  const auto unset = [this](const memory::desc& of) { return memory(of, engine_, DNNL_MEMORY_NONE); };
  return {dnnl::matmul(described), unset(described.src_desc()), unset(described.weights_desc()),
          unset(described.dst_desc())};
}

dnnl_status_t PackedGemm::Multiply(const Product& product, const void* a, const void* b, void* c) {
  try {
    auto at = products_.find(product);
    if (at == products_.end()) at = products_.emplace(product, MakeProduct(product)).first;
    Prepared& prepared = at->second;
    Point(prepared.a, a);
    Point(prepared.b, b);
    Point(prepared.c, c);
    prepared.primitive.execute(
        stream_, {{DNNL_ARG_SRC, prepared.a}, {DNNL_ARG_WEIGHTS, prepared.b}, {DNNL_ARG_DST, prepared.c}});
    stream_.wait();
    return dnnl_success;
  } catch (const dnnl::error& error) {
    return error.status;
  }
}

// Described as parts of B[k, n], whichever way round they lie.
PackedGemm::Prepared PackedGemm::MakeReorder(Way way, const Matrix& m) const {
  memory::desc plain = m.kind == GemmKind::kForward ? Plain(m.type, m.k, kSlice, {1, m.k})
                                                    : Plain(m.type, m.k, kSlice, {m.n, 1});
  memory::desc from = plain, to = PackedForm(m.type, m.k, kSlice);
  if (way == Way::kUnpack) std::swap(from, to);
  if (way == Way::kRepack) {
    from = PackedForm(m.type, m.k, m.n).submemory_desc({kSlice, m.n}, {0, 0});
    to = PackedForm(m.type, m.n, kSlice).permute_axes({1, 0});
  }
  const dnnl::reorder::primitive_desc described(engine_, from, engine_, to);
  return {dnnl::reorder(described), memory(from, engine_, DNNL_MEMORY_NONE), memory(),
          memory(to, engine_, DNNL_MEMORY_NONE)};
}

dnnl_status_t PackedGemm::Reorder(Way way, const Matrix& m, const void* from, void* to) {
  const ReorderKey key{static_cast<int64_t>(way), static_cast<int64_t>(m.kind), static_cast<int64_t>(m.type),
                       m.n, m.k};
  try {
    auto at = reorders_.find(key);
    if (at == reorders_.end()) at = reorders_.emplace(key, MakeReorder(way, m)).first;
    Prepared& prepared = at->second;
    Point(prepared.a, from);
    Point(prepared.c, to);
    prepared.primitive.execute(stream_, {{DNNL_ARG_FROM, prepared.a}, {DNNL_ARG_TO, prepared.c}});
    stream_.wait();
    return dnnl_success;
  } catch (const dnnl::error& error) {
    return error.status;
  }
}

dnnl_status_t PackedGemm::Pack(const Matrix& m, int64_t first_n, const void* plain, void* packed) {
  const int64_t start = m.kind == GemmKind::kForward ? first_n * m.k : first_n;
  return Reorder(Way::kPack, m, Ahead(plain, start, m.type), Ahead(packed, first_n * m.k, m.type));
}

dnnl_status_t PackedGemm::Unpack(const Matrix& m, int64_t first_n, const void* packed, void* plain) {
  const int64_t start = m.kind == GemmKind::kForward ? first_n * m.k : first_n;
  return Reorder(Way::kUnpack, m, Ahead(packed, first_n * m.k, m.type), Ahead(plain, start, m.type));
}

dnnl_status_t PackedGemm::Repack(const Matrix& m, int64_t first_k, const void* forward,
                                 void* input_gradient) {
  // Rows first_k... of each block of columns lie behind all rows before them in that block.
  return Reorder(Way::kRepack, m, Ahead(forward, first_k * kSlice, m.type),
                 Ahead(input_gradient, first_k * m.n, m.type));
}

}  // namespace lrmoe::kernels::cpu
