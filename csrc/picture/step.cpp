#include "picture/step.h"

#include <algorithm>

#include "picture/svg.h"
#include "schedule/lanes.h"
#include "support/error.h"
#include "support/text.h"

namespace shardwright {
namespace {

constexpr double kLeft = 110;   // x of the left end of lanes
constexpr double kWidth = 960;  // width of the lanes
constexpr double kLaneHeight = 34;
constexpr double kArenaHeight = 240;
constexpr double kGap = 14;  // between lanes
constexpr double kTop = 64;  // y of the first lane

// The picture of one schedule. In a schedule without times, each use takes one unit of time, and there are no lanes of
// transfers.
class StepPicture {
 public:
  explicit StepPicture(const StepSchedule& schedule) : s_(schedule), has_times_(has_times(schedule)) {
    if (has_times_) {
      lanes_ = predict(s_);
      return;
    }
    for (int64_t i = 0; i < static_cast<int64_t>(s_.uses.size()); ++i) lanes_.uses.push_back({i, i + 1});
    lanes_.total_ps = static_cast<int64_t>(s_.uses.size());
  }

  std::string page() {
    const std::string title = concat("Training step: ", count_text(static_cast<int64_t>(s_.uses.size()), "use"), ", ",
                                     count_text(static_cast<int64_t>(s_.gathers.size()), "gather"), ", ",
                                     count_text(static_cast<int64_t>(s_.reductions.size()), "reduction"));
    svg_.text(kLeft, 26, title, {.size = 16, .bold = true});
    svg_.text(kLeft, 46, subtitle());
    double y = kTop;
    draw_uses(y);
    y += kLaneHeight + kGap;
    if (has_times_) {
      draw_transfers(y);
      y += kLaneHeight + kGap;
    }
    if (lanes_.copy_ps > 0) {
      draw_copies(y, "from the host", s_.gathers, lanes_.fetches);
      draw_copies(y + kLaneHeight + kGap, "to the host", s_.reductions, lanes_.sends);
      y += 2 * (kLaneHeight + kGap);
    }
    draw_arena(y);
    return svg_.page(kLeft + kWidth + 20, y + kArenaHeight + 20, title);
  }

 private:
  std::string subtitle() const {
    const std::string memory = concat(
        "peak memory: ", bytes_text(s_.peak_bytes()), " (arena ", bytes_text(s_.arena_bytes), ", gradients ",
        bytes_text(s_.peak_gradient_bytes),
        s_.peak_activation_bytes == 0 ? "" : concat(", activations ", bytes_text(s_.peak_activation_bytes)), ")");
    if (!has_times_) return memory;
    return concat("predicted time: ", microseconds_text(lanes_.total_ps), " (compute ",
                  microseconds_text(lanes_.compute_ps), "); ", memory);
  }

  // Returns the x coordinate of a time.
  double x(int64_t ps) const {
    const auto all = static_cast<double>(std::max<int64_t>(lanes_.total_ps, 1));
    return kLeft + static_cast<double>(ps) / all * kWidth;
  }

  // Draws a rectangle in the color of a weight, with `label` if it fits. `title` is shown on hover.
  void draw(const Rect& rect, int weight, bool is_striped, const std::string& label, const std::string& title) {
    const std::string path = rect_path(rect);
    const int64_t color = std::max(weight, 0);
    svg_.path(path, concat("fill=\"", color_of(color), "\" stroke=\"#ffffff\" stroke-width=\"0.5\""), title);
    if (is_striped) svg_.stripes(path);
    const TextStyle style{.size = 10, .anchor = "middle", .fill = ink_on(color)};
    if (!is_striped && rect.h >= style.size + 2 && text_width(label, style) + 4 <= rect.w) {
      svg_.text(rect.x + rect.w / 2, rect.y + rect.h / 2 + 3.5, label, style, title);
    }
  }

  Rect lane_rect(const LaneSpan& span, double y) const {
    return {x(span.begin_ps), y, x(span.end_ps) - x(span.begin_ps), kLaneHeight};
  }

  void draw_lane_name(double y, const char* name) { svg_.text(12, y + kLaneHeight / 2 + 4, name); }

  // Draws the uses, each in the color of its innermost weight.
  void draw_uses(double y) {
    draw_lane_name(y, "compute");
    for (size_t i = 0; i < s_.uses.size(); ++i) {
      const Use& use = s_.uses[i];
      const int weight = use.weights.empty() ? -1 : use.weights.back();
      std::vector<std::string> names;
      for (const int w : use.weights) names.push_back(s_.weights[w].name);
      draw(lane_rect(lanes_.uses[i], y), weight, false, names.empty() ? "no weights" : names.back(),
           concat("use ", i, ": ", pass_name(use.pass), " ", join(names), time_text(use.compute_ps)));
    }
  }

  // Draws gathers, reductions, activations and chunks in the lane of transfers.
  void draw_transfers(double y) {
    draw_lane_name(y, "transfers");
    for (size_t g = 0; g < s_.gathers.size(); ++g) {
      const Weight& w = s_.weights[s_.gathers[g].weight];
      draw(lane_rect(lanes_.gathers[g], y), s_.gathers[g].weight, false, w.name,
           concat("gather ", w.name, " for use ", s_.gathers[g].needed, time_text(w.gather_ps)));
    }
    for (size_t r = 0; r < s_.reductions.size(); ++r) {
      const Weight& w = s_.weights[s_.reductions[r].weight];
      draw(lane_rect(lanes_.reductions[r], y), s_.reductions[r].weight, true, w.name,
           concat("reduce the gradient of ", w.name,
                  time_text(lanes_.reductions[r].end_ps - lanes_.reductions[r].begin_ps)));
    }
    for (size_t k = 0; k < lanes_.activations.size(); ++k) {
      const Activation& a = s_.options.activations[k];
      const LaneSpan& span = lanes_.activations[k];
      draw(lane_rect(span, y), static_cast<int>(s_.weights.size()), true, a.name,
           concat("gather activation ", k, ", ", a.name, " of use ", a.saved, time_text(span.end_ps - span.begin_ps)));
    }
    for (const ChunksSpan& c : lanes_.chunks) {
      const Weight& w = s_.weights[c.weight];
      draw(lane_rect(c.span, y), w.original < 0 ? c.weight : w.original, c.is_reduction, w.name,
           concat(c.is_reduction ? "reduce the gradient of " : "gather ", w.name, c.is_reduction ? " in chunks" : "",
                  " within use ", c.use, time_text(c.span.end_ps - c.span.begin_ps)));
    }
  }

  // Draws the lane of copies in one direction. `spans` has the copy of each transfer; no copy is an empty span.
  template <typename Transfers>
  void draw_copies(double y, const char* direction, const Transfers& transfers, const std::vector<LaneSpan>& spans) {
    draw_lane_name(y, direction);
    for (size_t t = 0; t < transfers.size(); ++t) {
      if (spans[t].end_ps == spans[t].begin_ps) continue;
      const std::string& name = s_.weights[transfers[t].weight].name;
      draw(lane_rect(spans[t], y), transfers[t].weight, false, name,
           concat("copy ", name, " ", direction, time_text(spans[t].end_ps - spans[t].begin_ps)));
    }
  }

  // Draws each buffer as a rectangle: time from left to right, addresses from top to bottom.
  void draw_arena(double y) {
    draw_lane_name(y, "arena");
    svg_.text(12, y + kLaneHeight / 2 + 20, bytes_text(s_.arena_bytes));
    svg_.path(rect_path({kLeft, y, kWidth, kArenaHeight}), "fill=\"none\" stroke=\"#bbbbbb\"");
    const auto scale = kArenaHeight / static_cast<double>(std::max<int64_t>(s_.arena_bytes, 1));
    for (size_t b = 0; b < s_.buffers.size(); ++b) {
      const WeightBuffer& buffer = s_.buffers[b];
      const double begin = x(begin_of(static_cast<int>(b)));
      const Rect rect{begin, y + static_cast<double>(buffer.offset_bytes) * scale,
                      x(lanes_.uses[buffer.last].end_ps) - begin, static_cast<double>(buffer.size_bytes) * scale};
      const std::string& name = s_.weights[buffer.weight].name;
      draw(rect, buffer.weight, buffer.is_kept_copy, name,
           concat(name, buffer.is_kept_copy ? " (kept copy)" : "", ": ", bytes_text(buffer.size_bytes), " at offset ",
                  buffer.offset_bytes, ", uses ", buffer.first, " to ", buffer.last));
    }
  }

  // Returns the time at which a buffer's gather begins, or its first use if it has no gather.
  int64_t begin_of(int buffer) const {
    for (size_t g = 0; g < lanes_.gathers.size(); ++g) {
      if (s_.gathers[g].buffer == buffer) return lanes_.gathers[g].begin_ps;
    }
    return lanes_.uses[s_.buffers[buffer].first].begin_ps;
  }

  // Returns ", 30 us"; "" for an unknown time.
  static std::string time_text(int64_t ps) { return ps > 0 ? concat(", ", microseconds_text(ps)) : ""; }

  const StepSchedule& s_;
  bool has_times_;
  StepLanes lanes_;
  Svg svg_;
};

}  // namespace

std::string to_svg(const StepSchedule& schedule) { return StepPicture(schedule).page(); }

}  // namespace shardwright
