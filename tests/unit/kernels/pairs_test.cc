// Operations on pairs against loops written from the words of pairs.h: moving, routing and packing.
#include "kernels/pairs.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>

#include "kernels/kernels.h"
#include "tests/unit/kernels/poisoned.h"

namespace lrmoe::kernels {
namespace {

PairOperations& Cpu() {
  static const std::unique_ptr<Device> device = CreateCpuDevice(1).value();
  return *device;
}

// Any bit patterns: NaNs and both zeros as floats.
std::vector<uint32_t> Words(Random& random, int64_t n) {
  std::vector<uint32_t> out(n);
  for (uint32_t& word : out) word = static_cast<uint32_t>(random.Next());
  return out;
}

// Indices in any order below 2^24, to which a stretch may add or from which it may take away.
std::vector<int32_t> Indices(Random& random, int64_t n) {
  std::vector<int32_t> out(n);
  for (int32_t& index : out) index = static_cast<int32_t>(random.Between(2000, 1 << 24));
  return out;
}

// Ragged stretches out of `from_size` entries, in any order, whose targets have gaps between them. A target
// takes room(count) entries.
struct Stretches {
  std::vector<Stretch> list;
  int64_t to_size = 0;
};
Stretches RandomStretches(Random& random, int64_t from_size, const std::function<int64_t(int64_t)>& room) {
  Stretches out;
  for (int64_t i = random.Between(0, 8); i > 0; --i) {
    Stretch s;
    s.count = random.Below(4) == 0 ? 0 : random.Between(0, std::min<int64_t>(from_size, 300));
    s.from = random.Between(0, from_size - s.count);
    s.to = out.to_size + random.Between(0, 3);
    s.add = static_cast<int32_t>(random.Between(-1000, 1000));
    out.to_size = s.to + room(s.count) + random.Between(0, 3);
    out.list.push_back(s);
  }
  Shuffle(random, out.list);
  return out;
}

int64_t AsMany(int64_t count) {
  return count;
}
int64_t Bytes(int64_t bits) {
  return (bits + 7) / 8;
}

}  // namespace

TEST_CASE("words are gathered, scattered and inverted by their indices", "[pairs]") {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const int64_t n = random.Between(0, 300), size = random.Between(n + 1, 400);
    const std::vector<uint32_t> all = Words(random, size), some = Words(random, n);
    std::vector<int32_t> any(n), distinct = Permutation(random, size);
    for (int32_t& index : any) index = static_cast<int32_t>(random.Below(size));
    distinct.resize(n);

    Poisoned<uint32_t> gathered(n + 2), scattered(size);
    Poisoned<int32_t> inverted(size);
    auto want_gathered = gathered, want_scattered = scattered;
    auto want_inverted = inverted;
    Cpu().GatherWords(n, any.data(), all.data(), gathered.ptr());
    Cpu().ScatterWords(n, distinct.data(), some.data(), scattered.ptr());
    Cpu().Invert(n, distinct.data(), inverted.ptr());
    for (int64_t i = 0; i < n; ++i) {
      want_gathered[i] = all[any[i]];
      want_scattered[distinct[i]] = some[i];
      want_inverted[distinct[i]] = static_cast<int32_t>(i);
    }
    REQUIRE(gathered == want_gathered);
    REQUIRE(scattered == want_scattered);
    REQUIRE(inverted == want_inverted);
  }
}

TEST_CASE("stretches are copied and counted where they belong and nowhere else", "[pairs]") {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const std::vector<int32_t> src = Indices(random, random.Between(0, 500));
    const Stretches stretches = RandomStretches(random, static_cast<int64_t>(src.size()), AsMany);
    Poisoned<int32_t> copied(stretches.to_size), counted(stretches.to_size);
    auto want_copied = copied, want_counted = counted;
    Cpu().CopyStretches(stretches.list, src.data(), copied.ptr());
    Cpu().CountStretches(stretches.list, counted.ptr());
    for (const Stretch& s : stretches.list) {
      for (int64_t i = 0; i < s.count; ++i) {
        want_copied[s.to + i] = src[s.from + i] + s.add;
        want_counted[s.to + i] = static_cast<int32_t>(s.from + s.add + i);
      }
    }
    REQUIRE(copied == want_copied);
    REQUIRE(counted == want_counted);
  }
}

TEST_CASE("a copied stretch that adds nothing keeps every bit", "[pairs]") {
  Random random(1);
  const std::vector<uint32_t> src = Words(random, 1000);
  Poisoned<uint32_t> dst(1000);
  Cpu().CopyStretches(
      std::vector<Stretch>{{.from = 0, .to = 1, .count = 999}, {.from = 999, .to = 0, .count = 1}},
      src.data(), dst.ptr());
  Poisoned<uint32_t> want(src);
  std::rotate(want.ptr(), want.ptr() + 999, want.ptr() + 1000);
  CHECK(dst == want);
}

TEST_CASE("numbers are counted as often as asked", "[pairs]") {
  for (int64_t n : {0, 1, 7, 64, 65}) {
    for (int32_t times : {1, 2, 7, 8, 64, 100}) {
      CAPTURE(n, times);
      Poisoned<int32_t> counted(n);
      auto want = counted;
      Cpu().CountRepeated(n, times, counted.ptr());
      for (int64_t i = 0; i < n; ++i) want[i] = static_cast<int32_t>(i / times);
      REQUIRE(counted == want);
    }
  }
}

TEST_CASE("the largest of each range, and -1 where there is none", "[pairs]") {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const int64_t size = random.Between(0, 200);
    std::vector<int32_t> src(size);
    for (int32_t& value : src)
      value = static_cast<int32_t>(random.Between(-1, random.Below(2) ? 3 : INT32_MAX));
    std::vector<Range> ranges(random.Below(10));
    std::vector<int32_t> want;
    for (Range& range : ranges) {
      range.count = random.Below(3) == 0 ? 0 : random.Between(0, size);
      range.begin = random.Between(0, size - range.count);
      const auto begin = src.begin() + range.begin;
      want.push_back(range.count == 0 ? -1 : *std::max_element(begin, begin + range.count));
    }
    std::vector<int32_t> largest(ranges.size(), -77);
    Cpu().MaxOfRanges(ranges, src.data(), largest);
    REQUIRE(largest == want);
  }
}

TEST_CASE("items are listed by key in their order", "[pairs]") {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const int64_t num_keys = random.Between(1, random.Below(2) ? 5 : 400), n = random.Between(0, 500);
    const int64_t used = random.Between(1, num_keys);  // the last keys have no items
    std::vector<int32_t> keys(n);
    for (int32_t& key : keys) key = static_cast<int32_t>(random.Below(used));
    Poisoned<int64_t> offset(num_keys + 2);
    Poisoned<int32_t> index(n);
    auto want_offset = offset;
    auto want_index = index;
    Cpu().GroupByKey(n, keys.data(), num_keys, offset.ptr(), index.ptr());
    int64_t listed = 0;
    for (int32_t key = 0; key < num_keys; ++key) {
      want_offset[key] = listed;
      for (int32_t i = 0; i < n; ++i)
        if (keys[i] == key) want_index[listed++] = i;
    }
    want_offset[num_keys] = listed;
    want_offset.CopyUnspecified(offset, num_keys + 1, num_keys + 2);
    REQUIRE(index == want_index);
    REQUIRE(offset == want_offset);
  }
  Poisoned<int64_t> offset(2);
  Cpu().GroupByKey(0, nullptr, 0, offset.ptr(), nullptr);
  CHECK(offset[0] == 0);
}

TEST_CASE("marks become bits, the last byte filled with zeros", "[pairs]") {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    std::vector<uint8_t> marks(random.Between(0, 500));
    for (uint8_t& mark : marks) mark = static_cast<uint8_t>(random.Below(2));
    const Stretches stretches = RandomStretches(random, static_cast<int64_t>(marks.size()), Bytes);
    Poisoned<uint8_t> bits(stretches.to_size);
    auto want = bits;
    Cpu().PackBits(stretches.list, marks.data(), bits.ptr());
    for (const Stretch& s : stretches.list) {
      for (int64_t b = 0; b < Bytes(s.count); ++b) want[s.to + b] = 0;
      for (int64_t i = 0; i < s.count; ++i)
        if (marks[s.from + i]) want[s.to + i / 8] = static_cast<uint8_t>(want[s.to + i / 8] | 1 << i % 8);
    }
    REQUIRE(bits == want);
  }
}

TEST_CASE("set bits are listed, whatever lies behind them", "[pairs]") {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    std::vector<uint8_t> bits(random.Between(0, 80));
    const int density = static_cast<int>(random.Below(4));  // none, few, many, all
    for (uint8_t& byte : bits) {
      const uint64_t any = random.Next();
      byte = static_cast<uint8_t>(density == 0   ? 0
                                  : density == 1 ? any & any >> 8 & any >> 16
                                  : density == 2 ? any
                                                 : 255);
    }
    // Room for the set bits and no more, so that the lists of some stretches touch.
    std::vector<Stretch> stretches(random.Below(8));
    std::vector<std::vector<int32_t>> lists;
    int64_t size = 0;
    for (Stretch& s : stretches) {
      s.count = random.Between(0, static_cast<int64_t>(bits.size()) * 8);
      s.from = random.Between(0, static_cast<int64_t>(bits.size()) - Bytes(s.count));
      s.add = static_cast<int32_t>(random.Between(0, 1 << 20));
      s.to = size;
      for (int64_t i = 0; i < s.count; ++i) size += bits[s.from + i / 8] >> (i % 8) & 1;
      size += random.Below(2);
    }
    Shuffle(random, stretches);
    Poisoned<int32_t> index(size);
    auto want = index;
    Cpu().UnpackBits(stretches, bits.data(), index.ptr());
    for (const Stretch& s : stretches) {
      int64_t next = s.to;
      for (int64_t i = 0; i < s.count; ++i)
        if (bits[s.from + i / 8] >> (i % 8) & 1) want[next++] = static_cast<int32_t>(s.add + i);
    }
    REQUIRE(index == want);
  }
}

TEST_CASE("marks of every count return from their bits", "[pairs]") {
  Random random(5);
  for (int64_t count = 0; count <= 200; ++count) {
    CAPTURE(count);
    std::vector<uint8_t> marks(count);
    std::vector<int32_t> set;
    for (int32_t i = 0; i < count; ++i) {
      marks[i] = static_cast<uint8_t>(random.Below(2));
      if (marks[i]) set.push_back(i);
    }
    Poisoned<uint8_t> bits(Bytes(count));
    Poisoned<int32_t> index(static_cast<int64_t>(set.size()));
    const std::vector<Stretch> all = {{.from = 0, .to = 0, .count = count}};
    Cpu().PackBits(all, marks.data(), bits.ptr());
    Cpu().UnpackBits(all, bits.ptr(), index.ptr());
    REQUIRE(index == Poisoned<int32_t>(set));
  }
}

namespace {

// `destination` of each pair, -1: it does not travel. Sets of tokens say what has to come out.
void CheckPayload(Random& random, int32_t k, int32_t num_destinations,
                  const std::vector<int32_t>& destination) {
  const auto num_pairs = static_cast<int64_t>(destination.size());
  std::vector<std::vector<int32_t>> sent(num_destinations);
  std::vector<std::set<int32_t>> tokens(num_destinations);
  for (int32_t p = 0; p < num_pairs; ++p) {
    if (destination[p] < 0) continue;
    sent[destination[p]].push_back(p);
    tokens[destination[p]].insert(p / k);
  }
  std::vector<int64_t> pairs_to;
  std::vector<int32_t> sent_pair;
  for (std::vector<int32_t>& pairs : sent) {
    pairs_to.push_back(static_cast<int64_t>(pairs.size()));
    Shuffle(random, pairs);
    sent_pair.insert(sent_pair.end(), pairs.begin(), pairs.end());
  }
  Poisoned<int32_t> scratch(num_pairs), token(static_cast<int64_t>(sent_pair.size())), pair_row(num_pairs);
  auto want_scratch = scratch, want_token = token, want_row = pair_row;
  std::vector<int32_t> rows(num_destinations, -7), want_rows;
  Cpu().PackPayload({.num_tokens = num_pairs / k,
                     .k = k,
                     .pairs_to = pairs_to,
                     .sent_pair = sent_pair.data(),
                     .destination = scratch.ptr(),
                     .token = token.ptr(),
                     .pair_row = pair_row.ptr(),
                     .rows = rows});
  int64_t first = 0;
  for (int32_t d = 0; d < num_destinations; ++d) {
    const std::vector<int32_t> list(tokens[d].begin(), tokens[d].end());
    want_rows.push_back(static_cast<int32_t>(list.size()));
    for (size_t i = 0; i < list.size(); ++i) want_token[first + static_cast<int64_t>(i)] = list[i];
    want_token.CopyUnspecified(token, first + static_cast<int64_t>(list.size()), first + pairs_to[d]);
    first += pairs_to[d];
    for (const int32_t p : sent[d])
      want_row[p] = static_cast<int32_t>(std::lower_bound(list.begin(), list.end(), p / k) - list.begin());
  }
  for (int64_t p = 0; p < num_pairs; ++p)
    if (destination[p] < 0) want_row.CopyUnspecified(pair_row, p, p + 1);
  want_scratch.CopyUnspecified(scratch, 0, num_pairs);
  REQUIRE(rows == want_rows);
  REQUIRE(token == want_token);
  REQUIRE(pair_row == want_row);
  REQUIRE(scratch == want_scratch);
}

}  // namespace

TEST_CASE("a payload carries each token once to each destination", "[pairs]") {
  for (int32_t num_destinations : {1, 2, 5, 63, 64, 65, 128, 150}) {
    for (uint64_t seed = 0; seed < 40; ++seed) {
      CAPTURE(num_destinations, seed);
      Random random(seed);
      const auto k = static_cast<int32_t>(random.Between(1, 9));
      std::vector<int32_t> destination(random.Between(0, 200) * k);
      // Everything to the last, each token to one, or any mixture with some that do not travel.
      const auto style = random.Below(4);
      for (size_t p = 0; p < destination.size(); ++p) {
        const auto any = static_cast<int32_t>(random.Below(num_destinations));
        switch (style) {
          case 0:
            destination[p] = num_destinations - 1;
            break;
          case 1:
            destination[p] = p % k == 0 ? any : destination[p - 1];
            break;
          default:
            destination[p] = random.Below(style) == 0 ? any : -1;
        }
        if (style == 3 && random.Below(2) == 0) destination[p] = any;
      }
      CheckPayload(random, k, num_destinations, destination);
    }
  }
}

TEST_CASE("a payload of nothing, and to nobody", "[pairs]") {
  Random random(2);
  CheckPayload(random, 3, 70, {});
  CheckPayload(random, 3, 70, std::vector<int32_t>(30, -1));
  CheckPayload(random, 3, 0, std::vector<int32_t>(30, -1));
}

}  // namespace lrmoe::kernels
