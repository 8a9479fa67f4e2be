// As much of Scalable Vector Graphics as pictures of plans need. Lengths are in pixels, and y points down.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace shardwright {

// Text made safe between tags and in attributes, also in HTML. Control characters and bytes that are not UTF-8, which
// XML does not allow anywhere, become U+FFFD.
std::string escaped(std::string_view text);

// At most `max_chars` characters of valid UTF-8, the last three of them dots where some are left out.
std::string shortened(const std::string& text, size_t max_chars);

// A length to two decimals, without trailing zeros.
std::string px(double length);

struct Rect {
  double x = 0;
  double y = 0;
  double w = 0;
  double h = 0;
};

std::string rect_path(const Rect& rect);

// A line that leaves and arrives level.
std::string curve_path(double x0, double y0, double x1, double y1);

struct TextStyle {
  double size = 12;
  const char* anchor = "start";
  const char* fill = "#222222";
  bool bold = false;
};

// What no common sans-serif font exceeds by much: viewers bring their own, and nothing may run into its neighbour.
double text_width(const std::string& text, const TextStyle& style = {});
double widest(const std::vector<std::string>& lines, const TextStyle& style = {});

// 16 colours, which repeat. Where colour-blind people cannot distinguish the hues, the lightness differs.
const char* colour_of(int64_t index);
// Black or white, whichever reads better on that colour.
const char* ink_on(int64_t index);

class Svg {
 public:
  // `title` is shown on hover. Words and titles are escaped here; attributes are written as they are.
  void text(double x, double y, const std::string& words, const TextStyle& style = {}, const std::string& title = {});
  void path(const std::string& d, const std::string& attributes, const std::string& title = {});
  void circle(double x, double y, double radius, const std::string& attributes, const std::string& title = {});
  void open_group(const std::string& attributes, const std::string& title = {});
  void close_group();
  // Arrow tip, its point at (x, y), in the fill of its group.
  void tip(double x, double y, double size);

  // White stripes over a path.
  void stripes(const std::string& d);

  // The whole file, on a white background, with `title` as its name.
  std::string page(double width, double height, const std::string& title) const;

 private:
  std::string body_;
};

}  // namespace shardwright
