#include "tools/sim/chart.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_format.h"

namespace lrmoe::sim {
namespace {

constexpr Color kColors[] = {{31, 119, 180},  {255, 127, 14}, {44, 160, 44},   {214, 39, 40},
                             {148, 103, 189}, {140, 86, 75},  {227, 119, 194}, {127, 127, 127},
                             {188, 189, 34},  {23, 190, 207}};
constexpr Color kAxis = {0, 0, 0}, kGrid = {221, 221, 221};
constexpr double kLeft = 62, kRight = 12, kTop = 30, kBottom = 46, kLegendLine = 16;

// Where the values of a chart lie on the drawing.
struct Plane {
  Frame area;
  double x_low = 0, x_high = 1, y_low = 0, y_high = 1;
  double X(double x) const { return area.x + (x - x_low) / (x_high - x_low) * area.width; }
  double Y(double y) const { return area.y + (y_high - y) / (y_high - y_low) * area.height; }
};

void AddText(Drawing& drawing, Position base, std::string text, Anchor anchor, double size = 11) {
  drawing.shapes.push_back(TextShape{base, std::move(text), size, anchor, false, false});
}

void DrawTitles(const std::string& title, const std::string& y_title, const Frame& frame, Drawing& drawing) {
  drawing.shapes.push_back(
      TextShape{{frame.x + frame.width / 2, frame.y + 18}, title, 13, Anchor::kMiddle, false, true});
  drawing.shapes.push_back(
      TextShape{{frame.x + 14, frame.y + frame.height / 2}, y_title, 11, Anchor::kMiddle, true, false});
}

void DrawYAxis(Plane& plane, double low, double high, Drawing& drawing) {
  const std::vector<double> ticks = Ticks(low, high, 6);
  plane.y_low = ticks.front();
  plane.y_high = ticks.back();
  const Frame& area = plane.area;
  for (double tick : ticks) {
    const double y = plane.Y(tick);
    drawing.shapes.push_back(LineShape{{{area.x, y}, {area.x + area.width, y}}, kGrid, 1, false});
    AddText(drawing, {area.x - 5, y + 4}, absl::StrFormat("%g", tick), Anchor::kEnd);
  }
  const double bottom = area.y + area.height;
  drawing.shapes.push_back(
      LineShape{{{area.x, area.y}, {area.x, bottom}, {area.x + area.width, bottom}}, kAxis, 1, false});
}

// Entries from left to right in lines of equal columns under the chart; the height they take.
double LegendHeight(size_t num_entries, double width) {
  const auto columns = std::max<size_t>(1, static_cast<size_t>(width / 110));
  const size_t lines = (num_entries + columns - 1) / columns;
  return static_cast<double>(lines) * kLegendLine;
}

void DrawLegend(const std::vector<std::string>& names, const Frame& frame, double height, bool lines,
                Drawing& drawing) {
  const auto columns = std::max<size_t>(1, static_cast<size_t>(frame.width / 110));
  const double column = frame.width / static_cast<double>(columns);
  for (size_t i = 0; i < names.size(); ++i) {
    const size_t line = i / columns;
    const double x = frame.x + 8 + column * static_cast<double>(i % columns);
    const double y =
        frame.y + frame.height - height + kLegendLine * static_cast<double>(line) + kLegendLine / 2;
    const Color color = kColors[i % std::size(kColors)];
    if (lines)
      drawing.shapes.push_back(LineShape{{{x, y - 3}, {x + 18, y - 3}}, color, 2, i >= std::size(kColors)});
    else
      drawing.shapes.push_back(BoxShape{{x + 4, y - 8}, 10, 10, color});
    AddText(drawing, {x + 22, y + 1}, names[i], Anchor::kStart);
  }
}

Frame Inner(const Frame& frame, double legend) {
  return {frame.x + kLeft, frame.y + kTop, frame.width - kLeft - kRight,
          frame.height - kTop - kBottom - legend};
}

}  // namespace

std::vector<double> Ticks(double low, double high, int count) {
  if (!(high > low)) high = low + std::max(1e-3, std::abs(low) * 1e-3);
  const double raw = (high - low) / count;
  const double unit = std::pow(10, std::floor(std::log10(raw)));
  double step = unit * 10;
  for (double nice : {1.0, 2.0, 5.0})
    if (unit * nice >= raw) {
      step = unit * nice;
      break;
    }
  std::vector<double> out;
  const double first = std::floor(low / step + 1e-9);
  for (double i = 0; out.empty() || out.back() < high - step * 1e-9; ++i)
    out.push_back((first + i) * step + 0.0);
  return out;
}

void DrawLines(const LineChart& chart, const Frame& frame, Drawing& drawing) {
  const double legend = LegendHeight(chart.lines.size(), frame.width);
  Plane plane{Inner(frame, legend)};
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  double x_low = kInfinity, x_high = -kInfinity, y_low = chart.y_from_zero ? 0 : kInfinity,
         y_high = -kInfinity;
  for (const LineChart::Line& line : chart.lines)
    for (const Position& p : line.points) {
      x_low = std::min(x_low, p.x), x_high = std::max(x_high, p.x);
      y_low = std::min(y_low, p.y), y_high = std::max(y_high, p.y);
    }
  if (!(x_high >= x_low)) x_low = 0, x_high = 1, y_low = 0, y_high = 1;  // no points at all
  plane.x_low = x_low;
  plane.x_high = x_high > x_low ? x_high : x_low + 1;
  DrawTitles(chart.title, chart.y_title, frame, drawing);
  DrawYAxis(plane, y_low, y_high, drawing);
  const Frame& area = plane.area;
  for (double tick : Ticks(plane.x_low, plane.x_high, 8)) {
    if (tick < plane.x_low - 1e-9 || tick > plane.x_high + 1e-9) continue;
    AddText(drawing, {plane.X(tick), area.y + area.height + 15}, absl::StrFormat("%g", tick),
            Anchor::kMiddle);
  }
  AddText(drawing, {area.x + area.width / 2, area.y + area.height + 32}, chart.x_title, Anchor::kMiddle);
  if (chart.marked_x > 0) {
    const double x = plane.X(chart.marked_x);
    drawing.shapes.push_back(LineShape{{{x, area.y}, {x, area.y + area.height}}, kAxis, 1, true});
  }
  std::vector<std::string> names;
  for (size_t i = 0; i < chart.lines.size(); ++i) {
    LineShape line{{}, kColors[i % std::size(kColors)], 1.6, i >= std::size(kColors)};
    for (const Position& p : chart.lines[i].points) line.points.push_back({plane.X(p.x), plane.Y(p.y)});
    if (!line.points.empty()) drawing.shapes.push_back(std::move(line));
    names.push_back(chart.lines[i].name);
  }
  DrawLegend(names, frame, legend, true, drawing);
}

void DrawBars(const BarChart& chart, const Frame& frame, Drawing& drawing) {
  std::vector<std::string> entries = chart.parts;
  if (!chart.markers.empty()) entries.push_back(chart.marker_name + " (line)");
  const double legend = LegendHeight(entries.size(), frame.width);
  Plane plane{Inner(frame, legend)};
  double highest = 0;
  for (const auto& bar : chart.values) {
    double sum = 0;
    for (double value : bar) sum += value;
    highest = std::max(highest, sum);
  }
  for (double marker : chart.markers) highest = std::max(highest, marker);
  DrawTitles(chart.title, chart.y_title, frame, drawing);
  DrawYAxis(plane, 0, highest, drawing);
  const Frame& area = plane.area;
  const double slot = area.width / static_cast<double>(std::max<size_t>(1, chart.names.size()));
  for (size_t i = 0; i < chart.names.size(); ++i) {
    const double x = area.x + slot * (static_cast<double>(i) + 0.18);
    double below = 0;
    for (size_t part = 0; part < chart.values[i].size(); ++part) {
      const double top = below + chart.values[i][part];
      drawing.shapes.push_back(BoxShape{
          {x, plane.Y(top)}, slot * 0.64, plane.Y(below) - plane.Y(top), kColors[part % std::size(kColors)]});
      below = top;
    }
    if (!chart.markers.empty() && chart.markers[i] > 0) {
      const double y = plane.Y(chart.markers[i]);
      drawing.shapes.push_back(LineShape{{{x - slot * 0.1, y}, {x + slot * 0.74, y}},
                                         kColors[chart.parts.size() % std::size(kColors)],
                                         2.5,
                                         false});
    }
    // Every other name a line lower, so that long ones do not meet.
    AddText(drawing,
            {x + slot * 0.32, area.y + area.height + (i % 2 == 0 || chart.names.size() <= 4 ? 15 : 29)},
            chart.names[i], Anchor::kMiddle, 10);
  }
  DrawLegend(entries, frame, legend, false, drawing);
}

}  // namespace lrmoe::sim
