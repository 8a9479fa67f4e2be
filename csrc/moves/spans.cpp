#include "moves/spans.h"

#include <algorithm>
#include <optional>

#include "layout/positions.h"

namespace shardwright {
namespace {

using CutList = std::vector<Cut>;

// Maximum number of ranks whose parts are compared one by one.
constexpr int64_t kMaxCompared = int64_t{1} << 16;

// Maximum number of combinations of coordinates for which uneven regions are compared.
constexpr int64_t kMaxRegionsCompared = 4096;

// Returns the cuts that remain once the mesh dims `gathered` are gathered. A gathered cut is moved behind each later
// cut, whose rule must have a form for that (CutRule::with_gathered), and then dropped. Returns nothing if a rule has
// no such form.
std::optional<CutList> without(const Mesh& mesh, CutList cuts, MeshDimSet gathered) {
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

// Returns the disjoint parts of the ranks that differ from `position` only in gathered mesh dims: what they hold
// together.
std::vector<IntervalList> held_together(const Mesh& mesh, int64_t n, const CutList& cuts, MeshDimSet gathered,
                                        int64_t position) {
  std::vector<IntervalList> parts{{{0, n}}};
  for (const Cut& c : cuts) {
    std::vector<IntervalList> finer;
    for (const IntervalList& part : parts) {
      const int64_t k = mesh.dim_size(c.mesh_dim);
      const bool all = gathered.contains(c.mesh_dim);
      const int64_t own = mesh.coordinate(position, c.mesh_dim);
      for (int64_t i = all ? 0 : own; i < (all ? k : own + 1); ++i) finer.push_back(c.rule.part(part, k, i));
    }
    parts = std::move(finer);
  }
  return parts;
}

// Returns the union of disjoint lists, ascending.
IntervalList united(const std::vector<IntervalList>& parts) {
  std::vector<Interval> all;
  for (const IntervalList& part : parts) all.insert(all.end(), part.begin(), part.end());
  IntervalList merged;
  for (const Interval& interval : sorted_by_begin(std::move(all))) append(merged, interval);
  return merged;
}

// Returns true if two collections of disjoint lists have the same indices.
bool have_same_indices(const std::vector<IntervalList>& a, const std::vector<IntervalList>& b) {
  const auto repeats = [](const IntervalList& list) { return list.has_repeats(); };
  if (std::none_of(a.begin(), a.end(), repeats) && std::none_of(b.begin(), b.end(), repeats)) {
    return united(a) == united(b);
  }
  int64_t of_a = 0;
  int64_t of_b = 0;
  int64_t shared = 0;
  for (const IntervalList& list : a) of_a += length(list);
  for (const IntervalList& list : b) of_b += length(list);
  if (of_a != of_b) return false;
  for (const IntervalList& list_of_a : a) {
    for (const IntervalList& list_of_b : b) shared += intersection_length(list_of_a, list_of_b);
  }
  return shared == of_a;
}

// Drops trailing cuts that are gathered and partition: their parts together are the list that they cut.
CutList without_last(CutList cuts, MeshDimSet gathered) {
  while (!cuts.empty() && gathered.contains(cuts.back().mesh_dim) && cuts.back().rule.is_partition()) cuts.pop_back();
  return cuts;
}

// Returns true if the ranks that agree on `kept` together hold the same elements before and after. To compare them, all
// other mesh dims are gathered. A result of false may be wrong.
bool are_equal_when_gathered(const Mesh& mesh, int64_t n, const CutList& before, const CutList& after,
                             MeshDimSet kept) {
  const MeshDimSet gathered_before = dims_of(before) - kept;
  const MeshDimSet gathered_after = dims_of(after) - kept;
  const std::optional<CutList> left_before = without(mesh, before, gathered_before);
  const std::optional<CutList> left_after = without(mesh, after, gathered_after);
  if (!left_before || !left_after) return false;
  // If parts have equal size, `without` and `canonical` describe exactly what is held.
  if (cuts_evenly(mesh, n, before) && cuts_evenly(mesh, n, after)) {
    return canonical(mesh, n, *left_before) == canonical(mesh, n, *left_after);
  }
  if (*left_before != *left_after) return false;
  if (mesh.group_size(dims_of(before) | dims_of(after)) > kMaxRegionsCompared) return false;
  const CutList first_before = without_last(before, gathered_before);
  const CutList first_after = without_last(after, gathered_after);
  if (first_before == first_after) return true;
  for (const int64_t position : mesh.group(0, kept & (dims_of(first_before) | dims_of(first_after)))) {
    const auto held_before = held_together(mesh, n, first_before, dims_of(first_before) - kept, position);
    const auto held_after = held_together(mesh, n, first_after, dims_of(first_after) - kept, position);
    if (!have_same_indices(held_before, held_after)) return false;
  }
  return true;
}

// Returns the mesh dims that are in both lists after their first `common` cuts if a move need not span them, else none.
// Gathers all mesh dims except these and those of the first cuts. If ranks then hold the same elements before and
// after, the move need not span them.
MeshDimSet carried_along(const Mesh& mesh, int64_t n, const CutList& before, const CutList& after, size_t common) {
  const MeshDimSet both = dims_of(std::span(before).subspan(common)) & dims_of(std::span(after).subspan(common));
  if (both.empty()) return {};
  const MeshDimSet prefix = dims_of(std::span(before).first(common));
  return are_equal_when_gathered(mesh, n, before, after, both | prefix) ? both : MeshDimSet();
}

// Returns true if some rule is neither chunks nor strided.
bool has_other_rules(const CutList& cuts) {
  return std::any_of(cuts.begin(), cuts.end(), [](const Cut& c) { return !c.rule.is_strided_or_chunks(); });
}

// Replaces rules by chunks or strided cuts that make the same parts, up to the first cut into unequal parts. So a list
// has one form whether or not such a cut follows.
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
    if (!may_compare || a.mesh().group_size(cutting) > kMaxCompared) return false;
    for (const int64_t position : positions_along(a.mesh(), cutting.to_vector())) {
      if (part_at(a.mesh(), n, cuts, position) != part_at(a.mesh(), n, others, position)) return false;
    }
  }
  return true;
}

bool hold_same_elements(const Mesh& mesh, int64_t n, const CutList& before, const CutList& after, MeshDimSet kept) {
  return are_equal_when_gathered(mesh, n, canonical(mesh, n, before), canonical(mesh, n, after), kept);
}

// All mesh dims after the common beginning of the two lists, except those that carried_along() returns.
MeshDimSet spanned_dims(const Mesh& mesh, int64_t n, const CutList& given_before, const CutList& given_after) {
  const bool has_others = has_other_rules(given_before) || has_other_rules(given_after);
  const CutList plain_before = has_others ? with_plain_rules(mesh, n, given_before) : CutList();
  const CutList plain_after = has_others ? with_plain_rules(mesh, n, given_after) : CutList();
  const CutList& before = has_others ? plain_before : given_before;
  const CutList& after = has_others ? plain_after : given_after;
  const auto common = static_cast<size_t>(
      std::mismatch(before.begin(), before.end(), after.begin(), after.end()).first - before.begin());
  const MeshDimSet dims = dims_of(std::span(before).subspan(common)) | dims_of(std::span(after).subspan(common));
  return dims - carried_along(mesh, n, before, after, common);
}

}  // namespace shardwright
