// What both kinds of picture share: a title, a column for each state with its placements, a gap for each step with what
// the step does and costs, and a legend.
#pragma once

#include <string>
#include <vector>

#include "moves/plan.h"
#include "picture/svg.h"

namespace shardwright {

// For up to kMaxRanksDrawn ranks; for any number.
std::string picture_by_rank(const Plan& plan);
std::string picture_by_mesh_dim(const Plan& plan);

// Which tensor dims a box shows: `down` and `across`, -1 where the tensor has too few. Dims that some state cuts come
// first; `beside` has those for which there is no room.
struct DrawnDims {
  int down = -1;
  int across = -1;
  std::vector<int> beside;
};

DrawnDims drawn_dims(const std::vector<Layout>& states);

// Size of the box that shows a tensor, at most `height` high: its own proportions, within what can still be read.
Rect box_size(const std::vector<int64_t>& shape, const DrawnDims& drawn, double height);

// The stretches of a box that the part takes: the product of its intervals on the drawn dims. None where that would be
// more than `max_rects`.
constexpr size_t kMaxRectsDrawn = 128;
std::vector<Rect> rects_of(const Region& part, const std::vector<int64_t>& shape, const DrawnDims& drawn,
                           const Rect& box, size_t max_rects = kMaxRectsDrawn);

// "[0:4, 2:5]"
std::string indices_text(const Region& part);

// Source, what each step leads to, destination: one more than steps, and two where there is no step.
std::vector<Layout> states_of(const Plan& plan);

class PictureFrame {
 public:
  // `labels_width` is left of the first column; columns are at least `column_width` wide.
  PictureFrame(const Plan& plan, double labels_width, double column_width);

  // A plan without steps gets one that keeps everything.
  const std::vector<Layout>& states() const { return states_; }
  const std::vector<Step>& steps() const { return steps_; }

  double column(size_t state) const { return columns_[state]; }  // its middle
  double top() const { return top_; }                            // where rows may begin
  double right() const { return right_; }                        // of the last column

  void draw_heads(Svg& svg) const;

  // A line below the picture, with what it explains in front: a swatch of this fill, if not empty.
  void explain(const std::string& words, const std::string& fill = {}, bool striped = false);
  // Draws the legend and gives the document. `right` is where the picture ends.
  std::string page(Svg& svg, double right, double bottom) const;

 private:
  std::vector<std::string> step_lines(const Plan& plan, size_t index) const;

  std::string title_;
  std::string subtitle_;
  std::vector<Layout> states_;
  std::vector<Step> steps_;
  std::vector<std::vector<std::string>> step_lines_;
  std::vector<double> columns_;
  std::vector<double> gaps_;  // their middles
  double top_ = 0;
  double right_ = 0;

  struct Explanation {
    std::string words;
    std::string fill;
    bool striped;
  };
  std::vector<Explanation> explanations_;
};

}  // namespace shardwright
