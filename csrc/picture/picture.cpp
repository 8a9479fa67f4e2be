#include "picture/picture.h"

#include <algorithm>
#include <sstream>
#include <vector>

#include "moves/describe.h"
#include "picture/frame.h"
#include "picture/svg.h"
#include "support/error.h"

namespace shardwright {

namespace {

// Draws the text of a plan, one line per step.
std::string text_picture(const Plan& plan) {
  constexpr double kMargin = 16;
  constexpr double kLine = 20;
  std::vector<std::string> lines;
  std::istringstream text(to_string(plan));
  for (std::string line; std::getline(text, line);) lines.push_back(line);
  Svg svg;
  for (size_t i = 0; i < lines.size(); ++i) {
    svg.text(kMargin, kMargin + kLine * static_cast<double>(i + 1), lines[i], {.bold = i == 0});
  }
  return svg.page(widest(lines, {.bold = true}) + 2 * kMargin, kLine * static_cast<double>(lines.size()) + 3 * kMargin,
                  ends_of(plan));
}

}  // namespace

std::string to_svg(const Plan& plan) {
  const bool has_two_meshes = !(plan.src.mesh() == plan.dst.mesh());
  const bool is_by_rank = static_cast<int64_t>(ranks_of(plan).size()) <= kMaxRanksDrawn;
  const bool is_text = std::any_of(plan.steps.begin(), plan.steps.end(), [&](const Step& step) {
    return step.op == StepOp::kRearrange && (!is_by_rank || step.before.flattened() != step.after.flattened());
  });
  if (is_text) return text_picture(plan);
  if (is_by_rank) return picture_by_rank(plan);
  return has_two_meshes ? picture_by_block(plan) : picture_by_mesh_dim(plan);
}

}  // namespace shardwright
