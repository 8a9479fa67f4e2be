#include "search/states.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "cost/cost.h"
#include "search/choices.h"

namespace shardwright {
namespace {

constexpr int kMaxDimsWithAllLists = 3;       // maximum number of mesh dims for which all lists of cuts are tried
constexpr int kMaxDimsWithInnermostCuts = 4;  // maximum number of mesh dims with which innermost cuts are tried
// Maximum number of lists of cuts of a tensor dim. Each pair of lists has an entry in a table (moves/list_pairs.h).
constexpr size_t kMaxLists = 512;
constexpr size_t kMaxStates = 20'000;  // maximum number of states
// Maximum number of pieces of a strided cut: packing more takes long. Lists without digits (exchange/digits.h) also
// take long to compare, so their limit is kMaxPiecesCompared pieces over all ranks.
constexpr int64_t kMaxPieces = 1024;
constexpr int64_t kMaxPiecesCompared = 256;

// Makes the states of one search: first lists of cuts for each tensor dim, then all combinations of lists in which
// every mesh dim cuts at most one tensor dim. An *end* is the source or the goal.
class States {
 public:
  States(const Layout& src, const Layout& goal, MeshDimSet free, MoveTable& table)
      : src_(src),
        goal_(goal),
        mesh_(src.mesh()),
        cut_lists_(table.lists()),
        tensor_dims_(tensor_dims_to_cut(src, goal)) {
    for (const int d : free.to_vector()) {
      if (d < mesh_.ndim() && mesh_.dim_size(d) > 1) mesh_dims_.push_back(d);
    }
  }

  // Returns the states in the order of the search.
  std::vector<MoveTable::State> all() {
    choose_even_dims();
    tries_all_lists_ = static_cast<int>(mesh_dims_.size()) <= kMaxDimsWithAllLists;
    for (const int t : tensor_dims_) {
      lists_.emplace_back();
      if (tries_all_lists_) {
        add_all_lists(t, {}, mesh_dims_);
      } else {
        add_lists_of_ends(t);
      }
      // The search takes the first of states with equal cost. This order prefers cuts of the first tensor dims, whose
      // parts are contiguous.
      std::stable_sort(lists_.back().begin(), lists_.back().end(), [&](int a, int b) {
        return cut_lists_.at(t, a).dims.count() > cut_lists_.at(t, b).dims.count();
      });
    }
    MoveTable::State uncut{std::vector<int>(src_.ndim()), {}, {}, 1};
    for (int t = 0; t < src_.ndim(); ++t) {
      uncut.lists[t] = cut_lists_.number_of(t, {});
      uncut.elements *= cut_lists_.at(t, uncut.lists[t]).length;
    }
    combine(uncut, 0);
    return std::move(states_);
  }

 private:
  // Chooses the tensor dims that states cut into equal parts only: all dims that source and goal cut into equal parts;
  // none if the sizes of these dims cannot be divided evenly among the ranks of all mesh dims.
  void choose_even_dims() {
    for (int t = 0; t < src_.ndim(); ++t) {
      is_even_.push_back(cut_lists_.at(t, cut_lists_.number_of(t, src_.cuts(t))).has_equal_parts &&
                         cut_lists_.at(t, cut_lists_.number_of(t, goal_.cuts(t))).has_equal_parts);
    }
    int64_t ranks_without_part = 1;
    for (const int d : mesh_dims_) ranks_without_part *= mesh_.dim_size(d);
    for (const int t : tensor_dims_) {
      if (is_even_[t]) ranks_without_part /= std::gcd(ranks_without_part, src_.shape()[t]);
    }
    if (ranks_without_part > 1) is_even_.assign(src_.ndim(), false);
  }

  // Adds a list of cuts for tensor dim t, unless it is excluded or makes the same parts as an earlier list. Returns
  // false if it was not added; then longer lists that begin with it need not be tried.
  bool add_list(int t, const std::vector<Cut>& cuts) {
    const int list = cut_lists_.number_of(t, cuts);
    if (!cut_lists_.at(t, list).digits) {
      const bool is_wanted = !is_even_[t] || (tries_all_lists_ && cut_lists_.at(t, list).has_equal_parts);
      if (!is_wanted || !has_few_pieces(src_.shape()[t], cuts)) return false;
    }
    std::vector<int>& lists = lists_.back();
    if (std::find(lists.begin(), lists.end(), list) != lists.end()) return false;
    lists.push_back(list);
    return true;
  }

  // Returns false if a list with a strided cut makes more than kMaxPiecesCompared pieces over all ranks.
  bool has_few_pieces(int64_t n, const std::vector<Cut>& cuts) const {
    int64_t pieces = 1;
    bool is_strided = false;
    for (const Cut& c : cuts) {
      const int64_t k = mesh_.dim_size(c.mesh_dim);
      is_strided = is_strided || !c.rule.makes_runs();
      pieces = saturating_product(pieces, saturating_product(c.rule.runs(n, k), k));
      if (is_strided && pieces > kMaxPiecesCompared) return false;
    }
    return true;
  }

  // Adds every list of cuts of a tensor dim that begins with `cuts` and continues with mesh dims in `unused`.
  void add_all_lists(int t, const std::vector<Cut>& cuts, const std::vector<int>& unused) {
    if (!add_list(t, cuts)) return;
    for (const int d : unused) {
      std::vector<int> rest;
      std::copy_if(unused.begin(), unused.end(), std::back_inserter(rest), [&](int other) { return other != d; });
      const auto extend = [&](const CutRule& rule) {
        std::vector<Cut> longer = cuts;
        longer.push_back({d, rule});
        add_all_lists(t, longer, rest);
      };
      for (const int64_t factor : is_even_[t] ? factors_after(cuts, d) : factors_of_ends(t, d)) extend(factor);
      for (const Layout* end : {&src_, &goal_}) {
        const std::vector<Cut>& of_end = end->cuts(t);
        const size_t at = cuts.size();
        if (at < of_end.size() && of_end[at].mesh_dim == d && next_rule_applies(cuts, of_end)) extend(of_end[at].rule);
      }
    }
  }

  // Returns true if an end begins with these cuts and its next cut is neither chunks nor strided. Only then may the
  // rule of that cut follow these cuts, because after other cuts it would divide other lists.
  static bool next_rule_applies(const std::vector<Cut>& cuts, const std::vector<Cut>& of_end) {
    return !of_end[cuts.size()].rule.is_strided_or_chunks() && std::equal(cuts.begin(), cuts.end(), of_end.begin());
  }

  // Returns the split factors that a cut by `mesh_dim` after `list` may have: products of the sizes of mesh dims that
  // are not in the list, because these may have been gathered or may cut later. For a=2, b=4 and the empty list, a cut
  // by a may have the factors 1 and 4.
  std::vector<int64_t> factors_after(const std::vector<Cut>& list, int mesh_dim) const {
    MeshDimSet others;
    for (int d = 0; d < mesh_.ndim(); ++d) {
      if (d != mesh_dim && mesh_.dim_size(d) > 1) others.insert(d);
    }
    for (const Cut& c : list) others.erase(c.mesh_dim);
    std::vector<int64_t> factors{1};
    for (const int d : others.to_vector()) {
      const size_t count = factors.size();
      for (size_t i = 0; i < count; ++i) factors.push_back(factors[i] * mesh_.dim_size(d));
    }
    std::sort(factors.begin(), factors.end());
    factors.erase(std::unique(factors.begin(), factors.end()), factors.end());
    factors.erase(std::upper_bound(factors.begin(), factors.end(), kMaxPieces), factors.end());
    return factors;
  }

  // Returns 1 and the split factors that the mesh dim's cuts in source and goal have once any subset of the earlier
  // cuts is gathered. Used for tensor dims that may have unequal parts.
  std::vector<int64_t> factors_of_ends(int t, int mesh_dim) const {
    std::set<int64_t> all{1};
    for (const Layout* end : {&src_, &goal_}) {
      std::vector<int64_t> factors{1};
      for (const Cut& c : end->cuts(t)) {
        if (!c.rule.is_strided_or_chunks()) {
          factors = {1};
          continue;
        }
        if (c.mesh_dim == mesh_dim) {
          for (const int64_t factor : factors) all.insert(factor * c.rule.split_factor());
        }
        const size_t count = factors.size();
        for (size_t i = 0; i < count; ++i) factors.push_back(factors[i] * mesh_.dim_size(c.mesh_dim));
      }
    }
    return {all.begin(), all.end()};
  }

  // The role of a mesh dim in the cuts of a tensor dim.
  enum class Role { kNone, kAsSource, kAsGoal, kInnermost };

  // Adds the lists of a tensor dim that are derived from the cuts of source and goal.
  void add_lists_of_ends(int t) {
    std::vector<std::vector<Role>> choices(mesh_.ndim(), {Role::kNone});
    for (const int d : mesh_dims_) {
      if (cuts_by(src_, t, d)) choices[d].push_back(Role::kAsSource);
      if (cuts_by(goal_, t, d)) choices[d].push_back(Role::kAsGoal);
      if (static_cast<int>(mesh_dims_.size()) <= kMaxDimsWithInnermostCuts) choices[d].push_back(Role::kInnermost);
    }
    std::vector<Role> roles(mesh_.ndim(), Role::kNone);
    choose_roles(t, choices, roles, 0);
  }

  // Returns true if a mesh dim cuts this tensor dim.
  static bool cuts_by(const Layout& layout, int t, int mesh_dim) {
    const std::vector<Cut>& cuts = layout.cuts(t);
    return std::any_of(cuts.begin(), cuts.end(), [&](const Cut& c) { return c.mesh_dim == mesh_dim; });
  }

  // Adds a list of cuts for each choice of roles for the mesh dims from `mesh_dim` on, up to kMaxLists.
  void choose_roles(int t, const std::vector<std::vector<Role>>& choices, std::vector<Role>& roles, size_t mesh_dim) {
    if (cut_lists_.size(t) >= kMaxLists) return;
    if (mesh_dim == choices.size()) return add_lists_by_roles(t, roles);
    for (const Role role : choices[mesh_dim]) {
      roles[mesh_dim] = role;
      choose_roles(t, choices, roles, mesh_dim + 1);
    }
  }

  // Adds the lists in which every mesh dim has its role: the source's cuts, the goal's cuts (in both orders), then the
  // innermost cuts.
  void add_lists_by_roles(int t, const std::vector<Role>& roles) {
    const auto has = [&](Role role) { return std::find(roles.begin(), roles.end(), role) != roles.end(); };
    const bool order_matters = has(Role::kAsSource) && has(Role::kAsGoal);
    for (const bool source_first : {true, false}) {
      if (!source_first && !order_matters) return;
      std::vector<Cut> cuts;
      bool fits = !source_first || append(cuts, src_, t, roles, Role::kAsSource);
      fits = fits && append(cuts, goal_, t, roles, Role::kAsGoal);
      fits = fits && (source_first || append(cuts, src_, t, roles, Role::kAsSource));
      if (!fits) continue;
      for (int d = 0; d < mesh_.ndim(); ++d) {
        if (roles[d] == Role::kInnermost) cuts.push_back({d, 1});
      }
      add_list(t, cuts);
    }
  }

  // Appends the cuts of one end whose mesh dims have this role, in that end's order. Split factors make up for earlier
  // cuts that are missing: of S(0) over a, then b, the cut by b alone is SS(0,|a|). Returns false if another rule would
  // cut different parts than at that end.
  bool append(std::vector<Cut>& cuts, const Layout& end, int t, const std::vector<Role>& roles, Role role) const {
    int64_t factor = 1;
    for (const Cut& c : end.cuts(t)) {
      const bool is_plain = c.rule.is_strided_or_chunks();
      if (roles[c.mesh_dim] != role) {
        factor = is_plain ? factor * mesh_.dim_size(c.mesh_dim) : 1;
      } else if (is_plain) {
        cuts.push_back({c.mesh_dim, c.rule.split_factor() * factor});
      } else {
        if (cuts.size() >= end.cuts(t).size() || !(end.cuts(t)[cuts.size()] == c) ||
            !next_rule_applies(cuts, end.cuts(t)))
          return false;
        cuts.push_back(c);
      }
    }
    return true;
  }

  // Adds every combination of lists that share no mesh dim, for the chosen tensor dims from `at` on.
  void combine(const MoveTable::State& state, size_t at) {
    if (states_.size() >= kMaxStates) return;
    if (at == tensor_dims_.size()) return states_.push_back(state);
    const int t = tensor_dims_[at];
    for (const int list : lists_[at]) {
      const MeshDimSet dims = cut_lists_.at(t, list).dims;
      if (!(dims & state.cut_dims).empty()) continue;
      MoveTable::State next = state;
      if (next.elements > 0) next.elements = next.elements / src_.shape()[t] * cut_lists_.at(t, list).length;
      next.lists[t] = list;
      next.cut_dims = next.cut_dims | dims;
      combine(next, at + 1);
    }
  }

  const Layout& src_;
  const Layout& goal_;
  const Mesh& mesh_;
  CutLists& cut_lists_;
  std::vector<int> mesh_dims_;          // the mesh dims that may cut
  const std::vector<int> tensor_dims_;  // the tensor dims that states may cut
  bool tries_all_lists_ = true;
  std::vector<bool> is_even_;            // by tensor dim: states cut it into equal parts only
  std::vector<std::vector<int>> lists_;  // the table's numbers of the lists, by chosen tensor dim
  std::vector<MoveTable::State> states_;
};

}  // namespace

std::vector<MoveTable::State> states_between(const Layout& src, const Layout& goal, MeshDimSet free, MoveTable& table) {
  return States(src, goal, free, table).all();
}

}  // namespace shardwright
