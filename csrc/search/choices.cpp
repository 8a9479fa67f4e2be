#include "search/choices.h"

#include <utility>

namespace shardwright {
namespace {

using Cuts = std::vector<std::vector<Cut>>;

// Returns the layout with these cuts and no partials.
Layout with_cuts(const Layout& layout, Cuts cuts) {
  return layout.with(std::move(cuts), std::vector<Placement>(layout.mesh().ndim(), Placement::replicate()));
}

}  // namespace

Layout without_partials(const Layout& layout) { return with_cuts(layout, layout.cuts()); }

std::vector<int> tensor_dims_to_cut(const Layout& src, const Layout& goal) {
  std::vector<int> dims;
  int uncut_dim = -1;
  for (int t = 0; t < src.ndim(); ++t) {
    if (!src.cuts(t).empty() || !goal.cuts(t).empty()) {
      dims.push_back(t);
    } else if (uncut_dim < 0 || src.shape()[t] > src.shape()[uncut_dim]) {
      uncut_dim = t;
    }
  }
  if (uncut_dim >= 0) dims.push_back(uncut_dim);
  return dims;
}

void Choices::allow_cut(int mesh_dim) {
  for (const int t : tensor_dims_) alternatives_[mesh_dim].push_back(t);
}

// Breadth-first over the number of changed mesh dims. Changes mesh dims in ascending order, so no set of changes occurs
// twice.
std::vector<Layout> Choices::all() const {
  std::vector<std::map<int, int>> chosen{{}};
  for (size_t i = 0; i < chosen.size() && chosen.size() < kMaxLayouts; ++i) {
    for (const auto& [mesh_dim, tensor_dims] : alternatives_) {
      if (!chosen[i].empty() && chosen[i].rbegin()->first >= mesh_dim) continue;
      for (const int tensor_dim : tensor_dims) {
        chosen.push_back(chosen[i]);
        chosen.back()[mesh_dim] = tensor_dim;
      }
    }
  }
  if (chosen.size() > kMaxLayouts) chosen.resize(kMaxLayouts);
  std::vector<Layout> layouts;
  for (const std::map<int, int>& choice : chosen) {
    if (preserves_rules(choice)) layouts.push_back(with(choice));
  }
  return layouts;
}

// The rule of a cut that is not into chunks may be wrong for another list, so the cuts before it must not change.
bool Choices::preserves_rules(const std::map<int, int>& chosen) const {
  for (const std::vector<Cut>& list : layout_.cuts()) {
    bool is_changed = false;
    for (const Cut& cut : list) {
      const bool cuts_elsewhere = chosen.contains(cut.mesh_dim);
      if (is_changed && !cuts_elsewhere && !cut.rule.is_chunks()) return false;
      is_changed = is_changed || cuts_elsewhere;
    }
  }
  return true;
}

Layout Choices::with(const std::map<int, int>& chosen) const {
  Cuts cuts = layout_.cuts();
  for (std::vector<Cut>& list : cuts) {
    std::erase_if(list, [&](const Cut& cut) { return chosen.contains(cut.mesh_dim); });
  }
  for (const auto& [mesh_dim, tensor_dim] : chosen) {
    if (tensor_dim != kReplicated) cuts[tensor_dim].push_back({mesh_dim, 1});
  }
  return with_cuts(layout_, std::move(cuts));
}

std::vector<Layout> layouts_before_crossing(const Layout& src, const std::vector<int>& tensor_dims, bool for_time) {
  const MeshDimSet to_reduce = src.partial_dims();
  Choices choices(without_partials(src), tensor_dims);
  for (const int d : to_reduce.to_vector()) choices.allow_cut(d);
  for (const int d : src.cut_dims().to_vector()) {
    if (for_time) choices.allow_replicated(d);
    choices.allow_cut(d);
  }
  for (const int d : src.replicated_dims().to_vector()) {
    if (!to_reduce.empty()) choices.allow_cut(d);
  }
  return choices.all();
}

std::vector<Layout> layouts_after_crossing(const Layout& goal, const std::vector<int>& tensor_dims, bool for_time) {
  Choices choices(goal, tensor_dims);
  for (const int d : goal.replicated_dims().to_vector()) choices.allow_cut(d);
  for (const int d : goal.cut_dims().to_vector()) {
    if (for_time) choices.allow_replicated(d);
    choices.allow_cut(d);
  }
  return choices.all();
}

}  // namespace shardwright
