// Pictures with one row per rank. Only for small meshes: the cost grows with the pairs of ranks in a group. In a plan
// between two meshes, a rank has a box only in states whose mesh contains the rank.
#include <algorithm>
#include <map>
#include <optional>

#include "moves/traffic.h"
#include "picture/drawn_messages.h"
#include "picture/frame.h"
#include "picture/picture.h"
#include "support/error.h"
#include "support/text.h"

namespace shardwright {
namespace {

constexpr const char* kZeros = "#D8D8D8";  // color of zeros around a rank's part
constexpr const char* kStays = "#BBBBBB";  // color of arrows of kept elements
constexpr const char* kStrip = "#777777";  // color of parts in strips
constexpr TextStyle kRank{13, "start", "#111111", true};
constexpr TextStyle kCoordinate{10, "start", "#555555", false};
constexpr TextStyle kResultRank{11, "start", "#555555", false};
constexpr TextStyle kEmpty{10, "middle", "#888888", false};
constexpr size_t kMaxCoordinateChars = 30;
constexpr double kStripHeight = 6;  // height of the strip of a cut dim below a box
constexpr double kTip = 7;

// Returns the operation of a pending reduction over some of `mesh_dims`, such as "sum"; empty if there is none.
std::string op_text(const Layout& layout, MeshDimSet mesh_dims) {
  for (const int d : (mesh_dims & layout.partial_dims()).to_vector()) {
    return reduce_op_name(layout.placements()[d].op);
  }
  return "";
}

// Returns the rank of each row: the ranks of the source by position, then the remaining ranks of the destination.
std::vector<Rank> rows_of(const Plan& plan) {
  std::vector<Rank> ranks = plan.src.mesh().ranks();
  for (const Rank rank : plan.dst.mesh().ranks()) {
    if (!plan.src.mesh().position_of(rank)) ranks.push_back(rank);
  }
  return ranks;
}

// The picture of one plan. Rows are numbered from the top; `ranks_` has the rank of each row.
class RankPicture {
 public:
  explicit RankPicture(const Plan& plan)
      : plan_(plan),
        ranks_(rows_of(plan)),
        num_rows_(static_cast<int64_t>(ranks_.size())),
        drawn_(drawn_dims(states_of(plan))),
        box_(box_size(plan.src.shape(), drawn_, box_height(num_rows_))),
        frame_(plan, labels_width(), box_.w) {
    const double strips = static_cast<double>(drawn_.strips.size()) * (kStripHeight + 2);
    pitch_ = std::max(box_.h + strips, 34.0) + 14;
    std::map<Rank, int64_t> rows;
    for (int64_t r = 0; r < num_rows_; ++r) rows[ranks_[r]] = r;
    for (const Step& step : frame_.steps()) messages_.push_back(drawn_messages(step, rows));
    for (const std::vector<DrawnMessage>& step : messages_) {
      for (const DrawnMessage& message : step) {
        if (message.from != message.to) widest_bytes_ = std::max(widest_bytes_, message.bytes);
      }
    }
  }

  std::string draw() {
    frame_.draw_heads(svg_);
    for (int64_t r = 0; r < num_rows_; ++r) {
      draw_label(r);
      if (!position_in(plan_.dst, r)) continue;
      svg_.text(right_labels(), row(r) + box_.h / 2 + 4, name_of(r), kResultRank);
    }
    for (size_t i = 0; i < messages_.size(); ++i) {
      reduces(frame_.steps()[i]) ? draw_reductions(i) : draw_arrows(i);
    }
    for (size_t state = 0; state < frame_.states().size(); ++state) {
      const Layout& layout = frame_.states()[state];
      for (int64_t r = 0; r < num_rows_; ++r) {
        if (const std::optional<Position> position = position_in(layout, r)) draw_box(state, r, *position);
      }
    }
    add_legend();
    return frame_.page(svg_, right(), row(num_rows_ - 1) + pitch_);
  }

 private:
  // Returns the height of a box, which decreases with the number of rows.
  static double box_height(int64_t num_ranks) {
    return std::clamp(760.0 / static_cast<double>(num_ranks) - 14, 58.0, 104.0);
  }

  // ---- positions in the picture

  // Returns the y of a row's top.
  double row(int64_t row_number) const { return frame_.top() + pitch_ * static_cast<double>(row_number); }

  Rect box_at(size_t state, int64_t row_number) const {
    return {frame_.column(state) - box_.w / 2, row(row_number), box_.w, box_.h};
  }

  // Returns the position of a row's rank; nullopt if the rank is not on the layout's mesh.
  std::optional<Position> position_in(const Layout& layout, int64_t row_number) const {
    return layout.mesh().position_of(ranks_[row_number]);
  }

  // Return the rank of a row as text, without and with "rank".
  std::string rank_text(int64_t row_number) const { return concat(ranks_[row_number]); }
  std::string name_of(int64_t row_number) const { return concat("rank ", rank_text(row_number)); }

  // Returns the rank's coordinate on the mesh of the source, or of the destination if the source does not have the
  // rank. Returns "" on a single mesh of one dim, where coordinates add nothing.
  std::string coordinate_text(int64_t row_number) const {
    const bool is_source = position_in(plan_.src, row_number).has_value();
    const Layout& layout = is_source ? plan_.src : plan_.dst;
    const Mesh& mesh = layout.mesh();
    if (mesh.ndim() == 1 && plan_.src.mesh() == plan_.dst.mesh()) return "";
    const Position position = *position_in(layout, row_number);
    std::vector<std::string> parts;
    for (int d = 0; d < mesh.ndim(); ++d) {
      if (mesh.dim_size(d) > 1) parts.push_back(concat(mesh.dim_names()[d], "=", mesh.coordinate(position, d)));
    }
    return shortened(join(parts, " "), kMaxCoordinateChars);
  }

  double labels_width() const {
    double width = text_width("rank 00", kRank);
    for (int64_t r = 0; r < num_rows_; ++r) {
      width = std::max({width, text_width(name_of(r), kRank), text_width(coordinate_text(r), kCoordinate)});
    }
    return width + 44;
  }

  // Returns the x of the labels to the right of the last column.
  double right_labels() const { return frame_.column(frame_.steps().size()) + box_.w / 2 + 12; }

  // Returns the x of the right end of the picture.
  double right() const {
    double width = 0;
    for (int64_t r = 0; r < num_rows_; ++r) width = std::max(width, text_width(name_of(r), kResultRank));
    return std::max(frame_.right(), right_labels() + width);
  }

  void draw_label(int64_t row_number) {
    const double y = row(row_number) + box_.h / 2;
    svg_.path(rect_path({20, y - 13, 6, 28}), concat("fill=\"", color_of(row_number), "\""));
    const std::string coordinate = coordinate_text(row_number);
    svg_.text(32, coordinate.empty() ? y + 5 : y - 1, name_of(row_number), kRank);
    if (!coordinate.empty()) svg_.text(32, y + 13, coordinate, kCoordinate);
  }

  // ---- parts of ranks

  // Draws the box of one rank in one state.
  void draw_box(size_t state, int64_t row_number, Position position) {
    const Rect box = box_at(state, row_number);
    const Layout& layout = frame_.states()[state];
    const Region held = layout.region(position);
    const bool is_pending = !layout.partial_dims().empty();
    svg_.open_group("class=\"sw-box\"",
                    concat(name_of(row_number), is_pending ? ": contribution to " : ": ", indices_text(held), ", ",
                           bytes_text(num_elements(held) * layout.dtype().size_bytes())));
    const bool is_empty_tensor = layout.num_elements() == 0;
    svg_.path(rect_path(box), is_empty_tensor ? "fill=\"#FFFFFF\" stroke=\"#AAAAAA\" stroke-dasharray=\"3 3\""
                                              : "fill=\"#F6F6F6\" stroke=\"#AAAAAA\"");
    draw_parts(state, row_number, box, held);
    if (is_pending) draw_stripes(held, box);
    draw_strips(held, box);
    if (num_elements(held) == 0) {
      svg_.text(box.x + box.w / 2, box.y + box.h / 2 + 4, is_empty_tensor ? "no elements" : "empty", kEmpty);
    }
    svg_.close_group();
  }

  // Fills the rank's part with the elements received or kept in the previous step, each in the color of its sender.
  void draw_parts(size_t state, int64_t row_number, const Rect& box, const Region& held) {
    const Layout& layout = frame_.states()[state];
    const bool is_pending = !layout.partial_dims().empty();
    if (state == 0)
      return draw_part(box, {row_number, row_number, 0, {held}}, row_number, is_pending ? "" : rank_text(row_number));
    const Step& step = frame_.steps()[state - 1];
    if (step.op == StepOp::kZeroFill) fill(rects(held, box), kZeros, "class=\"sw-zeros\"", "zeros");
    const std::string op = reduces(step) ? op_text(step.before, step.mesh_dims) : "";
    std::vector<DrawnMessage> messages;
    for (const DrawnMessage& message : messages_[state - 1]) {
      if (message.to == row_number) messages.push_back(message);
    }
    const bool hides_some = overlap_in_drawing(messages);
    has_hidden_ = has_hidden_ || hides_some;
    for (const DrawnMessage& message : messages) {
      const std::string label = is_pending || hides_some ? "" : op.empty() ? rank_text(message.from) : op;
      draw_part(box, message, hides_some ? row_number : message.from, label);
    }
  }

  // Returns true if parts that differ only in undrawn dims overlap in the picture.
  bool overlap_in_drawing(const std::vector<DrawnMessage>& messages) const {
    const auto overlap = [](const Region& a, const Region& b, int dim) {
      return dim < 0 || intersection_length(a[dim], b[dim]) > 0;
    };
    std::vector<const Region*> parts;
    for (const DrawnMessage& message : messages) {
      for (const Region& part : message.parts) parts.push_back(&part);
    }
    for (size_t i = 0; i < parts.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        if (overlap(*parts[i], *parts[j], drawn_.down) && overlap(*parts[i], *parts[j], drawn_.across)) return true;
      }
    }
    return false;
  }

  // Fills the elements of a message in the color of a row, and writes `label` into the largest rectangle.
  void draw_part(const Rect& box, const DrawnMessage& message, int64_t color, const std::string& label) {
    std::vector<Rect> all;
    for (const Region& part : message.parts) {
      const std::vector<Rect> part_rects = rects(part, box);
      all.insert(all.end(), part_rects.begin(), part_rects.end());
      if (part_rects.empty() && num_elements(part) > 0) draw_pale(part, box, color);
    }
    if (all.empty()) return;
    const size_t others = message.parts.size() - 1;
    const std::string more = others > 0 ? concat(" and ", others, " more") : "";
    const std::string title = message.from == message.to
                                  ? ""
                                  : concat(name_of(message.to), ": ", indices_text(message.parts[0]), more, " from ",
                                           name_of(message.from), ", ", bytes_text(message.bytes));
    fill(all, color_of(color), "class=\"sw-part\" stroke=\"#FFFFFF\" stroke-width=\"0.7\"", title);
    draw_label_in(
        *std::max_element(all.begin(), all.end(), [](const Rect& a, const Rect& b) { return a.w * a.h < b.w * b.h; }),
        label, ink_on(color));
  }

  // Writes a label into the middle of a rectangle if it fits.
  void draw_label_in(const Rect& rect, const std::string& label, const char* ink) {
    const TextStyle style{std::clamp(rect.h - 1.5, 8.0, 11.0), "middle", ink, false};
    if (label.empty() || rect.h < style.size + 1 || rect.w < text_width(label, style) + 2) return;
    svg_.text(rect.x + rect.w / 2, rect.y + rect.h / 2 + style.size * 0.36, label, style);
  }

  // Returns the rectangles of a part in a box; none for more than kMaxRectsDrawn.
  std::vector<Rect> rects(const Region& part, const Rect& box) const {
    return rects_of(part, plan_.src.shape(), drawn_, box);
  }

  // Fills rectangles. `title` is shown on hover.
  void fill(const std::vector<Rect>& rects, const char* color, const char* attributes, const std::string& title) {
    if (rects.empty()) return;
    std::string d;
    for (const Rect& rect : rects) d += rect_path(rect);
    svg_.path(d, concat("fill=\"", color, "\" ", attributes), title);
  }

  // Returns the bounding range of a part: in each dim, from its first to its last index. draw_pale() fills this range
  // for parts of too many pieces.
  Region range_of(const Region& part) const {
    Region range;
    for (const IntervalList& list : part) range.push_back({span_of(list)});
    return range;
  }

  // Fills the bounding range of a part of too many pieces.
  void draw_pale(const Region& part, const Rect& box, int64_t color) {
    has_pale_ = true;
    fill(rects(range_of(part), box), color_of(color), "class=\"sw-pale\" fill-opacity=\"0.35\"", "");
  }

  // Draws stripes over a contribution to a pending reduction.
  void draw_stripes(const Region& held, const Rect& box) {
    if (num_elements(held) == 0) return;
    std::vector<Rect> all = rects(held, box);
    if (all.empty()) all = rects(range_of(held), box);
    std::string d;
    for (const Rect& rect : all) d += rect_path(rect);
    svg_.stripes(d);
  }

  // Draws a strip below the box for each cut dim that is neither down nor across.
  void draw_strips(const Region& held, const Rect& box) {
    double y = box.y + box.h + 2;
    for (const int t : drawn_.strips) {
      const Rect strip{box.x, y, box.w, kStripHeight};
      svg_.path(rect_path(strip), "fill=\"#F6F6F6\" stroke=\"#AAAAAA\" stroke-width=\"0.7\"");
      if (num_elements(held) > 0) {
        fill(rects_of({held[t]}, {plan_.src.shape()[t]}, {-1, 0, {}}, strip), kStrip, "", "");
      }
      y += kStripHeight + 2;
    }
  }

  // ---- messages

  // Returns the width of an arrow, by its bytes, limited so that the arrows at one box stay apart.
  double arrow_width(int64_t bytes, size_t neighbors) const {
    const double share = static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(widest_bytes_, 1));
    return std::min(1.1 + 2.4 * share, 0.45 * box_.h / static_cast<double>(neighbors));
  }

  // Returns the y at which the `index`-th of `count` arrows ends at the side of a box.
  double arrow_y(int64_t row_number, size_t index, size_t count) const {
    return row(row_number) + box_.h * (static_cast<double>(index) + 0.5) / static_cast<double>(count);
  }

  // Draws the arrows of a step. Its messages are sorted, so the arrows at one side of a box do not cross.
  void draw_arrows(size_t index) {
    const std::vector<DrawnMessage>& messages = messages_[index];
    std::vector<size_t> leaving(num_rows_, 0);
    std::vector<size_t> arriving(num_rows_, 0);
    for (const DrawnMessage& message : messages) {
      ++leaving[message.from];
      ++arriving[message.to];
    }
    std::vector<size_t> left(num_rows_, 0);
    std::vector<size_t> arrived(num_rows_, 0);
    const double x0 = box_at(index, 0).x + box_.w + 3;
    const double x1 = box_at(index + 1, 0).x - 3;
    for (const DrawnMessage& message : messages) {
      const double y0 = arrow_y(message.from, left[message.from]++, leaving[message.from]);
      const double y1 = arrow_y(message.to, arrived[message.to]++, arriving[message.to]);
      const size_t neighbors = std::max(leaving[message.from], arriving[message.to]);
      draw_arrow(message, arrow_width(message.bytes, neighbors), {x0, y0, x1 - x0, y1 - y0});
    }
  }

  // Draws the arrow from one corner of `span` to the opposite one.
  void draw_arrow(const DrawnMessage& message, double width, const Rect& span) {
    const bool stays = message.from == message.to;
    const char* color = stays ? kStays : color_of(message.from);
    open_arrow(stays ? "sw-stays" : "sw-arrow sw-sends", color, stays ? 1.1 : width,
               stays ? concat(name_of(message.to), " keeps ", bytes_text(message.bytes))
                     : concat(name_of(message.from), " -> ", name_of(message.to), ": ", bytes_text(message.bytes)));
    const double tip = stays || width < 1.6 ? 5 : kTip;
    svg_.path(curve_path(span.x, span.y, span.x + span.w - tip + 1, span.y + span.h), "fill=\"none\"");
    svg_.tip(span.x + span.w, span.y + span.h, tip);
    svg_.close_group();
  }

  // Opens a group for the paths of an arrow. `kind` is its CSS class.
  void open_arrow(const char* kind, const char* color, double width, const std::string& title) {
    svg_.open_group(
        concat("class=\"", kind, "\" stroke=\"", color, "\" fill=\"", color, "\" stroke-width=\"", px(width), "\""),
        title);
  }

  // Draws the reductions of a step, one for each group of ranks.
  void draw_reductions(size_t index) {
    const Step& step = frame_.steps()[index];
    const Mesh& mesh = step.before.mesh();
    std::vector<bool> is_seen(mesh.size(), false);
    for (int64_t p = 0; p < mesh.size(); ++p) {
      if (is_seen[p]) continue;
      const std::vector<int64_t> group = mesh.group(p, step.mesh_dims);
      for (const int64_t member : group) is_seen[member] = true;
      draw_reduction(index, step, group);
    }
  }

  // Draws the reduction of a group, which is given as positions: a circle, with arrows to it from all ranks that have
  // elements, and arrows from it to all ranks that get results. The circles of two groups do not coincide: each is at
  // the mean of its group's rows, and groups differ by a shift.
  void draw_reduction(size_t index, const Step& step, const std::vector<int64_t>& group) {
    const Mesh& mesh = step.before.mesh();
    const auto row_of = [&](int64_t member) {
      return std::find(ranks_.begin(), ranks_.end(), mesh.rank_at(Position{member})) - ranks_.begin();
    };
    double y = 0;
    for (const int64_t member : group) y += row(row_of(member)) + box_.h / 2;
    y /= static_cast<double>(group.size());
    const double x0 = box_at(index, 0).x + box_.w + 3;
    const double x1 = box_at(index + 1, 0).x - 3;
    const double middle = (x0 + x1) / 2;
    for (const int64_t member : group) {
      const int64_t r = row_of(member);
      const double side = row(r) + box_.h / 2;
      const Traffic traffic = traffic_at(step, plan_.lowering, ranks_[r]);
      if (num_elements(step.before.region(member)) > 0) {
        open_arrow("sw-arrow sw-gives", color_of(r), 2, concat(name_of(r), " sends ", bytes_text(traffic.sent_bytes)));
        svg_.path(curve_path(x0, side, middle, y), "fill=\"none\"");
        svg_.close_group();
      }
      if (num_elements(step.after.region(member)) > 0) {
        open_arrow("sw-arrow sw-takes", color_of(r), 2,
                   concat(name_of(r), " receives ", bytes_text(traffic.received_bytes)));
        svg_.path(curve_path(middle, y, x1 - kTip + 1, side), "fill=\"none\"");
        svg_.tip(x1, side, kTip);
        svg_.close_group();
      }
    }
    std::vector<std::string> names;
    for (const int64_t member : group) names.push_back(rank_text(row_of(member)));
    const std::string op = op_text(step.before, step.mesh_dims);
    const double radius = std::max(16.0, text_width(op, {10, "", "", true}) / 2 + 3);
    svg_.circle(middle, y, radius, "fill=\"#FFFFFF\" stroke=\"#555555\" stroke-width=\"1.5\"",
                concat(op, " over ranks ", join(names)));
    svg_.text(middle, y + 3.5, op, {10, "middle", "#111111", true});
  }

  // ---- legend

  // Returns the label of boxes in the legend.
  std::string box_text() const {
    const auto dim_text = [&](int t) { return concat("dim ", t, " (", plan_.src.shape()[t], ")"); };
    if (drawn_.across < 0) return "box: full tensor (one element)";
    std::string text = "box: full tensor, ";
    if (drawn_.down >= 0) text += concat(dim_text(drawn_.down), " down, ");
    text += concat(dim_text(drawn_.across), " across");
    for (const int t : drawn_.strips) text += concat("; strip below: ", dim_text(t));
    const size_t hidden = plan_.src.shape().size() - 2 - drawn_.strips.size();
    if (plan_.src.ndim() > 2 && hidden > 0) text += "; not drawn: uncut dims";
    return text;
  }

  // Adds the legend.
  void add_legend() {
    frame_.add_legend_line(box_text());
    frame_.add_legend_line("filled: part of the rank, with color and number of the sender");
    if (has_hidden_) {
      frame_.add_legend_line("parts of several senders that overlap in the drawing: color of the receiver");
    }
    if (widest_bytes_ > 0) {
      frame_.add_legend_line(concat("arrow: message; color: sender; width: bytes (max ", bytes_text(widest_bytes_),
                                    "); gray: kept elements"));
    }
    const std::vector<Step>& steps = frame_.steps();
    if (std::any_of(steps.begin(), steps.end(), reduces)) {
      frame_.add_legend_line("circle: reduction over a group of ranks");
    }
    std::string pending;
    bool has_zeros = false;
    for (const Layout& layout : frame_.states()) {
      if (pending.empty()) pending = op_text(layout, layout.partial_dims());
    }
    for (const Step& step : steps) has_zeros = has_zeros || step.op == StepOp::kZeroFill;
    if (!pending.empty()) {
      frame_.add_legend_line(concat("striped: contribution to a pending ", pending), color_of(0), true);
    }
    if (has_zeros) frame_.add_legend_line("zeros", kZeros, true);
    if (has_pale_) {
      frame_.add_legend_line(concat("pale: bounding range of more than ", kMaxRectsDrawn, " pieces"), "#99C9E4");
    }
  }

  const Plan& plan_;
  std::vector<Rank> ranks_;  // by row
  int64_t num_rows_;
  DrawnDims drawn_;
  Rect box_;  // size of a box
  PictureFrame frame_;
  Svg svg_;
  double pitch_ = 0;                                 // distance between the tops of rows
  std::vector<std::vector<DrawnMessage>> messages_;  // by step
  int64_t widest_bytes_ = 0;                         // bytes of the largest message
  bool has_pale_ = false;                            // draw_pale() was called
  bool has_hidden_ = false;                          // parts overlap in the picture
};

}  // namespace

std::string picture_by_rank(const Plan& plan) { return RankPicture(plan).draw(); }

}  // namespace shardwright
