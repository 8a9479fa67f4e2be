#include "picture/svg.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "support/error.h"

namespace shardwright {
namespace {

constexpr const char* kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// Returns the number of bytes of the character at the beginning of `text`; 0 if XML does not allow it.
size_t character_bytes(std::string_view text) {
  const auto byte = [&](size_t i) -> uint32_t { return i < text.size() ? static_cast<uint8_t>(text[i]) : 0; };
  const uint32_t first = byte(0);
  if (first < 0x80) return first >= 0x20 && first != 0x7F ? 1 : 0;
  const size_t count = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  uint32_t code = first & (0x7Fu >> count);
  for (size_t i = 1; i < count; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3F);
  }
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool is_surrogate = code >= 0xD800 && code < 0xE000;
  const bool is_control = code < 0xA0 || code == 0xFFFE || code == 0xFFFF;
  return first < 0xC2 || first > 0xF4 || code < kLeast[count] || code > 0x10FFFF || is_surrogate || is_control ? 0
                                                                                                               : count;
}

// Splits UTF-8 text into characters. Invalid bytes, and control characters except line breaks, become U+FFFD.
std::vector<std::string> characters(std::string_view text) {
  std::vector<std::string> all;
  while (!text.empty()) {
    const size_t bytes = character_bytes(text);
    all.push_back(bytes > 0 ? std::string(text.substr(0, bytes)) : text[0] == '\n' ? "\n" : kReplacement);
    text.remove_prefix(std::max<size_t>(bytes, 1));
  }
  return all;
}

// Paul Tol's muted and vibrant schemes, ordered so that neighbors differ in lightness.
struct Color {
  const char* fill;
  const char* ink;
};
constexpr Color kColors[] = {
    {"#0077BB", "#FFFFFF"}, {"#EE8844", "#000000"}, {"#117733", "#FFFFFF"}, {"#DD88B4", "#000000"},
    {"#443399", "#FFFFFF"}, {"#DDAA33", "#000000"}, {"#882255", "#FFFFFF"}, {"#66BBDD", "#000000"},
    {"#BB3311", "#FFFFFF"}, {"#55BBA5", "#000000"}, {"#993388", "#FFFFFF"}, {"#AAAA44", "#000000"},
    {"#5566CC", "#FFFFFF"}, {"#BB9977", "#000000"}, {"#664411", "#FFFFFF"}, {"#88CC66", "#000000"},
};
constexpr int64_t kNumColors = std::size(kColors);

// Returns a title element, which viewers show on hover; "" for an empty title.
std::string title_element(const std::string& title) {
  return title.empty() ? "" : concat("<title>", escaped(title), "</title>");
}

}  // namespace

std::string escaped(std::string_view text) {
  std::string safe;
  for (const std::string& character : characters(text)) {
    if (character == "&") {
      safe += "&amp;";
    } else if (character == "<") {
      safe += "&lt;";
    } else if (character == ">") {
      safe += "&gt;";
    } else if (character == "\"") {
      safe += "&quot;";
    } else if (character == "'") {
      safe += "&#39;";
    } else {
      safe += character;
    }
  }
  return safe;
}

std::string shortened(const std::string& text, size_t max_chars) {
  std::vector<std::string> all = characters(text);
  if (all.size() <= max_chars) return join(all, "");
  all.resize(max_chars - 3);
  return join(all, "") + "...";
}

std::string px(double length) {
  const auto hundredths = static_cast<int64_t>(std::llround(std::abs(length) * 100));
  std::string text = length < 0 && hundredths > 0 ? "-" : "";
  text += std::to_string(hundredths / 100);
  if (hundredths % 100 == 0) return text;
  text += hundredths % 100 < 10 ? ".0" : ".";
  text += std::to_string(hundredths % 10 == 0 ? hundredths % 100 / 10 : hundredths % 100);
  return text;
}

std::string rect_path(const Rect& rect) {
  return concat("M", px(rect.x), " ", px(rect.y), "h", px(rect.w), "v", px(rect.h), "h", px(-rect.w), "z");
}

std::string curve_path(double x0, double y0, double x1, double y1) {
  const double middle = (x0 + x1) / 2;
  return concat("M", px(x0), " ", px(y0), "C", px(middle), " ", px(y0), " ", px(middle), " ", px(y1), " ", px(x1), " ",
                px(y1));
}

double text_width(const std::string& text, const TextStyle& style) {
  return static_cast<double>(characters(text).size()) * style.size * (style.bold ? 0.66 : 0.58);
}

double widest(const std::vector<std::string>& lines, const TextStyle& style) {
  double width = 0;
  for (const std::string& line : lines) width = std::max(width, text_width(line, style));
  return width;
}

const char* color_of(int64_t index) { return kColors[index % kNumColors].fill; }

const char* ink_on(int64_t index) { return kColors[index % kNumColors].ink; }

void Svg::text(double x, double y, const std::string& label, const TextStyle& style, const std::string& title) {
  body_ += concat("<text x=\"", px(x), "\" y=\"", px(y), "\" font-size=\"", px(style.size), "\" fill=\"", style.fill,
                  "\" text-anchor=\"", style.anchor, style.bold ? "\" font-weight=\"bold\">" : "\">",
                  title_element(title), escaped(label), "</text>\n");
}

void Svg::path(const std::string& d, const std::string& attributes, const std::string& title) {
  body_ += concat("<path d=\"", d, "\" ", attributes);
  body_ += title.empty() ? "/>\n" : concat(">", title_element(title), "</path>\n");
}

void Svg::circle(double x, double y, double radius, const std::string& attributes, const std::string& title) {
  body_ += concat("<circle cx=\"", px(x), "\" cy=\"", px(y), "\" r=\"", px(radius), "\" ", attributes, ">",
                  title_element(title), "</circle>\n");
}

void Svg::open_group(const std::string& attributes, const std::string& title) {
  body_ += concat("<g ", attributes, ">", title_element(title), "\n");
}

void Svg::close_group() { body_ += "</g>\n"; }

void Svg::tip(double x, double y, double size) {
  path(concat("M", px(x), " ", px(y), "l", px(-size), " ", px(-size / 2), "v", px(size), "z"), "stroke=\"none\"");
}

// Stripes ignore the pointer, so that the shapes below still show their titles.
void Svg::stripes(const std::string& d) { path(d, "fill=\"url(#sw-stripes)\" pointer-events=\"none\""); }

std::string Svg::page(double width, double height, const std::string& title) const {
  const std::string w = px(std::ceil(width));
  const std::string h = px(std::ceil(height));
  return concat("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", w, "\" height=\"", h, "\" viewBox=\"0 0 ", w, " ",
                h, "\" font-family=\"Helvetica, Arial, sans-serif\">\n", title_element(title),
                "\n<style>.sw-arrow:hover path { stroke-width: 5px; }</style>\n",
                "<defs><pattern id=\"sw-stripes\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" ",
                "patternTransform=\"rotate(45)\"><path d=\"M0 0h3v6h-3z\" fill=\"#FFFFFF\" fill-opacity=\"0.8\"/>",
                "</pattern></defs>\n<path d=\"", rect_path({0, 0, std::ceil(width), std::ceil(height)}),
                "\" fill=\"#FFFFFF\"/>\n", body_, "</svg>\n");
}

}  // namespace shardwright
