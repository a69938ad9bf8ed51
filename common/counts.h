// Routed counts of one invocation: n[s][e] pairs that source rank s routed to expert e.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lrmoe {

class RoutedCounts {
 public:
  RoutedCounts() = default;
  RoutedCounts(int32_t num_sources, int32_t num_experts)
      : num_sources_(num_sources),
        num_experts_(num_experts),
        counts_(static_cast<size_t>(num_sources) * num_experts, 0) {}

  int32_t num_sources() const { return num_sources_; }
  int32_t num_experts() const { return num_experts_; }

  int64_t& at(int32_t source_idx, int32_t expert_idx) {
    return counts_[static_cast<size_t>(source_idx) * num_experts_ + expert_idx];
  }
  int64_t at(int32_t source_idx, int32_t expert_idx) const {
    return counts_[static_cast<size_t>(source_idx) * num_experts_ + expert_idx];
  }
  std::span<int64_t> source(int32_t source_idx) {
    return {counts_.data() + static_cast<size_t>(source_idx) * num_experts_,
            static_cast<size_t>(num_experts_)};
  }
  std::span<const int64_t> source(int32_t source_idx) const {
    return {counts_.data() + static_cast<size_t>(source_idx) * num_experts_,
            static_cast<size_t>(num_experts_)};
  }
  bool operator==(const RoutedCounts&) const = default;

 private:
  int32_t num_sources_ = 0;
  int32_t num_experts_ = 0;
  std::vector<int64_t> counts_;  // row-major [S][E]
};

}  // namespace lrmoe
