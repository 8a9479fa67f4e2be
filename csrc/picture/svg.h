// A writer of SVG documents. Lengths are in pixels, and y points down.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace shardwright {

// Escapes UTF-8 text for use between tags and in attributes, also in HTML. Invalid bytes, and control characters except
// line breaks, become U+FFFD.
std::string escaped(std::string_view text);

// Shortens text to at most `max_chars` characters of valid UTF-8. Shortened text ends with three dots.
std::string shortened(const std::string& text, size_t max_chars);

// Formats a length with at most two decimals, without trailing zeros.
std::string px(double length);

struct Rect {
  double x = 0;
  double y = 0;
  double w = 0;
  double h = 0;
};

// Returns the data of a path (the attribute "d") around a rectangle.
std::string rect_path(const Rect& rect);

// Returns the data of a path: a curve that begins and ends horizontally.
std::string curve_path(double x0, double y0, double x1, double y1);

// The style of a text. `anchor` is the point of the text at x: "start", "middle" or "end".
struct TextStyle {
  double size = 12;
  const char* anchor = "start";
  const char* fill = "#222222";
  bool bold = false;
};

// Returns an estimate of the width of text. Common sans-serif fonts exceed it only slightly, so adjacent texts stay
// apart in any viewer.
double text_width(const std::string& text, const TextStyle& style = {});
// Returns the width of the widest line.
double widest(const std::vector<std::string>& lines, const TextStyle& style = {});

// Returns one of 16 colors, which repeat. Hues that color-blind readers confuse differ in lightness.
const char* color_of(int64_t index);
// Returns the text color for color_of(index): black or white, the one with more contrast.
const char* ink_on(int64_t index);

// A document while it is being written. Shapes are drawn in the order of the calls.
class Svg {
 public:
  // `title` is shown on hover. Labels and titles are escaped; attributes are written as given.
  void text(double x, double y, const std::string& label, const TextStyle& style = {}, const std::string& title = {});
  void path(const std::string& d, const std::string& attributes, const std::string& title = {});
  void circle(double x, double y, double radius, const std::string& attributes, const std::string& title = {});
  void open_group(const std::string& attributes, const std::string& title = {});
  void close_group();
  // Draws an arrow tip that points right, to (x, y), in the fill of its group.
  void tip(double x, double y, double size);

  // Draws white stripes over a path.
  void stripes(const std::string& d);

  // Returns the whole document, with this title, on a white background.
  std::string page(double width, double height, const std::string& title) const;

 private:
  std::string body_;
};

}  // namespace shardwright
