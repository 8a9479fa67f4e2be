// _planner: meshes and layouts.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>

#include "bindings/arguments.h"
#include "bindings/views.h"
#include "cost/topology.h"
#include "exchange/nearest.h"
#include "layout/layout.h"
#include "layout/units.h"
#include "products/product_layouts.h"

namespace py = pybind11;

namespace shardwright {
namespace {

// Returns the meaning of strided shards (layout/layout.h). Throws UserError for other texts.
StridedMeaning parse_strided(const std::string& text) {
  if (text == "auto") return StridedMeaning::kAuto;
  if (text == "order") return StridedMeaning::kOrder;
  if (text == "literal") return StridedMeaning::kLiteral;
  throw UserError(concat("strided must be one of auto, order, literal, got '", text, "'"));
}

// Returns the hash of a topology; 0 for null. In Python, equality and hash of meshes and layouts include the topology,
// because Python caches plans by mesh and layout, and plans depend on the topology.
size_t hash_of(const Topology* topology) { return topology == nullptr ? 0 : std::hash<std::string>()(topology->name); }

}  // namespace

MeshDimSet mesh_dim_set(const std::vector<int64_t>& mesh_dims, const Mesh& mesh) {
  MeshDimSet set;
  for (const int64_t d : mesh_dims) {
    check_user(d >= 0 && d < mesh.ndim(), "each item of mesh_dims must be ", InRange{0, mesh.ndim() - 1},
               " on the mesh (", mesh, "), got ", d);
    set.insert(static_cast<int>(d));
  }
  return set;
}

void define_mesh(py::module_& m) {
  py::class_<Mesh, std::shared_ptr<Mesh>>(
      m, "Mesh", "A grid of ranks with named dims. Meshes are equal if names, sizes, ranks and topology are.")
      .def(py::init([](const Typed<std::vector<std::string>>& dim_names, const Typed<std::vector<int64_t>>& dim_sizes,
                       const Typed<std::optional<std::vector<int64_t>>>& ranks, std::shared_ptr<Topology> topology) {
             std::vector<int64_t> rank_numbers = ranks.is_none() ? std::vector<int64_t>{} : integers(ranks, "ranks");
             check_argument(ranks.is_none() || !rank_numbers.empty(), "ranks",
                            "a list of at least one rank, or None for 0, 1, 2, ...", "an empty list");
             return std::make_shared<Mesh>(texts(dim_names, "mesh dim names"), integers(dim_sizes, "mesh dim sizes"),
                                           std::move(rank_numbers), std::move(topology));
           }),
           py::arg("dim_names"), py::arg("dim_sizes"), py::arg("ranks") = py::none(), py::arg("topology") = nullptr)
      .def_property_readonly(
          "topology",
          [](const Mesh& mesh) -> Typed<std::optional<Topology>> {
            return py::cast(std::const_pointer_cast<Topology>(mesh.topology()));
          },
          "The topology for plans on this mesh, or None.")
      .def_property_readonly("dim_names", &Mesh::dim_names, "The names of the mesh dims.")
      .def_property_readonly(
          "shape", [](const Mesh& mesh) { return tuple_of(mesh.dim_sizes()); }, "The sizes of the mesh dims.")
      .def_property_readonly("size", &Mesh::size, "Number of ranks.")
      .def_property_readonly("ndim", &Mesh::ndim, "Number of mesh dims.")
      .def_property_readonly(
          "ranks", [](const Mesh& mesh) { return to_ints(mesh.ranks()); }, "The ranks in row-major order.")
      .def(
          "coordinate",
          [](const Mesh& mesh, const Typed<int64_t>& rank) -> std::optional<std::vector<int64_t>> {
            const auto position = mesh.position_of(rank_of(rank));
            if (!position) return std::nullopt;
            return mesh.coordinates(*position);
          },
          py::arg("rank"), "Returns a rank's coordinate along each mesh dim, or None if the rank is not on the mesh.")
      .def(
          "group_ranks",
          [](const Mesh& mesh, const Typed<int64_t>& rank, const Typed<std::vector<int64_t>>& mesh_dims) {
            const MeshDimSet dims = mesh_dim_set(integers(mesh_dims, "mesh_dims"), mesh);
            return to_ints(mesh.ranks_at(mesh.group(position_on(mesh, rank_of(rank)), dims)));
          },
          py::arg("rank"), py::arg("mesh_dims"),
          "Returns the ranks that differ from `rank` only in `mesh_dims` (indices), and `rank` itself, ascending. "
          "Raises ValueError if the rank or a mesh dim is not on the mesh.")
      .def(
          "__eq__", [](const Mesh& a, const Mesh& b) { return a == b && same_topology(a, b); }, py::is_operator())
      .def("__hash__",
           [](const Mesh& mesh) { return py::hash(py::str(mesh.to_string())) ^ hash_of(mesh.topology().get()); })
      .def(
          "has_same_ranks", [](const Mesh& a, const Mesh& b) { return a == b; }, py::arg("other"),
          "Returns True if names, sizes and ranks are equal. Topologies may differ.")
      .def("__repr__", [](const Mesh& mesh) { return concat("Mesh(", mesh.to_string(), ")"); });
}

namespace {

// Returns the first pending reduction that cannot be differentiated; nothing if there is none.
std::optional<Placement> find_undifferentiable(const Layout& layout) {
  for (const Placement& placement : layout.placements()) {
    const bool is_linear = placement.op == ReduceOp::kSum || placement.op == ReduceOp::kAvg;
    if (placement.is_partial() && !is_linear) return placement;
  }
  return std::nullopt;
}

}  // namespace

void define_gradient_layouts(py::module_& m) {
  m.def(
      "has_gradient", [](const Layout& layout) { return !find_undifferentiable(layout); }, py::arg("layout"),
      "Returns True if all pending reductions of a layout can be differentiated.");
  m.def(
      "gradient_layout",
      [](const Layout& layout, const std::string& argument) {
        const std::optional<Placement> placement = find_undifferentiable(layout);
        check_user(!placement, "placements of ", argument, " must be P(sum), P(avg), S or R if it requires grad, got ",
                   placement.value_or(Placement()));
        return std::make_shared<Layout>(without_sums(layout));
      },
      py::arg("layout"), py::arg("argument"),
      "Returns the layout of the gradient of a tensor: R instead of P. Raises ValueError that names `argument` if a "
      "pending reduction cannot be differentiated.");
}

namespace {

// The constructor of Layout in Python. Throws UserError for invalid arguments.
std::shared_ptr<Layout> make_layout(std::shared_ptr<Mesh> mesh, const Typed<std::vector<int64_t>>& shape,
                                    const Typed<std::vector<std::string>>& placements, const Typed<std::string>& dtype,
                                    const ShardOrder& shard_order, const Typed<std::string>& strided,
                                    const Typed<int64_t>& flattened) {
  std::vector<Placement> parsed;
  for (const std::string& placement : texts(placements, "placements")) parsed.push_back(Placement::parse(placement));
  return std::make_shared<Layout>(std::move(mesh), integers(shape, "shape"), DType::parse(text(dtype, "dtype")),
                                  std::move(parsed), shard_order, parse_strided(text(strided, "strided")),
                                  integer(flattened, "flattened"));
}

// True for every complex dtype. Includes complex32, whose kind is not DTypeKind::kComplex because it cannot be reduced.
bool is_complex(DType dtype) {
  return dtype == DType::kComplex32 || dtype == DType::kComplex64 || dtype == DType::kComplex128;
}

// True if a reduction is pending along some mesh dim.
bool has_pending(const Layout& layout) {
  const std::vector<Placement>& all = layout.placements();
  return std::any_of(all.begin(), all.end(), [](const Placement& placement) { return placement.is_partial(); });
}

using Pairs = std::vector<std::pair<int64_t, int64_t>>;

// Returns the (begin, end) pairs of lists of intervals.
template <typename Lists>
std::vector<Pairs> pairs_of(const Lists& lists) {
  std::vector<Pairs> all;
  for (const auto& list : lists) {
    Pairs& pairs = all.emplace_back();
    for (const Interval& interval : list) pairs.emplace_back(interval.begin, interval.end);
  }
  return all;
}

// Returns the dim and the intervals of nearest_cut.
std::pair<int, std::vector<Pairs>> nearest_cut_on(const Layout& src, const std::vector<int64_t>& ranks) {
  std::vector<Rank> typed_ranks;
  for (const int64_t rank : ranks) typed_ranks.push_back(Rank{rank});
  const NearestCut cut = nearest_cut(src, typed_ranks);
  return {cut.dim, pairs_of(cut.lists)};
}

using LayoutClass = py::class_<Layout, std::shared_ptr<Layout>>;

// Defines the methods of Layout about the parts of ranks.
void define_parts(LayoutClass& layout) {
  layout
      .def("check_blocks_are_whole", &check_blocks_are_whole, py::arg("dim"), py::arg("unit"),
           "Raises ValueError if a rank's part of `dim`, an index into `flattened_shape`, begins or ends within a "
           "block of `unit` elements.")
      .def_property_readonly("has_equal_parts", &Layout::has_equal_parts, "True if all ranks hold parts of one shape.")
      .def_property_readonly("has_pending", &has_pending, "True if a reduction is pending along some mesh dim.")
      .def("without_pending", &without_sums, "Returns this layout with R instead of pending reductions.")
      .def(
          "local_shape",
          [](const Layout& layout, const Typed<int64_t>& rank) {
            return tuple_of(layout.local_shape_of_rank(rank_of(rank)));
          },
          py::arg("rank"), "Returns the shape of a rank's local tensor; (0,) if the rank is not on the mesh.")
      .def(
          "region",
          [](const Layout& layout, const Typed<int64_t>& rank) {
            return pairs_of(layout.region(position_on(layout.mesh(), rank_of(rank))));
          },
          py::arg("rank"),
          "Returns, for each tensor dim, the [begin, end) intervals of global indices on the rank, in local order. "
          "Raises ValueError if the rank is not on the mesh.");
}

// Defines functions on layouts and dtypes.
void define_layout_functions(py::module_& m) {
  m.def(
      "nearest_cut", &nearest_cut_on, py::arg("src"), py::arg("ranks"),
      "Returns the sharding of one tensor dim over `ranks` for which the fewest elements leave their rank, as (tensor "
      "dim, [begin, end) intervals of each rank). Each rank gets at most ceil(n / number of ranks) of the n indices.");
  define_gradient_layouts(m);
  m.def(
      "is_floating", [](const std::string& dtype) { return DType::parse(dtype).kind() == DTypeKind::kFloat; },
      py::arg("dtype"), "Returns True for floating dtypes of 16 bits or more.");
  m.def(
      "is_complex", [](const std::string& dtype) { return is_complex(DType::parse(dtype)); }, py::arg("dtype"),
      "Returns True for complex dtypes.");
}

}  // namespace

void define_layout(py::module_& m) {
  LayoutClass layout(
      m, "Layout",
      "A global tensor's shape, dtype, and placements on a mesh.\n\nLayouts are equal if shape and dtype are equal, "
      "the meshes are equal, and the cuts are the same in the same order. Equal layouts share plans.");
  layout
      .def(py::init(&make_layout), py::arg("mesh"), py::arg("shape"), py::arg("placements"),
           py::arg("dtype") = "float32", py::arg("shard_order") = ShardOrder{}, py::arg("strided") = "auto",
           py::arg("flattened") = 1)
      .def_property_readonly(
          "mesh", [](const Layout& layout) { return std::const_pointer_cast<Mesh>(layout.mesh_ptr()); }, "The mesh.")
      .def_property_readonly(
          "shape", [](const Layout& layout) { return tuple_of(layout.tensor_shape()); }, "The global shape.")
      .def_property_readonly(
          "flattened", &Layout::flattened,
          "Number of leading tensor dims that placements and local tensors count as one; 1 if none are flattened.")
      .def_property_readonly(
          "flattened_shape", [](const Layout& layout) { return tuple_of(layout.shape()); },
          "The global shape with the flattened dims as one dim. Placements, local shapes and regions refer to it.")
      .def_property_readonly(
          "is_partition", &Layout::is_partition,
          "True if along each mesh dim every element is on one coordinate, in ascending order; see `Pieces`.")
      .def_property_readonly(
          "dtype", [](const Layout& layout) { return layout.dtype().name(); },
          "The name of the dtype, such as ``\"float32\"``.")
      .def_property_readonly(
          "placements",
          [](const Layout& layout) {
            TupleOf<py::str> texts(layout.placements().size());
            for (size_t d = 0; d < layout.placements().size(); ++d) {
              texts[d] = layout.placements()[d].to_string();
            }
            return texts;
          },
          "The placement of each mesh dim, as text. Strided shards that encode a shard order are shown as plain "
          "shards; see `shard_order`.")
      .def_property_readonly(
          "shard_order",
          [](const Layout& layout) {
            ShardOrder order;
            for (int t = 0; t < layout.ndim(); ++t) {
              for (const Cut& c : layout.cuts(t)) order[t].push_back(c.mesh_dim);
            }
            return order;
          },
          "For each sharded tensor dim, the mesh dims that shard it, in the order of the cuts. Mesh dims of size 1 are "
          "left out.")
      .def(
          "__eq__", [](const Layout& a, const Layout& b) { return a == b && same_topology(a.mesh(), b.mesh()); },
          py::is_operator())
      .def("__hash__", [](const Layout& layout) { return layout.hash() ^ hash_of(layout.mesh().topology().get()); })
      .def("__repr__", [](const Layout& layout) { return concat("Layout(", layout.to_string(), ")"); });
  define_parts(layout);
  define_layout_functions(m);
}

}  // namespace shardwright
