// Every *.txt of this folder is a story: commands, "----", and what the core answered. LRMOE_REWRITE=1
// rewrites the answers; the diff is for a person to read.
#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "tests/scenario/core/story.h"

namespace lrmoe::test {
namespace {

// The text with the answers of today; comments and blank lines stay.
std::string Replay(const std::string& text) {
  Story story;
  std::istringstream in(text);
  std::string out, line, answer;
  bool commands = false, old_answer = false;
  const auto end_block = [&] {
    if (commands) out += "----\n" + (answer.empty() ? "nothing\n" : answer);
    answer.clear();
    commands = old_answer = false;
  };
  while (std::getline(in, line)) {
    if (line.empty()) {
      end_block();
      out += "\n";
    } else if (line == "----") {
      old_answer = true;
    } else if (!old_answer) {
      out += line + "\n";
      if (line[0] == '#') continue;
      commands = true;
      answer += story.Play(line);
    }
  }
  end_block();
  return out;
}

TEST_CASE("stories of the core end as they are written") {
  int stories = 0;
  for (const auto& entry : std::filesystem::directory_iterator(LRMOE_STORIES)) {
    if (entry.path().extension() != ".txt") continue;
    ++stories;
    std::ifstream file(entry.path());
    std::stringstream content;
    content << file.rdbuf();
    const std::string replayed = Replay(content.str());
    if (std::getenv("LRMOE_REWRITE") != nullptr) {
      std::ofstream(entry.path()) << replayed;
      continue;
    }
    INFO(entry.path().string());
    CHECK(replayed == content.str());
  }
  CHECK(stories >= 8);
}

}  // namespace
}  // namespace lrmoe::test
