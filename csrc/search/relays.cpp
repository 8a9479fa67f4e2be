#include "search/relays.h"

#include <algorithm>
#include <string>
#include <utility>

#include "exchange/grid.h"
#include "support/ceil_divide.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Returns true if no other mesh dim cuts a tensor dim after one of these mesh dims.
bool cut_last(const Layout& layout, MeshDimSet mesh_dims) {
  for (const std::vector<Cut>& cuts : layout.cuts()) {
    bool is_last = false;
    for (const Cut& cut : cuts) {
      if (is_last && !mesh_dims.contains(cut.mesh_dim)) return false;
      is_last = is_last || mesh_dims.contains(cut.mesh_dim);
    }
  }
  return true;
}

// Returns the layout without these mesh dims, on the ranks with coordinate 0 there.
Layout without_dims(const Layout& layout, MeshDimSet mesh_dims) {
  const Mesh& mesh = layout.mesh();
  std::vector<std::string> names;
  std::vector<int64_t> sizes;
  std::vector<Placement> placements;
  std::vector<int> new_dims(mesh.ndim());  // by old mesh dim
  for (int d = 0; d < mesh.ndim(); ++d) {
    if (mesh_dims.contains(d)) continue;
    new_dims[d] = static_cast<int>(names.size());
    names.push_back(mesh.dim_names()[d]);
    sizes.push_back(mesh.dim_size(d));
    placements.push_back(layout.placements()[d]);
  }
  std::vector<int64_t> ranks;
  for (int64_t p = 0; p < mesh.size(); ++p) {
    bool is_first = true;
    for (const int d : mesh_dims.to_vector()) is_first = is_first && mesh.coordinate(p, d) == 0;
    if (is_first) ranks.push_back(to_int(mesh.rank_at(Position{p})));
  }
  ShardOrder order;
  for (int t = 0; t < layout.ndim(); ++t) {
    for (const Cut& cut : layout.cuts(t)) {
      if (!mesh_dims.contains(cut.mesh_dim)) order[t].push_back(new_dims[cut.mesh_dim]);
    }
  }
  return Layout(std::make_shared<Mesh>(std::move(names), std::move(sizes), ranks, mesh.topology()),
                layout.tensor_shape(), layout.dtype(), std::move(placements), order, StridedMeaning::kLiteral,
                layout.flattened());
}

// Returns the ascending list of disjoint intervals that are given in any order.
IntervalList union_of(const std::vector<Interval>& intervals) {
  IntervalList list;
  for (const Interval& interval : sorted_by_begin(intervals)) append(list, interval);
  return list;
}

// Stands for the tensor dim of the axis of replicas.
constexpr int kReplicas = -1;

// Divides the ranks of a layout into blocks, each of which gets a relay. An *axis* has all replicas, or all shards of
// one tensor dim, as its members. A block consists of a range of members of each axis.
class Blocks {
 public:
  // `ranks` is the maximum number of ranks of a block. If `ranks_per_node` is 0, blocks may span nodes.
  Blocks(const Layout& layout, int64_t ranks, int64_t ranks_per_node)
      : layout_(layout), grid_(layout), ranks_per_node_(ranks_per_node) {
    divide(kReplicas, ranks);
    for (int t = layout.ndim(); t-- > 0;) divide(t, ranks);
  }

  // Returns the layout on the relays; see relays_in_blocks() for nullopt.
  std::optional<Layout> relays() const {
    int64_t count = 1;
    bool is_divided = false;
    for (const Axis& axis : axes_) {
      count *= static_cast<int64_t>(axis.begins.size());
      is_divided = is_divided || axis.begins.size() < axis.members.size();
    }
    if (count < 2 || !is_divided) return std::nullopt;
    std::vector<std::string> names;
    std::vector<int64_t> sizes;
    std::vector<Placement> placements;
    for (const Axis& axis : axes_) {
      if (axis.begins.size() == 1) continue;
      const std::optional<Placement> placement = placement_on(axis);
      if (!placement) return std::nullopt;
      names.push_back(names.empty() ? std::string("relay") : concat("relay.", names.size()));
      sizes.push_back(static_cast<int64_t>(axis.begins.size()));
      placements.push_back(*placement);
    }
    const auto mesh =
        std::make_shared<Mesh>(std::move(names), std::move(sizes), first_ranks(count), layout_.mesh().topology());
    return Layout(mesh, layout_.tensor_shape(), layout_.dtype(), std::move(placements), {}, StridedMeaning::kLiteral,
                  layout_.flattened());
  }

 private:
  // An axis, divided into blocks of consecutive members.
  struct Axis {
    int tensor_dim = kReplicas;
    std::vector<int64_t> members;  // replicas, or shards with elements
    std::vector<size_t> begins;    // index of each block's first member
    size_t end_of(size_t block) const { return block + 1 < begins.size() ? begins[block + 1] : members.size(); }
  };

  // Makes an axis and divides its members into blocks of at most `ranks`, each on one node if nodes are known. Then
  // divides `ranks` by the size of the largest block: a block may combine that many members of the next axes.
  void divide(int tensor_dim, int64_t& ranks) {
    Axis axis{tensor_dim, {}, {}};
    const int64_t size = tensor_dim == kReplicas ? grid_.replicas() : std::ssize(grid_.lists(tensor_dim));
    for (int64_t member = 0; member < size; ++member) {
      if (tensor_dim == kReplicas || !grid_.lists(tensor_dim)[member].empty()) axis.members.push_back(member);
    }
    const std::vector<std::vector<int64_t>> nodes = nodes_of(axis, size);
    size_t largest_block = 1;
    for (size_t i = 0; i < axis.members.size(); ++i) {
      const size_t begin = axis.begins.empty() ? 0 : axis.begins.back();
      const bool is_full = static_cast<int64_t>(i - begin) == ranks;
      if (i == 0 || is_full || nodes[axis.members[i]] != nodes[axis.members[begin]]) {
        axis.begins.push_back(i);
      } else {
        largest_block = std::max(largest_block, i - begin + 1);
      }
    }
    ranks /= static_cast<int64_t>(largest_block);
    axes_.push_back(std::move(axis));
  }

  // Returns the nodes of each member's ranks, by position of the ranks. Returns empty lists if blocks may span nodes.
  std::vector<std::vector<int64_t>> nodes_of(const Axis& axis, int64_t size) const {
    std::vector<std::vector<int64_t>> nodes(size);
    if (ranks_per_node_ == 0) return nodes;
    for (int64_t p = 0; p < layout_.mesh().size(); ++p) {
      const Grid::PartReplica part_replica = grid_.part_replica_at(p);
      const int64_t member =
          axis.tensor_dim == kReplicas ? part_replica.replica : grid_.shards_of(part_replica.part)[axis.tensor_dim];
      nodes[member].push_back(to_int(layout_.mesh().rank_at(Position{p})) / ranks_per_node_);
    }
    return nodes;
  }

  // Returns the placement of the relays on an axis. On an axis of shards, a relay has the union of its block's shards.
  // Returns nullopt if these have too many runs.
  std::optional<Placement> placement_on(const Axis& axis) const {
    if (axis.tensor_dim == kReplicas) return Placement::replicate();
    size_t runs = 0;
    std::vector<std::vector<Interval>> lists;
    for (size_t block = 0; block < axis.begins.size(); ++block) {
      std::vector<Interval> all;
      for (size_t i = axis.begins[block]; i < axis.end_of(block); ++i) {
        const IntervalList& list = grid_.lists(axis.tensor_dim)[axis.members[i]];
        runs += list.size();
        if (runs > kMaxRelayRuns) return std::nullopt;
        all.insert(all.end(), list.begin(), list.end());
      }
      const IntervalList list = union_of(all);
      lists.emplace_back(list.begin(), list.end());
    }
    return Placement::cut(axis.tensor_dim, rule_of(lists));
  }

  // Returns the first rank of each block, the last axis fastest.
  std::vector<int64_t> first_ranks(int64_t count) const {
    std::vector<int64_t> ranks;
    std::vector<int64_t> shards(layout_.ndim());
    for (int64_t relay = 0; relay < count; ++relay) {
      int64_t replica = 0;
      int64_t rest = relay;
      for (size_t i = axes_.size(); i-- > 0;) {
        const Axis& axis = axes_[i];
        const auto blocks = static_cast<int64_t>(axis.begins.size());
        const int64_t member = axis.members[axis.begins[rest % blocks]];
        (axis.tensor_dim == kReplicas ? replica : shards[axis.tensor_dim]) = member;
        rest /= blocks;
      }
      ranks.push_back(to_int(grid_.rank_at(shards, replica)));
    }
    return ranks;
  }

  const Layout& layout_;
  Grid grid_;
  int64_t ranks_per_node_;
  std::vector<Axis> axes_;
};

}  // namespace

CutRule rule_of(const std::vector<std::vector<Interval>>& lists) {
  std::vector<int64_t> sizes;
  int64_t end = 0;
  for (const std::vector<Interval>& list : lists) {
    if (list.size() > 1 || (!list.empty() && list[0].begin != end)) return CutRule::pieces(lists);
    if (!list.empty()) end = list[0].end;
    sizes.push_back(list.empty() ? 0 : list[0].end - list[0].begin);
  }
  const auto count = static_cast<int64_t>(sizes.size());
  bool are_chunks = true;
  for (int64_t c = 0; c < count; ++c) are_chunks = are_chunks && sizes[c] == CutRule().length(end, count, c);
  return are_chunks ? CutRule() : CutRule::ragged(sizes);
}

int64_t ranks_with_elements(const Layout& layout) {
  const Grid grid(layout);
  int64_t count = grid.replicas();
  for (int t = 0; t < grid.ndim(); ++t) {
    const std::vector<IntervalList>& lists = grid.lists(t);
    count *= std::count_if(lists.begin(), lists.end(), [](const IntervalList& list) { return !list.empty(); });
  }
  return count;
}

std::optional<Layout> relays_in_blocks(const Layout& layout, int64_t ranks, int64_t ranks_per_node) {
  if (layout.num_elements() == 0 || ranks < 2) return std::nullopt;
  return Blocks(layout, ranks, ranks_per_node).relays();
}

std::vector<Layout> relays_of(const Layout& layout, int64_t wanted) {
  const Mesh& mesh = layout.mesh();
  std::vector<Layout> layouts;
  const int64_t ranks = ceil_divide(ranks_with_elements(layout), std::max<int64_t>(wanted, 1));
  if (std::optional<Layout> blocks = relays_in_blocks(layout, ranks)) layouts.push_back(std::move(*blocks));
  std::vector<MeshDimSet> dim_sets;
  MeshDimSet last;
  for (int d = mesh.ndim() - 1; d >= 0; --d) {
    if (mesh.dim_size(d) == 1) continue;
    last.insert(d);
    for (const MeshDimSet& dims : {MeshDimSet::single(d), last}) {
      const int64_t relays = mesh.size() / mesh.group_size(dims);
      const bool is_known = std::find(dim_sets.begin(), dim_sets.end(), dims) != dim_sets.end();
      if (relays > 1 && !is_known && cut_last(layout, dims)) dim_sets.push_back(dims);
    }
  }
  // Returns the ratio of the number of relays to `wanted`, or the inverse, whichever is larger.
  const auto distance = [&](MeshDimSet dims) {
    const int64_t relays = mesh.size() / mesh.group_size(dims);
    return std::max(relays, wanted) / std::min(relays, std::max<int64_t>(wanted, 1));
  };
  std::stable_sort(dim_sets.begin(), dim_sets.end(),
                   [&](MeshDimSet a, MeshDimSet b) { return distance(a) < distance(b); });
  for (const MeshDimSet& dims : dim_sets) {
    if (layouts.size() < kMaxRelayLayouts) layouts.push_back(without_dims(layout, dims));
  }
  return layouts;
}

}  // namespace shardwright
