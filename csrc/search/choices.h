// Layouts that differ from a given one in what some mesh dims do.
#pragma once

#include <map>
#include <vector>

#include "layout/layout.h"

namespace shardwright {

// Returns the tensor dims that an end cuts, and the longest other one. Cutting one more of the others would only be the
// same under another name.
std::vector<int> tensor_dims_of(const Layout& src, const Layout& goal);

// The same cuts, and nothing pending.
Layout without_partials(const Layout& layout);

// First the layout itself, then those where few mesh dims differ, and at most kMaxLayouts. The layout must have no
// partials.
class Choices {
 public:
  Choices(const Layout& layout, const std::vector<int>& tensor_dims) : layout_(layout), tensor_dims_(tensor_dims) {}

  // Says that a mesh dim may also cut any of the tensor dims, or nothing.
  void may_cut(int mesh_dim);
  void may_be_replicated(int mesh_dim) { others_[mesh_dim].push_back(kReplicated); }

  std::vector<Layout> all() const;

 private:
  static constexpr int kReplicated = -1;
  static constexpr size_t kMaxLayouts = 64;

  bool leaves_rules_alone(const std::map<int, int>& chosen) const;
  Layout with(const std::map<int, int>& chosen) const;

  const Layout layout_;
  const std::vector<int>& tensor_dims_;
  std::map<int, std::vector<int>> others_;
};

}  // namespace shardwright
