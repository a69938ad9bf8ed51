#include "tools/sim/png.h"

#include "absl/strings/str_cat.h"

#ifdef LRMOE_HAVE_CAIRO
#include <cairo.h>

#include <memory>
#endif

namespace lrmoe::sim {

#ifdef LRMOE_HAVE_CAIRO

namespace {

constexpr double kScale = 2;  // pixels of the file per pixel of the drawing: sharp on dense screens

void SetColor(cairo_t* to, const Color& color) {
  cairo_set_source_rgb(to, color.red / 255.0, color.green / 255.0, color.blue / 255.0);
}

void Draw(cairo_t* to, const LineShape& line) {
  SetColor(to, line.color);
  cairo_set_line_width(to, line.width);
  const double dashes[] = {5, 4};
  cairo_set_dash(to, dashes, line.dashed ? 2 : 0, 0);
  cairo_new_path(to);  // a text leaves its end as the current point
  for (const Position& p : line.points) cairo_line_to(to, p.x, p.y);
  cairo_stroke(to);
}

void Draw(cairo_t* to, const BoxShape& box) {
  SetColor(to, box.fill);
  cairo_rectangle(to, box.corner.x, box.corner.y, box.width, box.height);
  cairo_fill(to);
}

void Draw(cairo_t* to, const TextShape& text) {
  SetColor(to, {});
  cairo_select_font_face(to, "DejaVu Sans", CAIRO_FONT_SLANT_NORMAL,
                         text.bold ? CAIRO_FONT_WEIGHT_BOLD : CAIRO_FONT_WEIGHT_NORMAL);
  cairo_set_font_size(to, text.size);
  cairo_text_extents_t extents;
  cairo_text_extents(to, text.text.c_str(), &extents);
  const double share = text.anchor == Anchor::kStart ? 0 : text.anchor == Anchor::kMiddle ? 0.5 : 1;
  cairo_save(to);
  cairo_translate(to, text.base.x, text.base.y);
  if (text.upright) cairo_rotate(to, -1.57079632679489662);
  cairo_move_to(to, -share * extents.x_advance, 0);
  cairo_show_text(to, text.text.c_str());
  cairo_restore(to);
}

}  // namespace

absl::Status PngSupport() {
  return absl::OkStatus();
}

absl::Status WritePng(const Drawing& drawing, const std::string& path) {
  const std::unique_ptr<cairo_surface_t, void (*)(cairo_surface_t*)> surface(
      cairo_image_surface_create(CAIRO_FORMAT_RGB24, static_cast<int>(drawing.width * kScale),
                                 static_cast<int>(drawing.height * kScale)),
      cairo_surface_destroy);
  const std::unique_ptr<cairo_t, void (*)(cairo_t*)> to(cairo_create(surface.get()), cairo_destroy);
  SetColor(to.get(), {255, 255, 255});
  cairo_paint(to.get());
  cairo_scale(to.get(), kScale, kScale);
  for (const auto& shape : drawing.shapes)
    std::visit([&to](const auto& each) { Draw(to.get(), each); }, shape);
  cairo_status_t status = cairo_status(to.get());
  if (status == CAIRO_STATUS_SUCCESS) status = cairo_surface_write_to_png(surface.get(), path.c_str());
  if (status == CAIRO_STATUS_SUCCESS) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("cannot write ", path, ": ", cairo_status_to_string(status)));
}

#else

absl::Status PngSupport() {
  return absl::UnimplementedError(
      "this program was built without cairo (Debian: libcairo2-dev), which PNG needs; allowed: a file name "
      "that ends in .svg");
}

absl::Status WritePng(const Drawing&, const std::string&) {
  return PngSupport();
}

#endif

}  // namespace lrmoe::sim
