// Layouts that differ from a given layout in the tensor dims that some mesh dims cut.
#pragma once

#include <map>
#include <vector>

#include "layout/layout.h"

namespace shardwright {

// Returns the tensor dims that `src` or `goal` cuts, and the longest tensor dim that neither cuts. A cut of a shorter
// uncut tensor dim would give an equivalent layout.
std::vector<int> tensor_dims_to_cut(const Layout& src, const Layout& goal);

// Returns the layout with the same cuts and no partials.
Layout without_partials(const Layout& layout);

// A layout without partials, and the layouts that differ from it in some mesh dims.
//
// Example: 2 x 2 ranks with [S(0), R], tensor dims 0 and 1. After allow_cut(1), all() returns [S(0), R], [S(0), S(0)]
// and [S(0), S(1)].
class Choices {
 public:
  // `layout` must have no partials. `tensor_dims` must outlive the object.
  Choices(const Layout& layout, const std::vector<int>& tensor_dims) : layout_(layout), tensor_dims_(tensor_dims) {}

  // Allows a mesh dim to cut any of `tensor_dims` instead of what it cuts in the layout.
  void allow_cut(int mesh_dim);
  // Allows a mesh dim to cut nothing.
  void allow_replicated(int mesh_dim) { alternatives_[mesh_dim].push_back(kReplicated); }

  // Returns the layout itself, then layouts with one changed mesh dim, then with two, and so on; at most kMaxLayouts.
  // Leaves out layouts in which a cut that is not into chunks would divide other lists than in the layout.
  std::vector<Layout> all() const;

 private:
  static constexpr int kReplicated = -1;
  static constexpr size_t kMaxLayouts = 64;

  // Returns true if every unchanged cut that is not into chunks still divides the same lists. `chosen` has the new
  // tensor dim, or kReplicated, of each changed mesh dim.
  bool preserves_rules(const std::map<int, int>& chosen) const;
  // Returns the layout with these changes. New cuts are into chunks, after the unchanged cuts, in mesh order.
  Layout with(const std::map<int, int>& chosen) const;

  const Layout layout_;
  const std::vector<int>& tensor_dims_;
  // By mesh dim: the tensor dims that it may cut instead, or kReplicated.
  std::map<int, std::vector<int>> alternatives_;
};

// Returns layouts before a crossing (search/two_meshes.h) to which moves lead from `src`. Each mesh dim may stay as it
// is or cut one of `tensor_dims`. If the search is `for_time`, it may also cut nothing, which saves messages but no
// bytes. Replicas are sliced only if a reduction is pending; otherwise, a replica policy has the same effect.
std::vector<Layout> layouts_before_crossing(const Layout& src, const std::vector<int>& tensor_dims, bool for_time);
// Returns layouts after a crossing from which moves lead to `goal`. A replicated mesh dim may cut a tensor dim; a mesh
// dim that cuts may cut another tensor dim or, if the search is `for_time`, nothing.
std::vector<Layout> layouts_after_crossing(const Layout& goal, const std::vector<int>& tensor_dims, bool for_time);

}  // namespace shardwright
