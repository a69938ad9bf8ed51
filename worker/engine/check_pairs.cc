#include "worker/engine/check_pairs.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"

namespace lrmoe::engine {
namespace {

// Whether no pair needs a word said about it.
bool PairsAreSound(const ForwardArgs& args, int32_t num_experts, int32_t top_k) {
  std::vector<int32_t> last_token(num_experts, -1);
  bool sound = true;
  const int32_t* expert = args.expert_idx.data();
  for (int32_t t = 0; t < static_cast<int32_t>(args.num_tokens); ++t)
    for (int32_t slot = 0; slot < top_k; ++slot, ++expert) {
      const bool known = static_cast<uint32_t>(*expert) < static_cast<uint32_t>(num_experts);
      int32_t& last = last_token[known ? *expert : 0];
      sound &= known & (last != t);
      last = t;
    }
  uint32_t infinite = 0;
  for (const float alpha : args.alpha)
    infinite |= (std::bit_cast<uint32_t>(alpha) & 0x7F800000u) == 0x7F800000u;
  return sound && infinite == 0;
}

}  // namespace

absl::Status CheckPairs(const ForwardArgs& args, int32_t num_experts, int32_t top_k) {
  if (PairsAreSound(args, num_experts, top_k)) return absl::OkStatus();
  for (size_t p = 0; p < args.expert_idx.size(); ++p) {
    const int64_t token = static_cast<int64_t>(p) / top_k, slot = static_cast<int64_t>(p) % top_k;
    const int32_t e = args.expert_idx[p];
    if (e < 0 || e >= num_experts)
      return absl::InvalidArgumentError(absl::StrCat("expert_idx of token ", token, " slot ", slot, " is ", e,
                                                     "; allowed: 0..", num_experts - 1));
    for (size_t q = p - slot; q < p; ++q)
      if (args.expert_idx[q] == e)
        return absl::InvalidArgumentError(absl::StrCat("token ", token, " names expert ", e,
                                                       " twice, in slots ", q % top_k, " and ", slot));
    if (!std::isfinite(args.alpha[p]))
      return absl::InvalidArgumentError(absl::StrCat("alpha of token ", token, " slot ", slot, " (expert ", e,
                                                     ") is ", args.alpha[p], "; it must be finite"));
  }
  return absl::OkStatus();
}

}  // namespace lrmoe::engine
