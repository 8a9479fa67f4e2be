#include "search/rearrangements.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "exchange/indexed_exchange.h"
#include "moves/move.h"
#include "moves/step_counts.h"
#include "search/search.h"
#include "support/error.h"

namespace shardwright {
namespace {

// A sequence of steps and its predicted cost.
struct StepSequence {
  std::vector<Step> steps;
  int64_t picoseconds = 0;
  int64_t received_bytes = 0;  // sum over steps of the bytes that the worst rank receives
  int64_t sent_bytes = 0;      // sum over steps of the bytes that the worst rank sends
};

// Returns the longest tensor dim of the largest part.
size_t longest_dim(const Layout& layout) {
  const std::vector<int64_t> sizes = layout.local_shape(layout.largest_position());
  return static_cast<size_t>(std::max_element(sizes.begin(), sizes.end()) - sizes.begin());
}

// Returns the source with the mesh dims `to_reduce` reduced. The ranks that reduce get either the full result or, with
// `scatters`, a chunk each of the longest tensor dim.
Layout reduced(const Layout& src, MeshDimSet to_reduce, bool scatters) {
  std::vector<Placement> partials(src.mesh().ndim(), Placement::replicate());
  for (const int d : (src.partial_dims() - to_reduce).to_vector()) partials[d] = src.placements()[d];
  std::vector<std::vector<Cut>> cuts = src.cuts();
  if (scatters) {
    for (const int d : to_reduce.to_vector()) cuts[longest_dim(src)].push_back({d, 1});
  }
  return src.with(std::move(cuts), partials);
}

// Returns layouts that also cut the goal's longest tensor dim, innermost: over one replicated mesh dim, for each such
// mesh dim, and over all of them. Replicas of a part of the goal then hold a different stripe of it each.
std::vector<Layout> stripes_of(const Layout& goal) {
  std::vector<MeshDimSet> sets;
  if (goal.ndim() == 0) return {};
  for (const int d : goal.replicated_dims().to_vector()) sets.push_back(MeshDimSet::single(d));
  if (sets.size() > 1) sets.push_back(goal.replicated_dims());
  std::vector<Layout> stripes;
  for (const MeshDimSet set : sets) {
    std::vector<std::vector<Cut>> cuts = goal.cuts();
    for (const int d : set.to_vector()) cuts[longest_dim(goal)].push_back({d, 1});
    stripes.push_back(goal.with(std::move(cuts), goal.placements()));
  }
  return stripes;
}

// Returns the one move between layouts with the same pending reductions; nullopt if they are equal.
std::optional<Step> rearrangement(const Layout& before, const Layout& after, ReplicaPolicy policy) {
  if (before == after) return std::nullopt;
  const bool keeps_all = !IndexedExchange(before, after, policy).communicates();
  if (keeps_all && before.mesh() == after.mesh() && before.flattened() == after.flattened()) {
    return Step{StepOp::kSlice, after.cut_dims() | before.cut_dims(), before, after};
  }
  return Step{StepOp::kRearrange, {}, before, after, policy};
}

// Makes sequences of steps, and compares them under one set of options and one topology.
class Sequences {
 public:
  Sequences(const PlanOptions& options, const Topology& topology) : options_(options), topology_(topology) {}

  // Appends a step and adds its predicted cost.
  void add(StepSequence& sequence, Step step) const {
    const StepCounts maxima = step_counts(step, options_.lowering);
    sequence.picoseconds = saturating_sum(sequence.picoseconds, predicted_picoseconds(step, maxima, topology_));
    sequence.received_bytes += maxima.received_bytes;
    sequence.sent_bytes += maxima.sent_bytes;
    sequence.steps.push_back(std::move(step));
  }

  // Returns the one move between layouts with the same pending reductions, by kWholeMessages or kEvenBytes, whichever
  // is better; no steps if the layouts are equal.
  StepSequence rearranged(const Layout& before, const Layout& after) const {
    std::optional<StepSequence> best;
    for (const ReplicaPolicy policy : {ReplicaPolicy::kWholeMessages, ReplicaPolicy::kEvenBytes}) {
      StepSequence sequence;
      if (std::optional<Step> step = rearrangement(before, after, policy)) add(sequence, std::move(*step));
      if (!best || is_better(sequence, *best)) best = std::move(sequence);
    }
    return std::move(*best);
  }

  // Returns the moves between two layouts on one mesh.
  StepSequence moved(const Layout& before, const Layout& after) const {
    if (needs_rearrangement(before, after)) return rearranged(before, after);
    StepSequence sequence;
    for (Step& step : cheapest_moves(before, after, options_, topology_)) add(sequence, std::move(step));
    return sequence;
  }

  // Returns the concatenation of two sequences.
  static StepSequence joined(StepSequence sequence, const StepSequence& next) {
    sequence.steps.insert(sequence.steps.end(), next.steps.begin(), next.steps.end());
    sequence.picoseconds = saturating_sum(sequence.picoseconds, next.picoseconds);
    sequence.received_bytes += next.received_bytes;
    sequence.sent_bytes += next.sent_bytes;
    return sequence;
  }

  // Returns true if `a` is better than `b` under the objective.
  bool is_better(const StepSequence& a, const StepSequence& b) const {
    const auto order = [&](const StepSequence& sequence) {
      return options_.objective == Objective::kTime
                 ? std::tuple(sequence.picoseconds, sequence.received_bytes, sequence.sent_bytes)
                 : std::tuple(sequence.received_bytes, sequence.sent_bytes, sequence.picoseconds);
    };
    return order(a) < order(b);
  }

  // Returns a lower bound on the time of two steps in which some rank receives this many bytes over the fastest link.
  int64_t two_steps_lower_bound(int64_t received_bytes) const {
    int64_t ps_per_kib = std::min(topology_.inside.ps_per_kib, topology_.between.ps_per_kib);
    for (const auto& [mesh_dim, link] : topology_.mesh_dims) ps_per_kib = std::min(ps_per_kib, link.ps_per_kib);
    return saturating_sum(2 * topology_.step_ps, picoseconds_for(received_bytes, ps_per_kib));
  }

 private:
  const PlanOptions& options_;
  const Topology& topology_;
};

// Returns the reductions over the allowed groups: over all pending mesh dims at once if a group spans them, else over
// one after the other. Throws UserError if ranks need other elements afterwards, because a rearrangement involves all
// ranks.
std::vector<Step> reductions_over_groups(const Layout& src, const Layout& goal, const PlanOptions& options) {
  const MeshDimSet kept = src.mesh() == goal.mesh() ? goal.partial_dims() : MeshDimSet();
  const MeshDimSet to_reduce = src.partial_dims() - kept;
  std::vector<MeshDimSet> parts{to_reduce};
  if (!to_reduce.empty() && !move_between(src, reduced(src, to_reduce, false), options.groups)) {
    parts.clear();
    for (const int d : to_reduce.to_vector()) parts.push_back(MeshDimSet::single(d));
  }
  std::vector<Step> steps;
  Layout at = src;
  for (const MeshDimSet part : parts) {
    if (part.empty()) continue;
    Layout next = reduced(at, part, false);
    std::optional<Step> step = move_between(at, next, options.groups);
    if (!step.has_value()) {
      throw UserError(concat("groups must contain the set of mesh dims ", src.mesh().names_of(part), ", over which ",
                             src.placements_string(), " is reduced, got groups without it"));
    }
    step->ordered = options.ordered;
    steps.push_back(named_by_collective(std::move(*step)));
    at = std::move(next);
  }
  if (std::optional<Step> last = rearrangement(at, goal, ReplicaPolicy::kWholeMessages)) {
    check_user(last->op == StepOp::kSlice, "groups must not be given for ", src, " -> ", goal,
               ", because its rearrangement involves all ranks, got ", options.groups.size(),
               " sets of mesh dims; leave groups out");
    steps.push_back(std::move(*last));
  }
  return steps;
}

}  // namespace

std::vector<Step> cheapest_rearrangement(const Layout& src, const Layout& goal, const PlanOptions& options,
                                         const Topology& topology) {
  if (!options.groups.empty()) return reductions_over_groups(src, goal, options);
  const MeshDimSet kept = src.mesh() == goal.mesh() ? goal.partial_dims() : MeshDimSet();
  const MeshDimSet to_reduce = src.partial_dims() - kept;
  const Sequences sequences(options, topology);
  std::optional<StepSequence> best;
  const auto keep_if_better = [&](StepSequence sequence) {
    if (!best || sequences.is_better(sequence, *best)) best = std::move(sequence);
  };
  for (const bool scatters : {true, false}) {
    if ((to_reduce.empty() || src.ndim() == 0) && scatters) continue;
    StepSequence reduction;
    const Layout reduced_src = to_reduce.empty() ? src : reduced(src, to_reduce, scatters);
    if (!to_reduce.empty()) {
      std::optional<Step> step = move_between(src, reduced_src);
      if (!step && scatters) continue;  // no single move makes chunks of uneven parts
      check_invariant(step.has_value(), "no single reduction leads from ", src, " to ", reduced_src);
      step->ordered = options.ordered;
      sequences.add(reduction, named_by_collective(std::move(*step)));
    }
    const StepSequence direct = sequences.rearranged(reduced_src, goal);
    keep_if_better(Sequences::joined(reduction, direct));
    const int64_t stripes_lower_bound =
        saturating_sum(reduction.picoseconds, sequences.two_steps_lower_bound(direct.received_bytes));
    if (options.objective != Objective::kTime || best->picoseconds <= stripes_lower_bound) continue;
    for (const Layout& stripes : stripes_of(goal)) {
      const StepSequence to_stripes = Sequences::joined(reduction, sequences.rearranged(reduced_src, stripes));
      keep_if_better(Sequences::joined(to_stripes, sequences.moved(stripes, goal)));
    }
  }
  return std::move(best->steps);
}

}  // namespace shardwright
