#include "cases.h"

#include <algorithm>
#include <numeric>

#include "search/options.h"
#include "support/error.h"

namespace shardwright::fuzz {
namespace {

// Draws small numbers as often as large ones.
int64_t log_uniform(Input& in, int64_t high) {
  int bits = 0;
  while (bits < 62 && int64_t{1} << (bits + 1) <= high) ++bits;
  const int64_t top = int64_t{1} << in.between(0, bits);
  return in.one_in(2) ? top : std::min(high, in.between(top, 2 * top - 1));
}

// `first` is the lowest rank.
MeshPtr mesh(Input& in, const Size& size, int64_t first = 0) {
  std::vector<std::string> names;
  std::vector<int64_t> sizes;
  int64_t total = 1;
  const auto ndim = static_cast<int>(in.between(1, size.max_mesh_dims));
  for (int d = 0; d < ndim; ++d) {
    const int64_t most = std::min(size.max_dim_size, size.max_ranks / total);
    names.push_back(std::string(1, static_cast<char>('a' + d)));
    sizes.push_back(most <= 8 ? in.between(1, most) : log_uniform(in, most));
    total *= sizes.back();
  }
  std::vector<int64_t> ranks;
  if (first > 0 || (size.shuffles_ranks && in.one_in(4))) {
    ranks.resize(static_cast<size_t>(total));
    std::iota(ranks.begin(), ranks.end(), first > 0 ? first : in.between(0, 3));
  }
  if (!ranks.empty() && (first == 0 || in.one_in(2))) {
    for (size_t i = ranks.size(); i > 1; --i) std::swap(ranks[i - 1], ranks[in.below(i)]);
  }
  return std::make_shared<Mesh>(std::move(names), std::move(sizes), std::move(ranks));
}

std::vector<int64_t> shape(Input& in, const Size& size, const Mesh& mesh) {
  std::vector<int64_t> shape;
  int64_t total = 1;
  const auto ndim = in.between(0, 3);
  for (int64_t t = 0; t < ndim; ++t) {
    const int64_t most = size.max_elements / total;
    int64_t extent = 0;
    switch (in.between(0, 4)) {
      case 0:  // sizes that mesh dims divide
        extent = 1;
        for (int d = 0; d < mesh.ndim(); ++d) extent *= in.one_in(2) ? mesh.dim_size(d) : 1;
        extent *= in.between(1, 4);
        break;
      case 1:
        extent = in.between(0, 3);
        break;
      case 2:
        extent = in.one_of<int64_t>({5, 7, 11, 13, 31});
        break;
      default:
        extent = most < 32 ? in.between(1, most) : log_uniform(in, most);
    }
    shape.push_back(std::min(extent, most));
    total *= std::max<int64_t>(shape.back(), 1);
  }
  return shape;
}

Placement partial(Input& in) {
  const auto op = static_cast<ReduceOp>(in.between(0, static_cast<int64_t>(ReduceOp::kNorm)));
  return Placement::partial(op, op == ReduceOp::kNorm ? in.one_of<double>({1, 2, 3, 0.5, -1}) : 0);
}

// Both ends have the same reduction, because plans between different ones are always refused.
struct Tensor {
  MeshPtr mesh;
  std::vector<int64_t> shape;
  DType dtype;
  Placement pending;
  bool has_strided_cuts = true;
};

// Returns sizes that sum to n in most cases.
std::vector<int64_t> sizes(Input& in, int64_t n, int64_t count) {
  std::vector<int64_t> sizes;
  for (int64_t left = n; count > 0; --count) {
    sizes.push_back(count == 1 && !in.one_in(16) ? left : in.between(0, left));
    left -= sizes.back();
  }
  return sizes;
}

// Returns pieces in any order, some of them on several coordinates.
CutRule pieces(Input& in, int64_t n, int64_t k) {
  std::vector<std::vector<Interval>> lists(static_cast<size_t>(k));
  std::vector<Interval> cut;
  for (int64_t at = 0; at < n && cut.size() < 8;) {
    const int64_t end = cut.size() == 7 ? n : in.between(at + 1, n);
    cut.push_back({at, end});
    at = end;
  }
  for (size_t i = cut.size(); i > 1; --i) std::swap(cut[i - 1], cut[in.below(i)]);
  for (const Interval& one : cut) {
    const int64_t owner = in.between(0, k - 1);
    for (int64_t c = 0; c < k; ++c) {
      if (c == owner || in.one_in(4)) lists[static_cast<size_t>(c)].push_back(one);
    }
  }
  return CutRule::pieces(lists);
}

// Returns a rule that torch lacks, for the first cut of a tensor dim, or for one after equal parts.
CutRule rule(Input& in, int64_t n, int64_t k) {
  if (in.one_in(4) && n % 2 == 0) n /= 2;
  switch (in.between(0, 4)) {
    case 0:
      return CutRule::ragged(sizes(in, n, k));
    case 1:
      return CutRule::blocks(in.between(1, 5));
    case 2:
      return CutRule::cyclic(in.between(1, 5));
    case 3:
      return CutRule::owned(in.between(0, in.one_in(16) ? k : k - 1));
    default:
      return CutRule::packed(sizes(in, n, in.between(1, 4)));
  }
}

Layout layout(Input& in, const Tensor& tensor) {
  std::vector<Placement> placements;
  const auto ndim = static_cast<int64_t>(tensor.shape.size());
  for (int d = 0; d < tensor.mesh->ndim(); ++d) {
    const int64_t choice = in.between(0, 9);
    if (choice >= 8) {
      placements.push_back(choice == 9 && in.one_in(8) ? partial(in) : tensor.pending);
    } else if (ndim == 0 || choice <= 2) {
      placements.push_back(Placement::replicate());
    } else if (choice == 4 && tensor.has_strided_cuts) {
      const int64_t t = in.between(0, ndim - 1);
      const int64_t k = tensor.mesh->dim_size(d);
      const bool may_be_pieces = tensor.mesh->size() <= 64;  // rearrangements examine every pair of ranks
      const bool is_pieces = may_be_pieces && in.one_in(4);
      placements.push_back(
          Placement::cut(t, is_pieces ? pieces(in, tensor.shape[t], k) : rule(in, tensor.shape[t], k)));
    } else if (choice == 3 && tensor.has_strided_cuts) {
      placements.push_back(Placement::strided_shard(in.between(0, ndim - 1), in.between(1, 6)));
    } else {
      placements.push_back(Placement::shard(in.between(0, ndim - 1)));
    }
  }
  ShardOrder order;
  if (in.one_in(2)) {
    for (int64_t t = 0; t < ndim; ++t) {
      std::vector<int> cutting;
      for (int d = 0; d < tensor.mesh->ndim(); ++d) {
        if (placements[d].is_shard_like() && placements[d].dim == t) cutting.push_back(d);
      }
      for (size_t i = cutting.size(); i > 1; --i) std::swap(cutting[i - 1], cutting[in.below(i)]);
      if (!cutting.empty()) order[t] = cutting;
    }
  }
  const auto strided = static_cast<StridedMeaning>(in.one_in(8) ? in.between(0, 2) : 0);
  return Layout(tensor.mesh, tensor.shape, tensor.dtype, std::move(placements), order, strided);
}

Tensor tensor(Input& in, const Size& size) {
  MeshPtr on = mesh(in, size);
  std::vector<int64_t> extents = shape(in, size, *on);
  const bool sums = in.one_in(2);
  return {std::move(on), std::move(extents),
          DType::parse(in.one_in(4) ? in.one_of(DType::known_names()) : in.one_of<std::string>({"float32", "int64"})),
          sums ? Placement::partial(ReduceOp::kSum) : partial(in), size.has_strided_cuts};
}

// Returns the same tensor on another mesh, which may share no, some or all ranks.
Tensor elsewhere(Input& in, const Size& size, Tensor what) {
  what.mesh = mesh(in, size, in.one_in(2) ? in.between(0, what.mesh->size()) : 0);
  return what;
}

std::optional<Topology> topology(Input& in) {
  if (in.one_in(2)) return std::nullopt;
  Topology topology = Topology::named(in.one_of(Topology::names()));
  if (in.one_in(2)) topology.ranks_per_node = in.between(0, 9);
  if (in.one_in(4)) {
    for (int64_t* value : {&topology.step_ps, &topology.memory_ps_per_kib, &topology.inside.message_ps,
                           &topology.inside.ps_per_kib, &topology.between.message_ps, &topology.between.ps_per_kib}) {
      if (in.one_in(2)) *value = in.between(0, 3) * in.one_of<int64_t>({1, 1000, 1'000'000, 1'000'000'000});
    }
  }
  return topology;
}

PlanOptions options(Input& in, const Mesh& mesh) {
  PlanOptions options;
  options.lowering = in.between(0, 1) == 0 ? Lowering::kNccl : Lowering::kGloo;
  options.objective = static_cast<Objective>(in.between(0, 1));
  options.ordered = in.one_in(4);
  options.topology = topology(in);
  if (in.one_in(4)) {
    for (int64_t more = in.between(1, 6); more > 0; --more) options.groups.push_back(mesh_dims(in, mesh));
  }
  return options;
}

}  // namespace

MeshDimSet mesh_dims(Input& in, const Mesh& mesh) {
  return MeshDimSet::from_bits(static_cast<uint32_t>(in.between(1, (int64_t{1} << mesh.ndim()) - 1)));
}

Question question(Input& in, const Size& size) {
  const Tensor what = tensor(in, size);
  Layout src = layout(in, what);
  const bool has_two_meshes = size.has_two_meshes && in.one_in(3);
  Layout dst = layout(in, has_two_meshes ? elsewhere(in, size, what) : what);
  PlanOptions how = options(in, *what.mesh);
  if (has_two_meshes && !in.one_in(16)) how.groups.clear();  // groups are for one mesh, and refused on two
  return {std::move(src), std::move(dst), std::move(how)};
}

Layout layout_like(Input& in, const Layout& other) {
  Placement pending = Placement::partial(ReduceOp::kSum);
  for (const Placement& placement : other.placements()) {
    if (placement.is_partial()) pending = placement;
  }
  return layout(in, {other.mesh_ptr(), other.shape(), other.dtype(), pending, other.mesh().size() <= kSmall.max_ranks});
}

std::string Question::to_string() const {
  const bool has_two_meshes = !(src.mesh() == dst.mesh());
  std::string text =
      concat(src.to_string(), " -> ", has_two_meshes ? dst.to_string() : dst.placements_string(), ", ",
             options.lowering.name, ", least ", objective_name(options.objective), options.ordered ? ", ordered" : "");
  if (const auto& t = options.topology) {
    text += concat(", topology ", t->name, " {", t->ranks_per_node, ", ", t->step_ps, ", ", t->memory_ps_per_kib, ", {",
                   t->inside.message_ps, ", ", t->inside.ps_per_kib, "}, {", t->between.message_ps, ", ",
                   t->between.ps_per_kib, "}}");
  }
  for (const MeshDimSet group : options.groups) text += concat(", group ", src.mesh().names_of(group));
  if (!src.mesh().ranks_are_positions()) text += concat(", ranks ", join(src.mesh().ranks()));
  if (has_two_meshes) text += concat(", to ranks ", join(dst.mesh().ranks()));
  return text;
}

}  // namespace shardwright::fuzz
