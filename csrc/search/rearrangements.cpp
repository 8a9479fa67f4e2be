#include "search/rearrangements.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "crossing/rearrangement.h"
#include "moves/figures.h"
#include "moves/move.h"
#include "support/error.h"

namespace shardwright {
namespace {

// The steps that lead to a layout and what they are predicted to cost.
struct Way {
  std::vector<Step> steps;
  int64_t picoseconds = 0;
  int64_t received_bytes = 0;  // by the worst rank in each step
};

class Ways {
 public:
  Ways(const PlanOptions& options, const Topology& topology) : options_(options), topology_(topology) {}

  void add(Way& way, Step step) const {
    const StepFigures worst = figures(step, options_.lowering);
    way.picoseconds = saturating_sum(way.picoseconds, predicted_picoseconds(step, worst, topology_));
    way.received_bytes += worst.received_bytes;
    way.steps.push_back(std::move(step));
  }

  // Whether one way is better than another, as the objective has it.
  bool is_better(const Way& a, const Way& b) const {
    const auto order = [&](const Way& way) {
      return options_.objective == Objective::kTime ? std::pair(way.picoseconds, way.received_bytes)
                                                    : std::pair(way.received_bytes, way.picoseconds);
    };
    return order(a) < order(b);
  }

 private:
  const PlanOptions& options_;
  const Topology& topology_;
};

// The source once all is reduced that is not due in the goal. The ranks that reduce either all get everything or, with
// `scatters`, a chunk each of the longest tensor dim.
Layout reduced(const Layout& src, MeshDimSet due, bool scatters) {
  std::vector<Placement> partials(src.mesh().ndim(), Placement::replicate());
  for (const int d : (src.partial_dims() - due).to_vector()) partials[d] = src.placements()[d];
  std::vector<std::vector<Cut>> cuts = src.cuts();
  if (scatters) {
    const std::vector<int64_t> longest = src.local_shape(src.largest_position());
    const auto t = std::max_element(longest.begin(), longest.end()) - longest.begin();
    for (const int d : due.to_vector()) cuts[t].push_back({d, 1});
  }
  return src.with(std::move(cuts), partials);
}

// The one move between layouts with the same reductions due.
std::optional<Step> rearranged(const Layout& before, const Layout& after, Sharing sharing) {
  if (before == after) return std::nullopt;
  const bool keeps_all = !Rearrangement(before, after, sharing).communicates();
  if (keeps_all && before.mesh() == after.mesh() && before.flattened() == after.flattened()) {
    return Step{StepOp::kSlice, after.cut_dims() | before.cut_dims(), before, after};
  }
  return Step{StepOp::kRearrange, {}, before, after, sharing};
}

}  // namespace

namespace {

// What is due is reduced over groups that may be used: over all its mesh dims at once, or else over one after the
// other. Then nothing may be left to send, because a rearrangement takes all ranks together.
std::vector<Step> reductions_over_groups(const Layout& src, const Layout& goal, const PlanOptions& options) {
  const MeshDimSet kept = src.mesh() == goal.mesh() ? goal.partial_dims() : MeshDimSet();
  const MeshDimSet due = src.partial_dims() - kept;
  std::vector<MeshDimSet> parts{due};
  if (!due.empty() && !move_between(src, reduced(src, due, false), options.groups)) {
    parts.clear();
    for (const int d : due.to_vector()) parts.push_back(MeshDimSet::single(d));
  }
  std::vector<Step> steps;
  Layout at = src;
  for (const MeshDimSet part : parts) {
    if (part.empty()) continue;
    Layout next = reduced(at, part, false);
    std::optional<Step> step = move_between(at, next, options.groups);
    check_user(step.has_value(), "groups: none of the given ones spans ", src.mesh().names_of(part), ", over which ",
               src.placements_string(), " is reduced; allowed are sets of mesh dims with that one");
    step->ordered = options.ordered;
    steps.push_back(named_by_collective(std::move(*step)));
    at = std::move(next);
  }
  if (std::optional<Step> last = rearranged(at, goal, Sharing::kMessages)) {
    check_user(last->op == StepOp::kSlice, "groups: sets of mesh dims were named for ", src, " -> ", goal,
               "; pieces and flattened dims are moved by all ranks together, so allowed are none");
    steps.push_back(std::move(*last));
  }
  return steps;
}

}  // namespace

std::vector<Step> cheapest_rearrangement(const Layout& src, const Layout& goal, const PlanOptions& options,
                                         const Topology& topology) {
  if (!options.groups.empty()) return reductions_over_groups(src, goal, options);
  const MeshDimSet kept = src.mesh() == goal.mesh() ? goal.partial_dims() : MeshDimSet();
  const MeshDimSet due = src.partial_dims() - kept;
  const Ways ways(options, topology);
  std::optional<Way> best;
  for (const bool scatters : {true, false}) {
    if ((due.empty() || src.ndim() == 0) && scatters) continue;
    Way first;
    const Layout at = due.empty() ? src : reduced(src, due, scatters);
    if (!due.empty()) {
      std::optional<Step> step = move_between(src, at);
      check_invariant(step.has_value(), "no reduction from ", src, " to ", at);
      step->ordered = options.ordered;
      ways.add(first, named_by_collective(std::move(*step)));
    }
    for (const Sharing sharing : {Sharing::kMessages, Sharing::kBytes}) {
      Way way = first;
      if (std::optional<Step> step = rearranged(at, goal, sharing)) ways.add(way, std::move(*step));
      if (!best || ways.is_better(way, *best)) best = std::move(way);
    }
  }
  return std::move(best->steps);
}

}  // namespace shardwright
