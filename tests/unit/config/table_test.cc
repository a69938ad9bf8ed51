#include "common/table.h"

#include <catch2/catch.hpp>

namespace lrmoe {
namespace {

TEST_CASE("a table aligns its columns", "[table]") {
  Table table({{"node", Align::kLeft}, {"rows"}, {"state", Align::kLeft}});
  CHECK(table.ToString(false) == "node  rows  state\n");
  table.AddRow({"a", "12,345", "connected"});
  table.AddRow({"größer", "1", ""}, Style::kRed);
  CHECK(table.num_rows() == 2);
  CHECK(table.ToString(false) ==
        "node      rows  state\n"
        "a       12,345  connected\n"
        "größer       1\n");
  CHECK(table.ToString(true, 2) ==
        "  \x1b[1mnode      rows  state\x1b[0m\n"
        "  a       12,345  connected\n"
        "  \x1b[31mgrößer       1\x1b[0m\n");
}

TEST_CASE("a cell cannot steer the terminal", "[table]") {
  Table table({{"node", Align::kLeft}});
  table.AddRow({"evil\x1b[2J\nrow\x7f"});
  CHECK(table.ToString(false) == "node\nevil?[2J?row?\n");
  CHECK(NameValueLines({{"a", "b\rc"}}) == "a  b?c\n");
}

TEST_CASE("names and values are aligned", "[table]") {
  CHECK(NameValueLines({{"a", "1"}, {"long", "2"}}, 1) == " a     1\n long  2\n");
  CHECK(NameValueLines({}).empty());
}

}  // namespace
}  // namespace lrmoe
