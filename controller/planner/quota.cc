#include "controller/planner/quota.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/check.h"

namespace lrmoe::planner {
namespace {

using Wide = unsigned __int128;

// Water-filling in fixed point: amounts are rows times 2^shift, so that integer flows decide fractional
// rates.
class WaterFill {
 public:
  WaterFill(const Workload& work, const PlacedRows& placed, const RankCapacity& capacity, double level,
            const std::vector<int64_t>& low)
      : work_(work), placed_(placed), low_(low) {
    while (shift_ < 20 && (work.total >> (60 - shift_ - 1)) == 0) ++shift_;
    room_ = capacity;
    room_.uniform = true;
    std::fill(room_.weight.begin(), room_.weight.end(), 1.0);
    for (int32_t g = 0; g < work.num_ranks; ++g) {
      rows_at_level_.push_back(std::min(capacity.RowsAt(level, g), work.total));
      room_.limit[g] = rows_at_level_[g] << shift_;
    }
    amount_.assign(work.num_experts, 0);
    for (int32_t e = 0; e < work.num_experts; ++e)
      if (work.rows[e] > 0) active_.push_back(e);
  }

  // Fixed-point amounts of every expert; false when `kept` rows cannot be carried.
  bool Run(int64_t kept) {
    int64_t left = kept << shift_;
    while (!active_.empty()) {
      SetRates(active_, left);
      if (Feasible()) return Total() >= (kept << shift_) - work_.num_experts;
      std::vector<int32_t> tight;
      do {  // every round lowers the common rate to what the violated cut can carry
        tight.clear();
        int64_t room = 0;
        for (int32_t g : flow_.cut()) room += room_.limit[g];
        for (int32_t e = 0; e < work_.num_experts; ++e) {
          if (work_.rows[e] == 0 || !flow_.InCut(placed_.rank[placed_.first[e]]) || !Confined(e)) continue;
          if (std::binary_search(active_.begin(), active_.end(), e)) {
            tight.push_back(e);
          } else {
            room -= amount_[e];
          }
        }
        if (tight.empty() || room < 0 || !SetRates(tight, room)) return false;
        const Wide num = rate_num_, den = rate_den_;
        for (int32_t e : active_)
          amount_[e] = Clamp(e, static_cast<int64_t>(num * static_cast<uint64_t>(work_.rows[e]) / den));
      } while (!Feasible());
      for (int32_t e : tight) left -= amount_[e];
      std::vector<int32_t> rest;
      std::set_difference(active_.begin(), active_.end(), tight.begin(), tight.end(),
                          std::back_inserter(rest));
      active_ = std::move(rest);
    }
    return Total() >= (kept << shift_) - work_.num_experts;
  }

  // Whole rows; false when they do not add up to `kept`.
  bool Round(int64_t kept, std::vector<int64_t>& quota) {
    std::vector<std::pair<int64_t, int32_t>> fraction;
    quota.assign(work_.num_experts, 0);
    for (int32_t e = 0; e < work_.num_experts; ++e) {
      quota[e] = std::max(low_[e], amount_[e] >> shift_);
      if (quota[e] < work_.rows[e]) fraction.emplace_back(-(amount_[e] - (quota[e] << shift_)), e);
    }
    std::sort(fraction.begin(), fraction.end());
    for (int32_t g = 0; g < work_.num_ranks; ++g) room_.limit[g] = rows_at_level_[g];
    Load(quota);
    if (!flow_.Fit(room_, kNoLevel)) return false;
    int64_t left = kept - std::accumulate(quota.begin(), quota.end(), int64_t{0});
    if (left < 0) return false;
    // One round suffices in exact arithmetic; fixed point may need part of a second.
    for (int round = 0; round < 3 && left > 0; ++round) {
      for (const auto& [negative_fraction, e] : fraction) {
        if (left == 0 || quota[e] == work_.rows[e]) continue;
        flow_.AddRows(e, 1);
        if (flow_.Fit(room_, kNoLevel)) {
          ++quota[e];
          --left;
        } else {
          flow_.AddRows(e, -1);
        }
      }
    }
    return left == 0;
  }

 private:
  static constexpr double kNoLevel = 0x1p62;

  int64_t Clamp(int32_t e, int64_t amount) const {
    return std::clamp(amount, low_[e] << shift_, work_.rows[e] << shift_);
  }

  // Gives `experts` one common rate so that their amounts sum to `room`, each between its floor and its rows.
  // False when the floors alone need more.
  bool SetRates(const std::vector<int32_t>& experts, int64_t room) {
    std::vector<int32_t> free = experts;
    int64_t left = room;
    for (;;) {
      int64_t rows = 0;
      for (int32_t e : free) rows += work_.rows[e];
      if (left < 0) return false;
      rate_num_ = static_cast<uint64_t>(left);
      rate_den_ = static_cast<uint64_t>(std::max<int64_t>(rows, 1));
      if (rows > 0 && rate_num_ > (rate_den_ << shift_)) rate_num_ = rate_den_ << shift_;
      if (rows == 0) rate_num_ = 0;
      const size_t before = free.size();
      std::erase_if(free, [&](int32_t e) {
        const bool held = rate_num_ * static_cast<uint64_t>(work_.rows[e]) / rate_den_ <
                          static_cast<Wide>(static_cast<uint64_t>(low_[e] << shift_));
        if (held) left -= low_[e] << shift_;
        return held;
      });
      if (free.size() == before) break;
    }
    for (int32_t e : experts)
      amount_[e] =
          Clamp(e, static_cast<int64_t>(rate_num_ * static_cast<uint64_t>(work_.rows[e]) / rate_den_));
    return true;
  }

  int64_t Total() const { return std::accumulate(amount_.begin(), amount_.end(), int64_t{0}); }

  bool Confined(int32_t e) const {
    for (int32_t i = placed_.first[e]; i < placed_.first[e + 1]; ++i)
      if (!flow_.InCut(placed_.rank[i])) return false;
    return true;
  }

  void Load(const std::vector<int64_t>& amount) {
    std::vector<int64_t> rows(placed_.size());
    for (int32_t e = 0; e < work_.num_experts; ++e) {
      const int32_t begin = placed_.first[e];
      ShareInProportion(&placed_.forward[begin], placed_.first[e + 1] - begin, amount[e], &rows[begin]);
    }
    flow_ = ToFlow(work_, placed_, rows, flow_idx_);
  }

  bool Feasible() {
    Load(amount_);
    return flow_.Fit(room_, kNoLevel);
  }

  const Workload& work_;
  const PlacedRows& placed_;
  const std::vector<int64_t>& low_;
  int shift_ = 0;
  RankCapacity room_;
  std::vector<int64_t> rows_at_level_;
  std::vector<int64_t> amount_;  // [E] fixed point
  std::vector<int32_t> active_;  // experts whose rate still rises, ascending
  Wide rate_num_ = 0, rate_den_ = 1;
  RowFlow flow_;
  std::vector<int32_t> flow_idx_;
};

}  // namespace

std::vector<int64_t> FloorRows(const Workload& work, double retention_floor) {
  std::vector<int64_t> low(work.num_experts, 0);
  if (retention_floor > 0)
    for (int32_t e = 0; e < work.num_experts; ++e) low[e] = CeilRows(retention_floor, work.rows[e]);
  return low;
}

std::optional<std::vector<int64_t>> FairQuotas(const Workload& work, const PlacedRows& placed,
                                               const RankCapacity& capacity, double level, int64_t kept,
                                               const std::vector<int64_t>& low) {
  WaterFill fill(work, placed, capacity, level, low);
  std::vector<int64_t> quota;
  if (!fill.Run(kept) || !fill.Round(kept, quota)) return std::nullopt;
  return quota;
}

std::vector<int64_t> UniformQuotas(const Workload& work, int64_t kept) {
  std::vector<int64_t> quota(work.num_experts);
  ShareInProportion(work.rows.data(), work.num_experts, kept, quota.data());
  return quota;
}

std::vector<int64_t> WaterfillQuotas(const Workload& work, int64_t kept, const std::vector<int64_t>& low) {
  const auto at = [&](int32_t e, int64_t level) { return std::clamp(level, low[e], work.rows[e]); };
  int64_t level = 0, above = *std::max_element(work.rows.begin(), work.rows.end()) + 1;
  while (above - level > 1) {  // the highest level that does not exceed `kept`
    const int64_t middle = level + (above - level) / 2;
    int64_t sum = 0;
    for (int32_t e = 0; e < work.num_experts; ++e) sum += at(e, middle);
    (sum <= kept ? level : above) = middle;
  }
  std::vector<int64_t> quota(work.num_experts);
  int64_t left = kept;
  for (int32_t e = 0; e < work.num_experts; ++e) left -= quota[e] = at(e, level);
  for (int32_t e = 0; e < work.num_experts && left > 0; ++e) {
    if (at(e, level + 1) == quota[e]) continue;
    ++quota[e];
    --left;
  }
  return quota;
}

std::optional<BackwardRows> AllocateBackward(const Workload& work, const PlacedRows& placed,
                                             const RankCapacity& capacity,
                                             const std::vector<int64_t>& quota) {
  BackwardRows out;
  out.rows.resize(placed.size());
  int64_t kept = 0;
  for (int32_t e = 0; e < work.num_experts; ++e) {
    const int32_t begin = placed.first[e];
    ShareInProportion(&placed.forward[begin], placed.first[e + 1] - begin, quota[e], &out.rows[begin]);
    kept += quota[e];
  }
  std::vector<int32_t> flow_idx;
  RowFlow flow = ToFlow(work, placed, out.rows, flow_idx);
  out.level = flow.MinimisePeak(capacity, capacity.LeastLevel(kept, work.all_ranks));
  if (std::isinf(out.level)) return std::nullopt;
  for (int32_t i = 0; i < placed.size(); ++i) out.rows[i] = flow.instance(flow_idx[i]).rows;
  return out;
}

}  // namespace lrmoe::planner
