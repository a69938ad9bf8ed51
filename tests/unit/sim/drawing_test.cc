#include "tools/sim/drawing.h"

#include <catch2/catch.hpp>
#include <fstream>
#include <sstream>

#include "tests/unit/sim/temporary_file.h"
#include "tools/sim/chart.h"
#include "tools/sim/png.h"

namespace lrmoe::sim {
namespace {

Drawing Sample() {
  Drawing drawing{400, 300, {}};
  DrawLines({"a < b & c", "x", "y", {{"one", {{0, 1}, {1, 3}, {2, 2}}}, {"two", {}}}, true, 1},
            {0, 0, 200, 300}, drawing);
  DrawBars({"bars", "GiB", {"p", "q"}, {"low", "high"}, {{1, 2}, {3, 4}}, {2, 0}, "paper"},
           {200, 0, 200, 300}, drawing);
  return drawing;
}

TEST_CASE("SVG is well formed and holds every series", "[drawing]") {
  const std::string svg = ToSvg(Sample());
  CHECK(svg.find("<?xml") == 0);
  CHECK(svg.substr(svg.size() - 7) == "</svg>\n");
  CHECK(svg.find("a &lt; b &amp; c") != std::string::npos);
  CHECK(svg.find("nan") == std::string::npos);
  for (const char* name : {">one<", ">two<", ">low<", ">high<", ">paper (line)<", ">p<", ">q<"}) {
    CAPTURE(name);
    CHECK(svg.find(name) != std::string::npos);
  }
}

TEST_CASE("stacked bars grow with their values", "[drawing]") {
  const Drawing drawing = Sample();
  std::vector<BoxShape> boxes;
  for (const auto& shape : drawing.shapes)
    if (const auto* box = std::get_if<BoxShape>(&shape); box != nullptr && box->width > 20)
      boxes.push_back(*box);
  REQUIRE(boxes.size() == 4);
  CHECK(boxes[1].height == Approx(2 * boxes[0].height));
  CHECK(boxes[3].height == Approx(4 * boxes[0].height));
  CHECK(boxes[1].corner.y + boxes[1].height == Approx(boxes[0].corner.y));
}

TEST_CASE("ticks are round and cover the values", "[drawing]") {
  CHECK(Ticks(0, 10, 5) == std::vector<double>{0, 2, 4, 6, 8, 10});
  CHECK(Ticks(1, 1, 5).size() >= 2);
  for (const auto& [low, high] : std::vector<std::pair<double, double>>{{0.3, 17.2}, {-4, 9}, {1e-9, 3e-9}}) {
    const auto ticks = Ticks(low, high, 6);
    CHECK(ticks.front() <= low + 1e-12);
    CHECK(ticks.back() >= high - 1e-12);
    CHECK(ticks.size() <= 9);
  }
}

TEST_CASE("plots are written as their name says, or refused", "[drawing]") {
  CHECK_THAT(std::string(WriteDrawing(Sample(), "plot.gif").message()),
             Catch::Contains("plot is \"plot.gif\"; allowed: a file name that ends in .svg or .png"));
  CHECK(WriteDrawing(Sample(), "/nonexistent/plot.svg").code() == absl::StatusCode::kUnavailable);
  const test::TemporaryFile target("", ".png");
  const absl::Status status = WriteDrawing(Sample(), target.path());
  if (!PngSupport().ok()) {
    CHECK(status.code() == absl::StatusCode::kUnimplemented);
    CHECK_THAT(std::string(status.message()), Catch::Contains("built without cairo"));
    return;
  }
  REQUIRE(status.ok());
  std::ifstream file(target.path(), std::ios::binary);
  std::string start(8, '\0');
  file.read(start.data(), 8);
  CHECK(start == "\x89PNG\r\n\x1a\n");
  CHECK(WriteDrawing(Sample(), "/nonexistent/plot.png").code() == absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace lrmoe::sim
