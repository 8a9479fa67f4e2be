#include "picture/frame.h"

#include <algorithm>

#include "cost/cost.h"
#include "moves/step_counts.h"
#include "moves/traffic.h"
#include "support/error.h"
#include "support/text.h"

namespace shardwright {
namespace {

constexpr double kMargin = 20;
constexpr double kHeadsTop = 88;  // y of the first line above the columns
constexpr double kLineHeight = 16;
constexpr double kMinGap = 190;  // least width of the gap for a step
constexpr double kMaxGap = 300;
constexpr TextStyle kTitle{16, "start", "#111111", true};
constexpr TextStyle kSubtitle{12, "start", "#555555", false};
constexpr TextStyle kHead{13, "middle", "#111111", true};
constexpr TextStyle kHeadDetail{12, "middle", "#555555", false};
constexpr TextStyle kLegend{12, "start", "#555555", false};
constexpr size_t kMaxTitleChars = 110;
constexpr size_t kMaxPlacementsChars = 28;
constexpr size_t kMaxStepChars = 36;

// Returns the result of a local step on each rank, for readers who do not know the step's name.
const char* local_result(StepOp op) {
  switch (op) {
    case StepOp::kSlice:
      return "result: one slice per rank";
    case StepOp::kPartition:
      return "result: one contribution per rank";
    case StepOp::kZeroFill:
      return "result: own part, zeros elsewhere";
    default:
      return "";
  }
}

// Returns a line with the plan's costs and the options it was planned with.
std::string subtitle_of(const Plan& plan) {
  const std::string time = concat("predicted time: ", microseconds_text(predicted_picoseconds(plan)));
  const std::string options = concat("backend: ", plan.lowering.name, "; objective: ", objective_name(plan.objective),
                                     "; topology: ", plan.topology.name);
  const TrafficTotals all = totals(plan);
  if (all.messages_max == 0) return concat("no communication; ", time, "; ", options);
  return concat("received, worst rank: ", bytes_text(all.received_bytes_max), " in ",
                count_text(all.messages_max, "message"), " (lower bound ",
                bytes_text(lower_bound(plan.src, plan.dst).bytes_max), "); ", time, "; ", options);
}

// Returns the size of a dim. A dim that the tensor does not have (-1) is drawn as one element.
int64_t extent(const std::vector<int64_t>& shape, int dim) { return dim < 0 ? 1 : shape[dim]; }

// Returns the intervals of a part on a dim; [0, 1) for a dim that the tensor does not have.
IntervalList intervals(const Region& part, int dim) { return dim < 0 ? IntervalList{{0, 1}} : part[dim]; }

// Returns "0:4+8:12"; at most kMaxIntervals intervals.
std::string interval_text(const IntervalList& list) {
  constexpr size_t kMaxIntervals = 4;
  if (list.empty()) return "none";
  std::vector<std::string> parts;
  for (size_t i = 0; i < std::min(list.size(), kMaxIntervals); ++i) {
    parts.push_back(concat(list[i].begin, ":", list[i].end));
  }
  if (list.size() > kMaxIntervals) parts.emplace_back("...");
  return join(parts, "+");
}

}  // namespace

DrawnDims drawn_dims(const std::vector<Layout>& states) {
  const int ndim = states[0].ndim();
  std::vector<int> cut;
  std::vector<int> uncut;
  for (int t = 0; t < ndim; ++t) {
    const bool is_cut = std::any_of(states.begin(), states.end(), [&](const Layout& l) { return !l.cuts(t).empty(); });
    (is_cut ? cut : uncut).push_back(t);
  }
  std::vector<int> drawn(cut.begin(), cut.begin() + std::min<int64_t>(2, cut.size()));
  // The last dims fill the remaining places: a batch is usually seen as a batch of matrices.
  while (drawn.size() < 2 && !uncut.empty()) {
    drawn.push_back(uncut.back());
    uncut.pop_back();
  }
  std::sort(drawn.begin(), drawn.end());
  DrawnDims dims;
  if (!drawn.empty()) dims.across = drawn.back();
  if (drawn.size() == 2) dims.down = drawn.front();
  if (cut.size() > 2) dims.strips.assign(cut.begin() + 2, cut.end());
  return dims;
}

Rect box_size(const std::vector<int64_t>& shape, const DrawnDims& drawn, double height) {
  if (drawn.across < 0) return {0, 0, height / 3, height / 3};
  if (drawn.down < 0) return {0, 0, height * 1.5, height / 3};
  const auto rows = static_cast<double>(std::max<int64_t>(shape[drawn.down], 1));
  const auto columns = static_cast<double>(std::max<int64_t>(shape[drawn.across], 1));
  const double ratio = std::clamp(columns / rows, 0.7, 2.0);
  const double width = std::min(height * 1.5, height * ratio);
  return {0, 0, width, width / ratio};
}

std::vector<Rect> rects_of(const Region& part, const std::vector<int64_t>& shape, const DrawnDims& drawn,
                           const Rect& box, size_t max_rects) {
  std::vector<Rect> rects;
  if (num_elements(part) == 0) return rects;
  const IntervalList down = intervals(part, drawn.down);
  const IntervalList across = intervals(part, drawn.across);
  if (down.size() * across.size() > max_rects) return rects;
  const double row = box.h / static_cast<double>(extent(shape, drawn.down));
  const double column = box.w / static_cast<double>(extent(shape, drawn.across));
  for (const Interval& d : down) {
    for (const Interval& a : across) {
      rects.push_back({box.x + column * static_cast<double>(a.begin), box.y + row * static_cast<double>(d.begin),
                       column * static_cast<double>(a.end - a.begin), row * static_cast<double>(d.end - d.begin)});
    }
  }
  return rects;
}

std::string indices_text(const Region& part) {
  std::vector<std::string> dims;
  for (const IntervalList& list : part) dims.push_back(interval_text(list));
  return concat("[", join(dims), "]");
}

std::vector<Layout> states_of(const Plan& plan) {
  std::vector<Layout> states{plan.src};
  for (size_t i = 0; i + 1 < plan.steps.size(); ++i) states.push_back(plan.steps[i].after);
  states.push_back(plan.dst);
  return states;
}

PictureFrame::PictureFrame(const Plan& plan, double labels_width, double column_width)
    : title_(ends_of(plan)), subtitle_(subtitle_of(plan)), states_(states_of(plan)), steps_(plan.steps) {
  if (steps_.empty()) steps_.push_back(Step{StepOp::kSlice, {}, plan.src, plan.dst});

  // Widens the gaps between few columns to the width of a long title.
  const double title_width =
      std::max(text_width(shortened(title_, kMaxTitleChars), kTitle), text_width(subtitle_, kSubtitle));
  const double spare = title_width - labels_width - column_width * static_cast<double>(states_.size()) - 60;
  const double least_gap = std::clamp(spare / static_cast<double>(steps_.size()), kMinGap, kMaxGap);

  double x = kMargin + labels_width;
  size_t num_lines = 2;
  for (size_t i = 0; i < states_.size(); ++i) {
    const std::string placements = shortened(states_[i].placements_string(), kMaxPlacementsChars);
    const double width =
        std::max({column_width, text_width(placements, kHeadDetail), text_width("after step 1", kHead)});
    columns_.push_back(x + width / 2);
    x += width;
    if (i == steps_.size()) break;
    step_lines_.push_back(step_lines(plan, i));
    const std::vector<std::string>& lines = step_lines_.back();
    num_lines = std::max(num_lines, lines.size());
    const double gap =
        std::max({least_gap, text_width(lines[0], kHead) + kMargin, widest(lines, kHeadDetail) + kMargin});
    gaps_.push_back(x + gap / 2);
    x += gap;
  }
  right_ = x;
  top_ = kHeadsTop + kLineHeight * static_cast<double>(num_lines);
}

std::vector<std::string> PictureFrame::step_lines(const Plan& plan, size_t index) const {
  if (plan.steps.empty()) return {"no steps", "parts unchanged on all ranks"};
  const Step& step = plan.steps[index];
  const Mesh& mesh = step.before.mesh();
  std::vector<std::string> lines{shortened(concat(index + 1, ". ", step_name(step)), kMaxStepChars)};
  const std::string time = microseconds_text(predicted_picoseconds(step, plan.lowering, plan.topology));
  if (is_local(step.op)) {
    lines.emplace_back(local_result(step.op));
    lines.push_back(concat("no communication, predicted ", time));
    return lines;
  }
  const TrafficTotals all = totals(step, plan.lowering);
  lines.push_back(step.op == StepOp::kCross
                      ? concat(mesh.size(), " ranks to ", step.after.mesh().size(), ", predicted ", time)
                      : concat("groups of ", mesh.group_size(step.mesh_dims), ", predicted ", time));
  lines.push_back(concat("received, worst rank: ", bytes_text(all.received_bytes_max)));
  lines.push_back(concat("in ", count_text(all.messages_max, "message")));
  if (step.ordered) lines.emplace_back("reduction in rank order");
  if (step.policy == ReplicaPolicy::kNodeLocal) {
    lines.emplace_back("senders: same node first");
  } else if (step.policy != ReplicaPolicy::kAligned && step.op != StepOp::kCross) {
    lines.emplace_back("senders: all replicas");
  }
  if (step.rounds > 1) lines.push_back(concat(step.rounds, " rounds"));
  return lines;
}

void PictureFrame::draw_heads(Svg& svg) const {
  svg.text(kMargin, 30, shortened(title_, kMaxTitleChars), kTitle, title_);
  svg.text(kMargin, 50, subtitle_, kSubtitle);
  for (size_t i = 0; i < states_.size(); ++i) {
    const bool is_last = i + 1 == states_.size();
    svg.text(columns_[i], kHeadsTop, i == 0 ? "before" : is_last ? "after" : concat("after step ", i), kHead);
    const std::string placements = states_[i].placements_string();
    svg.text(columns_[i], kHeadsTop + kLineHeight, shortened(placements, kMaxPlacementsChars), kHeadDetail, placements);
  }
  for (size_t i = 0; i < steps_.size(); ++i) {
    for (size_t line = 0; line < step_lines_[i].size(); ++line) {
      svg.text(gaps_[i], kHeadsTop + kLineHeight * static_cast<double>(line), step_lines_[i][line],
               line == 0 ? kHead : kHeadDetail);
    }
  }
}

void PictureFrame::add_legend_line(const std::string& label, const std::string& fill, bool striped) {
  legend_.push_back({label, fill, striped});
}

std::string PictureFrame::page(Svg& svg, double right, double bottom) const {
  double y = bottom + 24;
  for (const LegendLine& line : legend_) {
    double x = kMargin;
    if (!line.fill.empty()) {
      const std::string swatch = rect_path({x, y - 10, 18, 12});
      svg.path(swatch, concat("fill=\"", line.fill, "\""));
      if (line.striped) svg.stripes(swatch);
      x += 26;
    }
    svg.text(x, y, line.label, kLegend);
    right = std::max(right, x + text_width(line.label, kLegend));
    y += 18;
  }
  right = std::max({right, kMargin + text_width(shortened(title_, kMaxTitleChars), kTitle),
                    kMargin + text_width(subtitle_, kSubtitle)});
  return svg.page(right + kMargin, y + 4, title_);
}

}  // namespace shardwright
