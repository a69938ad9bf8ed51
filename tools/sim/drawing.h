// A picture of lines, boxes and texts, written as SVG or PNG.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"

namespace lrmoe::sim {

struct Color {
  uint8_t red = 0, green = 0, blue = 0;
};

// Positions are pixels from the upper left corner.
struct Position {
  double x = 0, y = 0;
};

struct LineShape {
  std::vector<Position> points;  // joined in order
  Color color;
  double width = 1;
  bool dashed = false;
};

struct BoxShape {
  Position corner;  // upper left
  double width = 0, height = 0;
  Color fill;
};

enum class Anchor : uint8_t { kStart, kMiddle, kEnd };

struct TextShape {
  Position base;  // of the base line, where the anchor says
  std::string text;
  double size = 12;
  Anchor anchor = Anchor::kStart;
  bool upright = false;  // turned a quarter to the left
  bool bold = false;
};

struct Drawing {
  double width = 0, height = 0;
  std::vector<std::variant<LineShape, BoxShape, TextShape>> shapes;
};

// A complete SVG document.
std::string ToSvg(const Drawing& drawing);

// InvalidArgument unless `path` ends in .svg or .png; Unimplemented for PNG in a program built without cairo.
// For a check before long work.
absl::Status CheckPlotPath(const std::string& path);

// Writes the format that the end of `path` names. Unavailable when the file cannot be written.
absl::Status WriteDrawing(const Drawing& drawing, const std::string& path);

}  // namespace lrmoe::sim
