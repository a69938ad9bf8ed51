// Products with weights in oneDNN's own blocked form: packed once per parameter version instead of at every
// call, which at some 30 rows per expert costs as much as the product itself.
#pragma once

#include <array>
#include <cstdint>
#include <map>

#include "dnnl.hpp"
#include "kernels/kernels.h"

namespace lrmoe::kernels::cpu {

// The oneDNN primitives of one thread, made when first needed and kept: a product's is for one row count.
// Not thread-safe. Sizes as in kernels.h; matrices are dense. oneDNN uses as many
// threads as the caller has set.
class PackedGemm {
 public:
  // Whether oneDNN has an optimised kernel with this form on this CPU.
  static bool Supports(Type type);

  // C[m, n] = A[m, k] . B. Whole rows of C: oneDNN has no fast kernel for a part of its columns.
  struct Product {
    Type type;
    int64_t m, n, k;
    auto operator<=>(const Product&) const = default;
  };
  dnnl_status_t Multiply(const Product& product, const void* a, const void* b, void* c);

  // Slices of kPackedMultiple columns of the packed matrix, to be done in any order and by any thread.
  // Pack, Repack: of the target; Unpack: of the source.
  struct Matrix {
    GemmKind kind;  // kForward or kInputGradient
    Type type;
    int64_t n, k;
  };
  dnnl_status_t Pack(const Matrix& matrix, int64_t first_n, const void* plain, void* packed);
  dnnl_status_t Unpack(const Matrix& matrix, int64_t first_n, const void* packed, void* plain);
  // From kForward, as which `matrix` is described, to kInputGradient.
  dnnl_status_t Repack(const Matrix& matrix, int64_t first_k, const void* forward, void* input_gradient);

 private:
  struct Prepared {
    dnnl::primitive primitive;
    dnnl::memory a, b, c;  // reorders: a to c
  };
  enum class Way : uint8_t { kPack, kUnpack, kRepack };
  using ReorderKey = std::array<int64_t, 5>;  // way, kind, type, n, k

  dnnl_status_t Reorder(Way way, const Matrix& matrix, const void* from, void* to);
  Prepared MakeProduct(const Product& product) const;
  Prepared MakeReorder(Way way, const Matrix& matrix) const;

  dnnl::engine engine_{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream_{engine_};
  std::map<Product, Prepared> products_;
  std::map<ReorderKey, Prepared> reorders_;
};

}  // namespace lrmoe::kernels::cpu
