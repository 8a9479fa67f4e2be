#include "search/two_meshes.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "cost/cost.h"
#include "crossing/bounds.h"
#include "crossing/crossing.h"
#include "moves/figures.h"

namespace shardwright {
namespace {

using Cuts = std::vector<std::vector<Cut>>;

// With more replicated mesh dims than this, only runs of them are cut for a crossing.
constexpr int kMaxDimsWithAllSets = 3;

Layout with_cuts(const Layout& layout, Cuts cuts) {
  return layout.with(std::move(cuts), std::vector<Placement>(layout.mesh().ndim(), Placement::replicate()));
}

// The same with these mesh dims cutting a tensor dim, behind what cuts it already.
Layout cut_further(const Layout& layout, MeshDimSet mesh_dims, int tensor_dim) {
  Cuts cuts = layout.cuts();
  for (const int d : mesh_dims.to_vector()) cuts[tensor_dim].push_back({.mesh_dim = d});
  return with_cuts(layout, std::move(cuts));
}

Layout without_cuts(const Layout& layout, MeshDimSet mesh_dims) {
  Cuts cuts = layout.cuts();
  for (std::vector<Cut>& list : cuts) {
    std::erase_if(list, [&](const Cut& cut) { return mesh_dims.contains(cut.mesh_dim); });
  }
  return with_cuts(layout, std::move(cuts));
}

// All sets of a few mesh dims; of many, the runs of neighbours.
std::vector<MeshDimSet> sets_of(MeshDimSet mesh_dims) {
  const std::vector<int> all = mesh_dims.to_vector();
  const int n = static_cast<int>(all.size());
  std::vector<MeshDimSet> sets;
  if (n <= kMaxDimsWithAllSets) {
    for (uint32_t bits = 1; bits < 1u << n; ++bits) {
      MeshDimSet set;
      for (int i = 0; i < n; ++i) {
        if (bits >> i & 1u) set.insert(all[i]);
      }
      sets.push_back(set);
    }
    return sets;
  }
  for (int first = 0; first < n; ++first) {
    MeshDimSet set;
    for (int i = first; i < n; ++i) {
      set.insert(all[i]);
      sets.push_back(set);
    }
  }
  return sets;
}

class Crossings {
 public:
  Crossings(const Layout& src, const Layout& goal, const PlanOptions& options, const Topology& topology)
      : src_(src), goal_(goal), options_(options), topology_(topology) {
    options_.groups.clear();
  }

  std::vector<Step> cheapest() {
    std::vector<Segment> before;
    for (const Layout& layout : ends_on_source()) add(before, layout, src_, layout);
    std::vector<Segment> after;
    for (const Layout& layout : starts_on_goal()) add(after, layout, layout, goal_);
    for (const Segment& first : before) {
      for (const Segment& last : after) try_crossing(first, last);
    }
    return std::move(best_);
  }

 private:
  // Moves on one mesh, and the layout at their end where the crossing is.
  struct Segment {
    Layout layout;
    std::vector<Step> steps;
    Cost cost;
  };

  bool is_for_time() const { return options_.objective == Objective::kTime; }

  Cost cost_of(const Step& step, const StepFigures& worst, int64_t picoseconds) const {
    const bool communicates = !is_local(step.op) && worst.messages > 0;
    return {is_for_time() ? picoseconds : worst.received_bytes, communicates ? 1 : 0, worst.messages, 1};
  }

  // Unless a rank would hold more than is allowed, or the layout is there already.
  void add(std::vector<Segment>& segments, const Layout& layout, const Layout& from, const Layout& to) {
    const bool is_end = layout == src_ || layout == goal_;
    if (!is_end && options_.max_held > 0 && layout.largest_part_elements() > options_.max_held) return;
    for (const Segment& known : segments) {
      if (known.layout == layout) return;
    }
    Segment segment{layout, from == to ? std::vector<Step>{} : cheapest_moves(from, to, options_, topology_), {}};
    for (const Step& step : segment.steps) {
      const StepFigures worst = figures(step, options_.lowering);
      segment.cost = segment.cost + cost_of(step, worst, predicted_picoseconds(step, worst, topology_));
    }
    segments.push_back(std::move(segment));
  }

  std::vector<Layout> ends_on_source() const {
    std::vector<Layout> ends;
    const MeshDimSet due = src_.partial_dims();
    if (due.empty()) ends.push_back(src_);
    for (int t = 0; t < src_.ndim() && !due.empty(); ++t) ends.push_back(cut_further(src_, due, t));
    if (!due.empty()) ends.push_back(with_cuts(src_, src_.cuts()));
    for (const int d : src_.cut_dims().to_vector()) ends.push_back(without_cuts(src_, MeshDimSet::single(d)));
    if (!src_.cut_dims().empty()) ends.push_back(without_cuts(src_, src_.cut_dims()));
    return ends;
  }

  std::vector<Layout> starts_on_goal() const {
    std::vector<Layout> starts{goal_};
    for (const MeshDimSet striped : sets_of(goal_.replicated_dims())) {
      for (int t = 0; t < goal_.ndim(); ++t) starts.push_back(cut_further(goal_, striped, t));
    }
    const Layout uncut = without_cuts(goal_, goal_.cut_dims());
    for (int t = 0; t < goal_.ndim() && !goal_.cut_dims().empty(); ++t) {
      starts.push_back(cut_further(uncut, goal_.cut_dims(), t));
    }
    return starts;
  }

  // In whole messages, and to the element where that relieves a rank that sends more than any receives. Under the other
  // objective sharing changes nothing that counts, and holders send as little as they can.
  void try_crossing(const Segment& first, const Segment& last) {
    const Cost around = first.cost + last.cost;
    if (best_cost_ && *best_cost_ <= around) return;
    bool relieves = true;
    if (is_for_time()) relieves = try_sharing(first, last, Sharing::kMessages, around);
    if (relieves) try_sharing(first, last, Sharing::kBytes, around);
  }

  // Whether the worst sender decides.
  bool try_sharing(const Segment& first, const Segment& last, Sharing sharing, const Cost& around) {
    const Crossing crossing(first.layout, last.layout, sharing);
    const StepFigures worst = crossing.totals().worst;
    Step step{StepOp::kCross, {}, first.layout, last.layout, sharing};
    const int64_t picoseconds =
        predicted_picoseconds(worst.messages == 0, worst, link_of(crossing, topology_), topology_);
    const Cost total = around + cost_of(step, worst, picoseconds);
    if (!best_cost_ || total < *best_cost_) {
      best_cost_ = total;
      best_ = first.steps;
      best_.push_back(std::move(step));
      best_.insert(best_.end(), last.steps.begin(), last.steps.end());
    }
    return worst.sent_bytes > worst.received_bytes;
  }

  const Layout& src_;
  const Layout& goal_;
  PlanOptions options_;
  const Topology& topology_;
  std::optional<Cost> best_cost_;
  std::vector<Step> best_;
};

}  // namespace

std::vector<Step> cheapest_crossing(const Layout& src, const Layout& goal, const PlanOptions& options,
                                    const Topology& topology) {
  return Crossings(src, goal, options, topology).cheapest();
}

int64_t least_picoseconds_between(const Layout& src, const Layout& dst, const Topology& topology) {
  const CrossingBound bound = crossing_bound(src, dst, topology.ranks_per_node);
  const int64_t copies = scaled(dst.largest_part_bytes(), topology.memory_ps_per_kib);
  if (bound.received_bytes_sum == 0) return copies;
  const auto faster = [](const Link& a, const Link& b) {
    return Link{std::min(a.message_ps, b.message_ps), std::min(a.ps_per_kib, b.ps_per_kib)};
  };
  Link between = topology.between;
  for (const auto& [mesh_dim, link] : topology.mesh_dims) between = faster(between, link);
  const Link any = faster(between, topology.inside);
  const int64_t message = bound.node_bytes_max > 0 ? between.message_ps : any.message_ps;
  const int64_t bytes = std::max(bound.received_bytes_max, bound.any_sent_bytes_max);
  const int64_t wire = std::max(scaled(bytes, any.ps_per_kib), scaled(bound.node_bytes_per_rank, between.ps_per_kib));
  return saturating_sum(saturating_sum(topology.step_ps, message), saturating_sum(wire, copies));
}

}  // namespace shardwright
