// Pictures with one row per mesh dim, like a circuit diagram: a mesh dim is a wire, and a step is a bar with a dot on
// each of its mesh dims.
#include <algorithm>

#include "picture/frame.h"
#include "picture/picture.h"
#include "support/error.h"
#include "support/text.h"

namespace shardwright {
namespace {

constexpr double kIcon = 34;  // side of the icon of a placement
constexpr double kCellWidth = 150;
constexpr double kRow = 56;  // height of a row
constexpr double kTensorHeight = 90;
constexpr int64_t kMaxPartsDrawn = 16;  // maximum number of parts along each side of the tensor
constexpr const char* kWire = "#BBBBBB";
constexpr const char* kSpans = "#BB3311";  // color of the mesh dims of a step
constexpr const char* kReplicated = "#9AA5B1";
constexpr const char* kPending = "#EE8844";
constexpr TextStyle kName{13, "start", "#111111", true};
constexpr TextStyle kNote{11, "start", "#555555", false};
constexpr TextStyle kCaption{11, "middle", "#555555", false};
constexpr size_t kMaxNameChars = 20;  // maximum length of the label of a mesh dim

// Returns the color of a tensor dim.
const char* color_of_dim(int64_t tensor_dim) { return color_of(tensor_dim % 2 == 0 ? tensor_dim : tensor_dim + 6); }

// Returns "2nd" for 2.
std::string ordinal(size_t n) { return concat(n, n == 1 ? "st" : n == 2 ? "nd" : n == 3 ? "rd" : "th"); }

// The picture of one plan.
class MeshDimPicture {
 public:
  explicit MeshDimPicture(const Plan& plan)
      : mesh_(plan.src.mesh()),
        frame_(plan, labels_width(), kCellWidth),
        drawn_(drawn_dims(frame_.states())),
        box_(box_size(plan.src.shape(), drawn_, kTensorHeight)) {}

  std::string draw() {
    frame_.draw_heads(svg_);
    for (int d = 0; d < mesh_.ndim(); ++d) draw_label(d);
    for (size_t i = 0; i < frame_.steps().size(); ++i) draw_step(i);
    for (size_t state = 0; state < frame_.states().size(); ++state) {
      for (int d = 0; d < mesh_.ndim(); ++d) draw_cell(state, d);
      draw_tensor(state);
    }
    svg_.text(20, tensor_top() + 20, "full tensor", kName);
    svg_.text(20, tensor_top() + 36, first_part_label(), kNote);
    add_legend();
    return frame_.page(svg_, frame_.right(), tensor_top() + box_.h + 16 + 4 * 15);
  }

 private:
  // ---- places

  // Returns the y of the wire of a mesh dim.
  double wire(int mesh_dim) const { return frame_.top() + kRow * mesh_dim + kRow / 2; }
  // Returns the y of the tops of the tensor's boxes, below all rows.
  double tensor_top() const { return frame_.top() + kRow * mesh_.ndim() + 20; }

  std::string first_part_label() const { return concat("filled: part of rank ", mesh_.rank_at(Position{0})); }

  double labels_width() const {
    double width = text_width(first_part_label(), kNote);
    for (const std::string& name : mesh_.dim_names()) {
      width = std::max(width, text_width(shortened(name, kMaxNameChars), kName));
    }
    return width + 24;
  }

  void draw_label(int mesh_dim) {
    const std::string& name = mesh_.dim_names()[mesh_dim];
    svg_.text(20, wire(mesh_dim) - 2, shortened(name, kMaxNameChars), kName, name);
    const int64_t size = mesh_.dim_size(mesh_dim);
    svg_.text(20, wire(mesh_dim) + 13, concat(size, size == 1 ? " rank" : " ranks"), kNote);
  }

  // ---- steps

  // Draws a step: a wire for each mesh dim, and a bar across the mesh dims of the step.
  void draw_step(size_t index) {
    const Step& step = frame_.steps()[index];
    const double x0 = frame_.column(index) + kCellWidth / 2;
    const double x1 = frame_.column(index + 1) - kCellWidth / 2;
    const double middle = (x0 + x1) / 2;
    const std::vector<int> spanned = step.mesh_dims.to_vector();
    for (int d = 0; d < mesh_.ndim(); ++d) draw_wire(x0, x1, wire(d), step.mesh_dims.contains(d));
    if (spanned.empty()) return;
    const std::string title = concat(step_op_name(step.op), " over ", mesh_.names_of(step.mesh_dims), ", groups of ",
                                     mesh_.group_size(step.mesh_dims));
    svg_.open_group(concat("class=\"sw-spans\" stroke=\"", kSpans, "\" fill=\"", kSpans, "\""), title);
    svg_.path(rect_path({middle - 2, wire(spanned.front()), 4, wire(spanned.back()) - wire(spanned.front())}),
              "stroke=\"none\"");
    for (const int d : spanned) svg_.circle(middle, wire(d), 9, "stroke=\"#FFFFFF\" stroke-width=\"2\"");
    svg_.close_group();
  }

  void draw_wire(double x0, double x1, double y, bool is_spanned) {
    const char* color = is_spanned ? kSpans : kWire;
    svg_.open_group(
        concat("stroke=\"", color, "\" fill=\"", color, "\" stroke-width=\"", is_spanned ? "3" : "1.2", "\""));
    svg_.path(concat("M", px(x0 + 4), " ", px(y), "H", px(x1 - 10)), "fill=\"none\"");
    svg_.tip(x1 - 4, y, 9);
    svg_.close_group();
  }

  // ---- a placement

  // Draws the placement of one mesh dim in one state: an icon and a note.
  void draw_cell(size_t state, int mesh_dim) {
    const Layout& layout = frame_.states()[state];
    const Placement& placement = layout.placements()[mesh_dim];
    const Rect icon{frame_.column(state) - kCellWidth / 2 + 6, wire(mesh_dim) - kIcon / 2, kIcon, kIcon};
    svg_.path(rect_path(icon), "fill=\"#F6F6F6\" stroke=\"#AAAAAA\"");
    if (mesh_.dim_size(mesh_dim) == 1 || !placement.is_shard_like()) {
      svg_.path(rect_path(icon), concat("fill=\"", placement.is_partial() ? kPending : kReplicated, "\""));
      if (placement.is_partial()) svg_.stripes(rect_path(icon));
    } else {
      draw_cut_icon(icon, placement, layout.shape()[placement.dim], mesh_.dim_size(mesh_dim));
    }
    svg_.text(icon.x + kIcon + 8, icon.y + 14, placement.to_string(), kName);
    svg_.text(icon.x + kIcon + 8, icon.y + 29, note(layout, mesh_dim), kNote);
  }

  // Draws up to 8 slices and fills the first. A part of several runs has an icon of up to 3 runs, each of up to 4
  // slices, with the first slice of each run filled.
  void draw_cut_icon(const Rect& icon, const Placement& placement, int64_t n, int64_t num_ranks) {
    const auto pieces = static_cast<double>(std::min<int64_t>(placement.rule.runs(n, num_ranks), 3));
    const auto slices = pieces * static_cast<double>(std::min<int64_t>(num_ranks, pieces > 1 ? 4 : 8));
    const bool is_down = placement.dim == drawn_.down;
    std::string d;
    for (double first = 0; first < slices; first += slices / pieces) {
      const double from = kIcon * first / slices;
      const double size = kIcon / slices;
      d += rect_path(is_down ? Rect{icon.x, icon.y + from, kIcon, size} : Rect{icon.x + from, icon.y, size, kIcon});
    }
    svg_.path(d, concat("fill=\"", color_of_dim(placement.dim), "\""));
    std::string lines;
    for (double line = 1; line < slices; ++line) {
      const double at = kIcon * line / slices;
      lines += is_down ? concat("M", px(icon.x), " ", px(icon.y + at), "h", px(kIcon))
                       : concat("M", px(icon.x + at), " ", px(icon.y), "v", px(kIcon));
    }
    svg_.path(lines, "fill=\"none\" stroke=\"#AAAAAA\" stroke-width=\"0.7\"");
  }

  // Returns a label of a placement, such as "4 parts, 2nd cut" (the second cut of its tensor dim).
  std::string note(const Layout& layout, int mesh_dim) const {
    const int64_t size = mesh_.dim_size(mesh_dim);
    const Placement& placement = layout.placements()[mesh_dim];
    if (size == 1) return "no effect";
    if (placement.is_replicate()) return concat(size, " copies");
    if (placement.is_partial()) return concat(size, " contributions");
    const std::vector<Cut>& cuts = layout.cuts(static_cast<int>(placement.dim));
    std::string text = concat(size, " parts");
    for (size_t i = 0; i < cuts.size() && cuts.size() > 1; ++i) {
      if (cuts[i].mesh_dim == mesh_dim) text += concat(", ", ordinal(i + 1), " cut");
    }
    return text;
  }

  // ---- the tensor

  // Draws the box of the tensor in one state, with the part of the rank at position 0, and a caption.
  void draw_tensor(size_t state) {
    const Layout& layout = frame_.states()[state];
    const double center = frame_.column(state);
    const Rect box{center - box_.w / 2, tensor_top(), box_.w, box_.h};
    svg_.path(rect_path(box), "fill=\"#F6F6F6\" stroke=\"#AAAAAA\"");
    draw_lines(layout, box);
    const Region part = layout.region(0);
    std::string d;
    for (Rect rect : rects_of(part, layout.shape(), drawn_, box)) {
      // A minimum size keeps one part of thousands visible.
      rect.w = std::max(rect.w, box.w / kMaxPartsDrawn);
      rect.h = std::max(rect.h, box.h / kMaxPartsDrawn);
      d += rect_path(rect);
    }
    const bool is_pending = !layout.partial_dims().empty();
    const char* color = is_pending ? kPending : color_of(0);
    if (!d.empty()) svg_.path(d, concat("class=\"sw-part\" fill=\"", color, "\""), indices_text(part));
    if (!d.empty() && is_pending) svg_.stripes(d);
    const std::vector<std::string> lines = captions(layout, part);
    for (size_t i = 0; i < lines.size(); ++i) {
      svg_.text(center, box.y + box.h + 16 + 15 * static_cast<double>(i), lines[i], kCaption);
    }
  }

  // Returns the number of parts into which a tensor dim is cut.
  int64_t num_parts(const Layout& layout, int tensor_dim) const {
    return tensor_dim < 0 ? 1 : mesh_.group_size(dims_of(layout.cuts(tensor_dim)));
  }

  // Draws lines between parts, at most kMaxPartsDrawn parts along each side.
  void draw_lines(const Layout& layout, const Rect& box) {
    std::string d;
    const int64_t rows = std::min(num_parts(layout, drawn_.down), kMaxPartsDrawn);
    const int64_t columns = std::min(num_parts(layout, drawn_.across), kMaxPartsDrawn);
    for (int64_t i = 1; i < rows; ++i) {
      d += concat("M", px(box.x), " ", px(box.y + box.h * static_cast<double>(i) / static_cast<double>(rows)), "h",
                  px(box.w));
    }
    for (int64_t i = 1; i < columns; ++i) {
      d += concat("M", px(box.x + box.w * static_cast<double>(i) / static_cast<double>(columns)), " ", px(box.y), "v",
                  px(box.h));
    }
    if (!d.empty()) svg_.path(d, "fill=\"none\" stroke=\"#C4C4C4\" stroke-width=\"0.7\"");
  }

  // Returns the lines below the tensor: number and size of parts, and number of copies and contributions.
  std::vector<std::string> captions(const Layout& layout, const Region& part) const {
    std::vector<int64_t> parts;
    for (int t = 0; t < layout.ndim(); ++t) parts.push_back(num_parts(layout, t));
    const int64_t copies = mesh_.group_size(layout.replicated_dims());
    const int64_t contributions = mesh_.group_size(layout.partial_dims());
    std::vector<std::string> lines{shortened(concat(join(parts, " x "), " parts"), 24),
                                   shortened(concat("part: [", join(shape_of(part)), "]"), 24),
                                   concat(bytes_text(num_elements(part) * layout.dtype().size_bytes()), " per rank")};
    if (copies > 1) lines.push_back(concat(copies, " copies per part"));
    if (contributions > 1) lines.push_back(concat(contributions, " contributions per part"));
    return lines;
  }

  // Adds the legend.
  void add_legend() {
    frame_.add_legend_line("row: mesh dim, with its placement before and after each step");
    frame_.add_legend_line("bar: mesh dims of a step; a group has the ranks that differ only in these dims", kSpans);
    frame_.add_legend_line("sharded; filled: part of the first rank; parts drawn: at most 8", color_of_dim(0));
    frame_.add_legend_line("replicated: equal data on all ranks along the mesh dim", kReplicated);
    bool has_pending = false;
    for (const Layout& layout : frame_.states()) has_pending = has_pending || !layout.partial_dims().empty();
    if (has_pending) frame_.add_legend_line("striped: contributions to a pending reduction", kPending, true);
  }

  const Mesh& mesh_;
  PictureFrame frame_;
  DrawnDims drawn_;
  Rect box_;
  Svg svg_;
};

}  // namespace

std::string picture_by_mesh_dim(const Plan& plan) { return MeshDimPicture(plan).draw(); }

}  // namespace shardwright
