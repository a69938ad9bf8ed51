// Seeded damage to valid texts, for the readers' fuzz tests.
#pragma once

#include <string>

#include "common/random.h"

namespace lrmoe::test {

// `text` after one to four random edits: a character replaced, some erased, a piece of it repeated elsewhere.
inline std::string Damaged(std::string text, Random& random) {
  static const std::string kAlphabet = "0123456789-+.eE[]{},:\" \nntfabz\xff";
  for (uint64_t edits = 1 + random.Below(4); edits > 0; --edits) {
    const size_t at = random.Below(text.size());
    switch (random.Below(3)) {
      case 0:
        text[at] = kAlphabet[random.Below(kAlphabet.size())];
        break;
      case 1:
        text.erase(at, 1 + random.Below(8));
        break;
      default:
        text.insert(at, text.substr(random.Below(text.size()), random.Below(12)));
    }
    if (text.empty()) text = " ";
  }
  return text;
}

}  // namespace lrmoe::test
