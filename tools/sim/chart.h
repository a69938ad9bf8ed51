// Charts on a drawing: lines over numbers, stacked bars over names. Each fills a rectangle and carries its
// title, axes and legend.
#pragma once

#include <string>
#include <vector>

#include "tools/sim/drawing.h"

namespace lrmoe::sim {

struct Frame {
  double x = 0, y = 0, width = 0, height = 0;
};

struct LineChart {
  struct Line {
    std::string name;
    std::vector<Position> points;
  };
  std::string title, x_title, y_title;
  std::vector<Line> lines;  // up to ten in colours of their own, then dashed in the same colours
  bool y_from_zero = false;
  double marked_x = 0;  // a dashed upright line there when > 0
};

struct BarChart {
  std::string title, y_title;
  std::vector<std::string> names;           // of the bars
  std::vector<std::string> parts;           // of a bar, from below
  std::vector<std::vector<double>> values;  // [bar][part]
  std::vector<double> markers;              // [bar], beside the bar, a short line; empty: none
  std::string marker_name;
};

void DrawLines(const LineChart& chart, const Frame& frame, Drawing& drawing);
void DrawBars(const BarChart& chart, const Frame& frame, Drawing& drawing);

// Round numbers from at or below `low` to at or above `high`, about `count` of them.
std::vector<double> Ticks(double low, double high, int count);

}  // namespace lrmoe::sim
