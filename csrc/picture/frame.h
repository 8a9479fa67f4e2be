// The frame of every kind of picture: a title, a column for each state with its placements, a gap for each step with
// its description and costs, and a legend. A *state* is a layout of the tensor before, between or after steps. A *box*
// is the rectangle that shows the full tensor in one state. Lengths are in pixels.
#pragma once

#include <string>
#include <vector>

#include "moves/plan.h"
#include "picture/svg.h"

namespace shardwright {

// Returns an SVG document with a row per rank, for up to kMaxRanksDrawn ranks.
std::string picture_by_rank(const Plan& plan);
// Returns an SVG document with a row per mesh dim, for any number of ranks of one mesh.
std::string picture_by_mesh_dim(const Plan& plan);
// Returns an SVG document with blocks of ranks and the messages between them, for any number of ranks on two meshes.
std::string picture_by_block(const Plan& plan);

// The tensor dims that a box shows, -1 if the tensor has too few dims. Dims that some state cuts come first.
struct DrawnDims {
  int down = -1;            // from the top to the bottom
  int across = -1;          // from the left to the right
  std::vector<int> strips;  // other cut dims; each has a strip below the box
};

// Returns the dims to draw, equal for all states of a plan.
DrawnDims drawn_dims(const std::vector<Layout>& states);

// Returns the size of a tensor's box, at most `height` high. The aspect ratio is the tensor's, clamped to a readable
// range.
Rect box_size(const std::vector<int64_t>& shape, const DrawnDims& drawn, double height);

// Returns the rectangles of a part within a box: the product of its intervals on the drawn dims. Returns none for more
// than `max_rects` rectangles.
constexpr size_t kMaxRectsDrawn = 128;
std::vector<Rect> rects_of(const Region& part, const std::vector<int64_t>& shape, const DrawnDims& drawn,
                           const Rect& box, size_t max_rects = kMaxRectsDrawn);

// Returns the indices of a part, such as "[0:4, 2:5]".
std::string indices_text(const Region& part);

// Returns the source, the layouts between steps, and the destination; without steps, only source and destination.
std::vector<Layout> states_of(const Plan& plan);

// The frame of one plan. The owner of the frame draws the rows, from top() down.
class PictureFrame {
 public:
  // `labels_width` is the width of the free space left of the first column, `column_width` the least column width.
  PictureFrame(const Plan& plan, double labels_width, double column_width);

  // States and steps. A plan without steps has one step here, which keeps all elements.
  const std::vector<Layout>& states() const { return states_; }
  const std::vector<Step>& steps() const { return steps_; }

  double column(size_t state) const { return columns_[state]; }  // x of the column's middle
  double top() const { return top_; }                            // y of the first row
  double right() const { return right_; }                        // x of the end of the last column

  // Draws the title and the texts above columns and gaps.
  void draw_heads(Svg& svg) const;

  // Adds a line to the legend. A `fill` adds a swatch in this color.
  void add_legend_line(const std::string& label, const std::string& fill = {}, bool striped = false);
  // Draws the legend and returns the document. The picture ends at `right` and `bottom`.
  std::string page(Svg& svg, double right, double bottom) const;

 private:
  // Returns the lines of text about a step.
  std::vector<std::string> step_lines(const Plan& plan, size_t index) const;

  std::string title_;
  std::string subtitle_;
  std::vector<Layout> states_;
  std::vector<Step> steps_;
  std::vector<std::vector<std::string>> step_lines_;
  std::vector<double> columns_;
  std::vector<double> gaps_;  // x of their middles
  double top_ = 0;
  double right_ = 0;

  struct LegendLine {
    std::string label;
    std::string fill;
    bool striped;
  };
  std::vector<LegendLine> legend_;
};

}  // namespace shardwright
