#include "tools/sim/drawing.h"

#include <fstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "common/status_macros.h"
#include "tools/sim/png.h"

namespace lrmoe::sim {
namespace {

std::string Hex(const Color& color) {
  return absl::StrFormat("#%02x%02x%02x", color.red, color.green, color.blue);
}

void Append(std::string& out, const LineShape& line) {
  absl::StrAppendFormat(&out, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"%g\"", Hex(line.color),
                        line.width);
  if (line.dashed) out += " stroke-dasharray=\"5 4\"";
  out += " points=\"";
  for (size_t i = 0; i < line.points.size(); ++i)
    absl::StrAppendFormat(&out, "%s%.2f,%.2f", i > 0 ? " " : "", line.points[i].x, line.points[i].y);
  out += "\"/>\n";
}

void Append(std::string& out, const BoxShape& box) {
  absl::StrAppendFormat(&out, "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\"/>\n",
                        box.corner.x, box.corner.y, box.width, box.height, Hex(box.fill));
}

void Append(std::string& out, const TextShape& text) {
  static constexpr const char* kAnchors[] = {"start", "middle", "end"};
  absl::StrAppendFormat(&out, "<text x=\"%.2f\" y=\"%.2f\" font-size=\"%g\" text-anchor=\"%s\"", text.base.x,
                        text.base.y, text.size, kAnchors[static_cast<int>(text.anchor)]);
  if (text.bold) out += " font-weight=\"bold\"";
  if (text.upright)
    absl::StrAppendFormat(&out, " transform=\"rotate(-90 %.2f %.2f)\"", text.base.x, text.base.y);
  absl::StrAppend(&out, ">", absl::StrReplaceAll(text.text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}}),
                  "</text>\n");
}

}  // namespace

std::string ToSvg(const Drawing& drawing) {
  std::string out = absl::StrFormat(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%g\" "
      "height=\"%g\" viewBox=\"0 0 %g %g\" font-family=\"DejaVu Sans, sans-serif\">\n"
      "<rect width=\"100%%\" height=\"100%%\" fill=\"#ffffff\"/>\n",
      drawing.width, drawing.height, drawing.width, drawing.height);
  for (const auto& shape : drawing.shapes) std::visit([&out](const auto& each) { Append(out, each); }, shape);
  return out + "</svg>\n";
}

absl::Status CheckPlotPath(const std::string& path) {
  if (absl::EndsWith(path, ".svg")) return absl::OkStatus();
  if (!absl::EndsWith(path, ".png"))
    return absl::InvalidArgumentError(
        absl::StrCat("plot is \"", path, "\"; allowed: a file name that ends in .svg or .png"));
  return PngSupport();
}

absl::Status WriteDrawing(const Drawing& drawing, const std::string& path) {
  LRMOE_RETURN_IF_ERROR(CheckPlotPath(path));
  if (absl::EndsWith(path, ".png")) return WritePng(drawing, path);
  std::ofstream file(path, std::ios::binary);
  file << ToSvg(drawing);
  file.close();
  return file ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cannot write ", path));
}

}  // namespace lrmoe::sim
