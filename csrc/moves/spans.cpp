#include "moves/spans.h"

#include <algorithm>
#include <optional>

#include "layout/positions.h"

namespace shardwright {
namespace {

using CutList = std::vector<Cut>;

// Maximum number of ranks whose parts are compared one by one.
constexpr int64_t kMaxRanksCompared = int64_t{1} << 16;

// Maximum number of ranks along the mesh dims of both lists for which unequal parts are compared group by group.
constexpr int64_t kMaxRanksGathered = 4096;

// Returns the cuts that remain once the mesh dims `gathered` are gathered. A gathered cut is dropped, and each later
// cut gets the rule that makes the same parts without it (CutRule::with_gathered). Returns nullopt if there is no such
// rule.
//
// Example: chunks over a of size 2, then chunks over b. Without a, b has a strided cut with split factor 2.
std::optional<CutList> after_gathering(const Mesh& mesh, CutList cuts, MeshDimSet gathered) {
  for (size_t i = cuts.size(); i-- > 0;) {
    if (!gathered.contains(cuts[i].mesh_dim)) continue;
    for (size_t later = i + 1; later < cuts.size(); ++later) {
      const std::optional<CutRule> rule = cuts[later].rule.with_gathered(cuts[i].rule, mesh.dim_size(cuts[i].mesh_dim));
      if (!rule) return std::nullopt;
      cuts[later].rule = *rule;
    }
    cuts.erase(cuts.begin() + static_cast<int64_t>(i));
  }
  return cuts;
}

// Returns the parts of all ranks that differ from `position` only in gathered mesh dims. The parts are disjoint.
std::vector<IntervalList> held_together(const Mesh& mesh, int64_t n, const CutList& cuts, MeshDimSet gathered,
                                        int64_t position) {
  std::vector<IntervalList> parts{{{0, n}}};
  for (const Cut& c : cuts) {
    std::vector<IntervalList> finer;
    for (const IntervalList& part : parts) {
      const int64_t k = mesh.dim_size(c.mesh_dim);
      const bool is_gathered = gathered.contains(c.mesh_dim);
      const int64_t own = mesh.coordinate(position, c.mesh_dim);
      for (int64_t i = is_gathered ? 0 : own; i < (is_gathered ? k : own + 1); ++i)
        finer.push_back(c.rule.part(part, k, i));
    }
    parts = std::move(finer);
  }
  return parts;
}

// Returns the union of disjoint lists, ascending.
IntervalList united(const std::vector<IntervalList>& parts) {
  std::vector<Interval> intervals;
  for (const IntervalList& part : parts) intervals.insert(intervals.end(), part.begin(), part.end());
  IntervalList merged;
  for (const Interval& interval : sorted_by_begin(std::move(intervals))) append(merged, interval);
  return merged;
}

// Returns true if the lists in `a` together have the same indices as the lists in `b`. The lists in `a` must be
// disjoint, and so must the lists in `b`.
bool have_same_indices(const std::vector<IntervalList>& a, const std::vector<IntervalList>& b) {
  const auto repeats = [](const IntervalList& list) { return list.has_repeats(); };
  if (std::none_of(a.begin(), a.end(), repeats) && std::none_of(b.begin(), b.end(), repeats)) {
    return united(a) == united(b);
  }
  int64_t total_a = 0;
  int64_t total_b = 0;
  int64_t shared = 0;
  for (const IntervalList& list : a) total_a += length(list);
  for (const IntervalList& list : b) total_b += length(list);
  if (total_a != total_b) return false;
  for (const IntervalList& list_a : a) {
    for (const IntervalList& list_b : b) shared += intersection_length(list_a, list_b);
  }
  return shared == total_a;
}

// Drops gathered cuts from the end of the list, because the parts of such a cut together are the list that it divides.
// Stops at a cut whose rule is not a partition.
CutList without_gathered_tail(CutList cuts, MeshDimSet gathered) {
  while (!cuts.empty() && gathered.contains(cuts.back().mesh_dim) && cuts.back().rule.is_partition()) cuts.pop_back();
  return cuts;
}

// Returns true if the ranks that agree on `kept` together hold the same elements before and after. To compare them, all
// other mesh dims are gathered. A result of false may be wrong.
bool are_equal_when_gathered(const Mesh& mesh, int64_t n, const CutList& before, const CutList& after,
                             MeshDimSet kept) {
  const MeshDimSet gathered_before = dims_of(before) - kept;
  const MeshDimSet gathered_after = dims_of(after) - kept;
  const std::optional<CutList> left_before = after_gathering(mesh, before, gathered_before);
  const std::optional<CutList> left_after = after_gathering(mesh, after, gathered_after);
  if (!left_before || !left_after) return false;
  // If parts have equal size, the remaining cuts in canonical form are equal exactly if the elements are.
  if (cuts_evenly(mesh, n, before) && cuts_evenly(mesh, n, after)) {
    return canonical(mesh, n, *left_before) == canonical(mesh, n, *left_after);
  }
  // If parts differ in size, equal remaining cuts are not enough: compares the elements that the ranks hold together.
  if (*left_before != *left_after) return false;
  if (mesh.group_size(dims_of(before) | dims_of(after)) > kMaxRanksGathered) return false;
  const CutList first_before = without_gathered_tail(before, gathered_before);
  const CutList first_after = without_gathered_tail(after, gathered_after);
  if (first_before == first_after) return true;
  for (const int64_t position : mesh.group(0, kept & (dims_of(first_before) | dims_of(first_after)))) {
    const auto held_before = held_together(mesh, n, first_before, dims_of(first_before) - kept, position);
    const auto held_after = held_together(mesh, n, first_after, dims_of(first_after) - kept, position);
    if (!have_same_indices(held_before, held_after)) return false;
  }
  return true;
}

// Returns the mesh dims that cut in both lists after the `common` first cuts and that a move need not span. All other
// mesh dims that cut after the first cuts are gathered; if ranks then hold the same elements before and after, the move
// may skip these mesh dims. Returns the empty set otherwise.
MeshDimSet skippable_dims(const Mesh& mesh, int64_t n, const CutList& before, const CutList& after, size_t common) {
  const MeshDimSet both = dims_of(std::span(before).subspan(common)) & dims_of(std::span(after).subspan(common));
  if (both.empty()) return {};
  const MeshDimSet prefix = dims_of(std::span(before).first(common));
  return are_equal_when_gathered(mesh, n, before, after, both | prefix) ? both : MeshDimSet();
}

// Returns true if some rule is neither chunks nor strided.
bool has_other_rules(const CutList& cuts) {
  return std::any_of(cuts.begin(), cuts.end(), [](const Cut& c) { return !c.rule.is_strided_or_chunks(); });
}

// Replaces rules by chunks or strided cuts that make the same parts, up to the first cut into unequal parts. So the
// cuts before such a cut have the same form as in a list without it.
CutList with_plain_rules(const Mesh& mesh, int64_t n, CutList cuts) {
  for (Cut& c : cuts) {
    const int64_t k = mesh.dim_size(c.mesh_dim);
    if (!c.rule.cuts_evenly(n, k)) break;
    const std::optional<int64_t> factor = c.rule.equal_split_factor(n, k);
    if (factor && !c.rule.is_strided_or_chunks()) c.rule = *factor;
    n /= k;
  }
  return cuts;
}

}  // namespace

std::vector<Cut> canonical(const Mesh& mesh, int64_t n, std::vector<Cut> cuts) {
  cuts = with_plain_rules(mesh, n, std::move(cuts));
  if (!cuts_evenly(mesh, n, cuts)) return cuts;
  bool changed = true;
  while (changed) {
    changed = false;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      const std::optional<CutRule> rule =
          cuts[i].rule.moved_after(cuts[i + 1].rule, mesh.dim_size(cuts[i + 1].mesh_dim));
      if (!rule) continue;
      cuts[i].rule = *rule;
      std::swap(cuts[i], cuts[i + 1]);
      changed = true;
    }
  }
  return cuts;
}

bool same_parts(const Layout& a, const Layout& b) {
  for (int t = 0; t < a.ndim(); ++t) {
    const CutList& cuts = a.cuts(t);
    const CutList& others = b.cuts(t);
    const int64_t n = a.shape()[t];
    if (cuts == others || canonical(a.mesh(), n, cuts) == canonical(a.mesh(), n, others)) continue;
    const MeshDimSet cutting = dims_of(cuts) | dims_of(others);
    const bool may_compare = has_other_rules(cuts) || has_other_rules(others);
    if (!may_compare || a.mesh().group_size(cutting) > kMaxRanksCompared) return false;
    for (const int64_t position : positions_along(a.mesh(), cutting.to_vector())) {
      if (part_at(a.mesh(), n, cuts, position) != part_at(a.mesh(), n, others, position)) return false;
    }
  }
  return true;
}

bool hold_same_elements(const Mesh& mesh, int64_t n, const CutList& before, const CutList& after, MeshDimSet kept) {
  return are_equal_when_gathered(mesh, n, canonical(mesh, n, before), canonical(mesh, n, after), kept);
}

// A move spans all mesh dims that cut after the common first cuts of the two lists, except skippable_dims().
MeshDimSet spanned_dims(const Mesh& mesh, int64_t n, const CutList& given_before, const CutList& given_after) {
  const bool has_others = has_other_rules(given_before) || has_other_rules(given_after);
  const CutList plain_before = has_others ? with_plain_rules(mesh, n, given_before) : CutList();
  const CutList plain_after = has_others ? with_plain_rules(mesh, n, given_after) : CutList();
  const CutList& before = has_others ? plain_before : given_before;
  const CutList& after = has_others ? plain_after : given_after;
  const auto common = static_cast<size_t>(
      std::mismatch(before.begin(), before.end(), after.begin(), after.end()).first - before.begin());
  const MeshDimSet dims = dims_of(std::span(before).subspan(common)) | dims_of(std::span(after).subspan(common));
  return dims - skippable_dims(mesh, n, before, after, common);
}

}  // namespace shardwright
