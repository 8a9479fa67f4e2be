#include "views/find_cuts.h"

#include <algorithm>
#include <numeric>

#include "layout/positions.h"
#include "layout/product.h"
#include "support/error.h"
#include "views/match_rule.h"

namespace shardwright {
namespace {

constexpr size_t kMaxMeshDims = 6;  // maximum number of mesh dims that cut one dim: all their orders are tried

// Returns the number of elements of the dims from `begin` on.
int64_t elements_of(const std::vector<int64_t>& dims, size_t begin) {
  return std::accumulate(dims.begin() + static_cast<int64_t>(begin), dims.end(), int64_t{1}, std::multiplies<>());
}

// The inverse of product_of (layout/product.h): the rows that a list touches, and the columns that it has in each of
// them. Rows have `size` elements. `of` returns nullopt if the list has different columns in different rows.
class Rows {
 public:
  IntervalList rows, columns;

  // Reads the list row by row. Consecutive full rows are added at once.
  static std::optional<Rows> of(const IntervalList& list, int64_t size) {
    Rows all;
    for (Interval left : list) {
      while (left.begin < left.end) {
        const int64_t row = left.begin / size;
        const int64_t offset = left.begin % size;
        if (offset == 0 && left.end - left.begin >= size && row != all.row_) {
          const int64_t end = left.end / size;
          if (!all.close() || !all.add({row, end}, {{0, size}})) return std::nullopt;
          left.begin = end * size;
          continue;
        }
        if (row != all.row_ && !all.close()) return std::nullopt;
        all.row_ = row;
        const int64_t end = std::min(left.end, (row + 1) * size);
        append(all.in_row_, {offset, offset + end - left.begin});
        left.begin = end;
      }
    }
    return all.close() ? std::optional<Rows>(std::move(all)) : std::nullopt;
  }

 private:
  // Adds rows with these columns. Returns false if earlier rows have other columns.
  bool add(Interval row_range, const IntervalList& row_columns) {
    if (rows.empty()) columns = row_columns;
    append(rows, row_range);
    return columns == row_columns;
  }
  // Adds the current row, if there is one. There is no current row afterward. Returns false if earlier rows have other
  // columns.
  bool close() {
    if (row_ < 0) return true;
    const bool has_same_columns = add({row_, row_ + 1}, in_row_);
    row_ = -1;
    in_row_.clear();
    return has_same_columns;
  }

  int64_t row_ = -1;     // the current row; -1 if none
  IntervalList in_row_;  // the columns of the current row so far
};

using Parts = std::vector<IntervalList>;  // one per dim

// Factors `list`, indices into the flattened dims, into one part per dim. Returns nullopt if it is not a product of
// parts.
std::optional<Parts> parts_of(IntervalList list, const std::vector<int64_t>& dims) {
  Parts parts;
  for (size_t j = 0; j + 1 < dims.size(); ++j) {
    std::optional<Rows> rows = Rows::of(list, elements_of(dims, j + 1));
    if (!rows) return std::nullopt;
    parts.push_back(std::move(rows->rows));
    list = std::move(rows->columns);
  }
  parts.push_back(std::move(list));
  return parts;
}

// Returns the local positions in `list` of the indices that `list` and `part` share, in the order of `part`.
IntervalList positions_in(const IntervalList& list, const IntervalList& part) {
  IntervalList positions;
  for (const Piece& piece : intersect(list, part))
    append(positions, {piece.a_position, piece.a_position + piece.length});
  return positions;
}

// Returns the union of the lists, ascending, or nullopt if an index is in two of them.
std::optional<IntervalList> united(const std::vector<const IntervalList*>& lists) {
  std::vector<Interval> all;
  for (const IntervalList* list : lists) all.insert(all.end(), list->begin(), list->end());
  IntervalList out;
  int64_t end = 0;
  for (const Interval& interval : sorted_by_begin(all)) {
    if (interval.begin < end) return std::nullopt;
    append(out, interval);
    end = interval.end;
  }
  return out;
}

// The indices of one dim that are held at each combination of coordinates on some mesh dims.
struct DimHoldings {
  const Mesh& mesh;
  int64_t size;
  std::vector<int64_t> positions;   // one per combination
  std::vector<IntervalList> lists;  // indices held at each position

  // Returns cuts that divide the dim into `lists`, one cut for each mesh dim, in this order. Returns nullopt if there
  // are none. Each mesh dim divides every part that the previous cuts made (a parent) among its coordinates. One rule
  // must make all these divisions.
  std::optional<std::vector<Cut>> cuts_in(const std::vector<int>& order) const {
    // A part that the cuts so far make.
    struct Parent {
      IntervalList list;
      std::vector<size_t> members;  // indices into `positions` of the ranks whose lists are within the part
    };
    std::vector<Parent> parents(1);
    append(parents[0].list, {0, size});
    parents[0].members.resize(lists.size());
    std::iota(parents[0].members.begin(), parents[0].members.end(), size_t{0});
    std::vector<Cut> cuts;
    for (const int d : order) {
      std::vector<Parent> children;
      std::vector<Division> divisions;
      for (const Parent& parent : parents) {
        Division& division = divisions.emplace_back();
        division.n = length(parent.list);
        for (int64_t c = 0; c < mesh.dim_size(d); ++c) {
          Parent child;
          std::vector<const IntervalList*> held;
          for (const size_t member : parent.members) {
            if (mesh.coordinate(positions[member], d) != c) continue;
            child.members.push_back(member);
            held.push_back(&lists[member]);
          }
          if (held.size() == 1) {
            child.list = *held[0];
          } else if (auto all = united(held)) {
            child.list = std::move(*all);
          } else {
            return std::nullopt;
          }
          division.parts.push_back(positions_in(parent.list, child.list));
          if (length(division.parts.back()) != length(child.list)) return std::nullopt;
          children.push_back(std::move(child));
        }
      }
      const std::optional<CutRule> rule = matching_rule(divisions);
      if (!rule) return std::nullopt;
      cuts.push_back({d, *rule});
      parents = std::move(children);
    }
    return cuts;
  }
};

// Finds cuts of each dim, given the part of each dim that ranks hold at each combination of coordinates.
class Fit {
 public:
  Fit(const Holdings& holdings, const std::vector<int64_t>& dims, std::vector<std::optional<Parts>> parts)
      : held_(holdings), dims_(dims), parts_(std::move(parts)), dim_of_(holdings.mesh_dims.size(), kFree) {}

  // Returns the cuts, or the reason why there are none. If the parts of one dim differ along a mesh dim, the mesh dim
  // must cut that dim. If no parts differ, the mesh dim may cut any dim or none: tries all assignments.
  std::variant<std::vector<std::vector<Cut>>, NoFit> run() {
    NoFit conflicts;  // mesh dims along which the parts of several dims differ
    for (size_t x = 0; x < dim_of_.size(); ++x) {
      const std::vector<size_t> depending = dependent_dims(held_.mesh_dims[x]);
      const std::string& name = held_.mesh.dim_names()[static_cast<size_t>(held_.mesh_dims[x])];
      if (depending.size() > 1) {
        conflicts.reason = concat("mesh dim '", name, "' would have to cut both dim ", depending[0], " and dim ",
                                  depending[1], " of (", join(dims_), ")");
        conflicts.to_split.push_back(held_.mesh_dims[x]);
      }
      if (depending.size() == 1) dim_of_[x] = static_cast<int>(depending[0]);
      if (depending.empty() && is_replicated(held_.mesh_dims[x])) dim_of_[x] = kNothing;
    }
    if (!conflicts.to_split.empty()) return conflicts;
    std::vector<std::vector<Cut>> cuts;
    if (assign_from(0, cuts)) return cuts;
    // A mesh dim whose coordinates all hold the same elements may still need a cut, for the order of the elements.
    std::replace(dim_of_.begin(), dim_of_.end(), kNothing, kFree);
    if (assign_from(0, cuts)) return cuts;
    return NoFit{concat("no cuts of (", join(dims_), ") give each rank the elements that it holds"), {}};
  }

 private:
  static constexpr int kFree = -1;     // decides only which ranks hold nothing, so it may cut any dim
  static constexpr int kNothing = -2;  // all coordinates hold the same, so it cuts no dim

  // Calls visit(a, b) for every pair of combinations that differ only in this mesh dim, with their parts. Parts are
  // nullopt if the combination holds nothing.
  template <typename Visit>
  void for_each_neighbor_pair(int mesh_dim, const Visit& visit) const {
    const int64_t stride = held_.mesh.stride(mesh_dim);
    std::map<int64_t, size_t> index_of;
    for (size_t i = 0; i < held_.positions.size(); ++i) index_of[held_.positions[i]] = i;
    for (size_t i = 0; i < held_.positions.size(); ++i) {
      const int64_t first = held_.positions[i] - held_.mesh.coordinate(held_.positions[i], mesh_dim) * stride;
      for (int64_t other = first; other < held_.positions[i]; other += stride)
        visit(parts_[i], parts_[index_of[other]]);
    }
  }

  // Returns the dims whose parts differ between ranks that differ only in this mesh dim. Ranks without elements do not
  // count.
  std::vector<size_t> dependent_dims(int mesh_dim) const {
    std::vector<size_t> depending;
    for (size_t j = 0; j < dims_.size(); ++j) {
      bool differs = false;
      for_each_neighbor_pair(mesh_dim, [&](const std::optional<Parts>& a, const std::optional<Parts>& b) {
        differs = differs || (a && b && (*a)[j] != (*b)[j]);
      });
      if (differs) depending.push_back(j);
    }
    return depending;
  }

  // Returns true if ranks that differ only in this mesh dim hold the same elements.
  bool is_replicated(int mesh_dim) const {
    bool is_same = true;
    for_each_neighbor_pair(
        mesh_dim, [&](const std::optional<Parts>& a, const std::optional<Parts>& b) { is_same = is_same && a == b; });
    return is_same;
  }

  // Tries all assignments of the free mesh dims from x on. Returns true once cuts fit.
  bool assign_from(size_t x, std::vector<std::vector<Cut>>& cuts) {
    while (x < dim_of_.size() && dim_of_[x] != kFree) ++x;
    if (x == dim_of_.size()) return fit(cuts);
    std::vector<size_t> choices(dims_.size());
    std::iota(choices.begin(), choices.end(), size_t{0});
    // Dims of size 1 come first: a cut of such a dim shows directly which coordinate holds elements.
    std::stable_sort(choices.begin(), choices.end(),
                     [&](size_t a, size_t b) { return dims_[a] == 1 && dims_[b] != 1; });
    for (const size_t j : choices) {
      dim_of_[x] = static_cast<int>(j);
      if (assign_from(x + 1, cuts)) return true;
    }
    dim_of_[x] = kFree;
    return false;
  }

  // Cuts each dim by its assigned mesh dims, in any order. Returns false if no cuts give the held elements.
  bool fit(std::vector<std::vector<Cut>>& cuts) const {
    cuts.clear();
    for (size_t j = 0; j < dims_.size(); ++j) {
      std::vector<int> order;
      for (size_t x = 0; x < dim_of_.size(); ++x) {
        if (dim_of_[x] == static_cast<int>(j)) order.push_back(held_.mesh_dims[x]);
      }
      if (order.size() > kMaxMeshDims) return false;
      const DimHoldings dim_holdings = holdings_of_dim(j, order);
      std::optional<std::vector<Cut>> dim_cuts;
      do {
        dim_cuts = dim_holdings.cuts_in(order);
      } while (!dim_cuts && std::next_permutation(order.begin(), order.end()));
      if (!dim_cuts) return false;
      cuts.push_back(std::move(*dim_cuts));
    }
    return reproduce_held_parts(cuts);
  }

  // Returns the part of dim j at each combination of coordinates on these mesh dims.
  DimHoldings holdings_of_dim(size_t j, const std::vector<int>& mesh_dims) const {
    DimHoldings dim_holdings{held_.mesh, dims_[j], positions_along(held_.mesh, mesh_dims), {}};
    dim_holdings.lists.resize(dim_holdings.positions.size());
    if (mesh_dims.empty()) return dim_holdings;
    std::map<int64_t, size_t> index_of;
    for (size_t i = 0; i < dim_holdings.positions.size(); ++i) index_of[dim_holdings.positions[i]] = i;
    for (size_t i = 0; i < held_.positions.size(); ++i) {
      if (!parts_[i]) continue;
      int64_t position = 0;
      for (const int d : mesh_dims) position += held_.mesh.coordinate(held_.positions[i], d) * held_.mesh.stride(d);
      dim_holdings.lists[index_of[position]] = (*parts_[i])[j];
    }
    return dim_holdings;
  }

  // Returns true if the cuts give the rank at each position exactly the elements that it holds, in order.
  bool reproduce_held_parts(const std::vector<std::vector<Cut>>& cuts) const {
    for (size_t i = 0; i < held_.positions.size(); ++i) {
      bool holds = true;
      for (size_t j = 0; j < dims_.size(); ++j) {
        const IntervalList part = part_at(held_.mesh, dims_[j], cuts[j], held_.positions[i]);
        if (parts_[i] && part != (*parts_[i])[j]) return false;
        holds = holds && !part.empty();
      }
      if (!parts_[i] && holds) return false;
    }
    return true;
  }

  const Holdings& held_;
  const std::vector<int64_t>& dims_;
  std::vector<std::optional<Parts>> parts_;  // by combination; nullopt if empty
  std::vector<int> dim_of_;                  // the dim that each of held_.mesh_dims cuts, kFree or kNothing
};

// Returns the first intervals of a list as text: "0-2+6-8+...".
std::string shown(const IntervalList& list) {
  constexpr size_t kMaxShown = 4;
  std::vector<std::string> texts;
  for (size_t i = 0; i < std::min(list.size(), kMaxShown); ++i)
    texts.push_back(concat(list[i].begin, "-", list[i].end));
  return join(texts, "+") + (list.size() > kMaxShown ? "+..." : "");
}

}  // namespace

std::optional<Holdings> holdings_of(const Mesh& mesh, const std::vector<int64_t>& dims,
                                    const std::vector<std::vector<Cut>>& cuts) {
  MeshDimSet set;
  for (const std::vector<Cut>& list : cuts) set = set | dims_of(list);
  Holdings holdings{mesh, set.to_vector(), positions_along(mesh, set.to_vector()), {}};
  int64_t left = kMaxIntervalsCompared;
  for (const int64_t position : holdings.positions) {
    IntervalList list{{0, 1}};
    for (size_t t = 0; t < dims.size(); ++t) {
      const IntervalList part = part_at(mesh, dims[t], cuts[t], position);
      const bool is_whole = part.size() == 1 && part[0] == Interval{0, dims[t]};
      const auto runs = static_cast<int64_t>(part.size());
      if (!is_whole && runs > 0 && length(list) > kMaxIntervalsCompared / runs) return std::nullopt;
      std::optional<IntervalList> product = product_of(list, part, dims[t], kMaxIntervalsCompared);
      if (!product) return std::nullopt;
      list = *std::move(product);
    }
    left -= static_cast<int64_t>(list.size());
    if (left < 0) return std::nullopt;
    holdings.lists.push_back(std::move(list));
  }
  return holdings;
}

std::variant<std::vector<std::vector<Cut>>, NoFit> fitting_cuts(const Holdings& holdings,
                                                                const std::vector<int64_t>& dims) {
  if (dims.empty()) return NoFit{"a tensor without dims cannot be cut", {}};
  std::vector<std::optional<Parts>> parts;
  for (size_t i = 0; i < holdings.lists.size(); ++i) {
    if (holdings.lists[i].empty()) {
      parts.emplace_back();
      continue;
    }
    parts.push_back(parts_of(holdings.lists[i], dims));
    if (!parts.back()) {
      return NoFit{concat("rank ", holdings.mesh.rank_at(Position{holdings.positions[i]}), " holds the elements ",
                          shown(holdings.lists[i]), " of the ", elements_of(dims, 0), " that become (", join(dims),
                          "), which are not a product of parts of these dims"),
                   {}};
    }
  }
  return Fit(holdings, dims, std::move(parts)).run();
}

}  // namespace shardwright
