// _planner: views of layouts.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/views.h"
#include "planning/context.h"
#include "views/move_first.h"
#include "views/view.h"

namespace py = pybind11;

namespace shardwright {
namespace {

using LayoutPtr = std::shared_ptr<Layout>;

// The shape and the number of flattened dims of a view.
struct Sizes {
  std::vector<int64_t> shape;
  int flattened;
};

// Returns the sizes of a view. Infers a size of -1.
Sizes sizes_of(const Layout& layout, const Typed<std::vector<int64_t>>& shape, const Typed<int64_t>& flattened) {
  constexpr int64_t kMaxFlattened = 1 << 16;
  const int64_t count = integer(flattened, "flattened");
  check_argument(count >= 1 && count <= kMaxFlattened, "flattened", "in [1, number of dims in shape]", count);
  return {inferred_shape(layout, integers(shape, "shape")), static_cast<int>(count)};
}

// Returns the options for the move before a view.
PlanOptions options_between(const Layout& layout, const std::string& backend, const PlanningTables& tables) {
  PlanOptions options{Lowering::named(backend)};
  options.topology = topology_between(layout, layout, options.lowering, std::nullopt, tables);
  return options;
}

// Defines the methods of Layout that return layouts of views.
void define_views_of_layout(py::module_& m) {
  py::class_<Layout, std::shared_ptr<Layout>>(m.attr("Layout"))
      .def(
          "view",
          [](const Layout& layout, const Typed<std::vector<int64_t>>& shape, const Typed<int64_t>& flattened) {
            const Sizes sizes = sizes_of(layout, shape, flattened);
            auto view = view_of(layout, sizes.shape, sizes.flattened);
            if (const auto* none = std::get_if<NoView>(&view)) {
              const py::gil_scoped_release release;
              const PlanOptions options = options_between(layout, "nccl", {});
              const MoveFirst first = cheapest_move(layout, sizes.shape, sizes.flattened, *none, options);
              throw UserError(move_first_text(layout, sizes.shape, *none, first));
            }
            return std::make_shared<Layout>(std::get<Layout>(std::move(view)));
          },
          py::arg("shape"), py::arg("flattened") = 1,
          R"(Returns the layout of a reshaped tensor in which every rank keeps its elements in their order.

If a mesh dim shards a tensor dim that becomes several dims, the result's mesh has several dims in its place. Otherwise
the mesh is the same. Nothing moves.

Args:
    shape: as for ``torch.reshape``; one size may be -1.
    flattened: number of leading dims of the result that its placements and local tensors count as one.

Raises:
    ValueError: no layout of this shape has these parts. The message gives the reason, and the cheapest redistribute
        before the view, with its cost over NCCL on the mesh's topology, by default ``"64x8"``.)")
      .def(
          "permute",
          [](const Layout& layout, const Typed<std::vector<int64_t>>& dims) {
            return std::make_shared<Layout>(permuted(layout, integers(dims, "dims")));
          },
          py::arg("dims"),
          "Returns the layout of the tensor whose dim i is dim ``dims[i]`` of this one. Local tensors are permuted "
          "equally.");
}

}  // namespace

void define_views(py::module_& m) {
  define_views_of_layout(m);
  m.def(
      "view_of",
      [](const Layout& layout, const Typed<std::vector<int64_t>>& shape,
         bool for_dtensor) -> std::variant<LayoutPtr, std::string> {
        const std::vector<int64_t> sizes = inferred_shape(layout, integers(shape, "shape"));
        auto view = for_dtensor ? dtensor_view_of(layout, sizes) : view_of(layout, sizes);
        if (auto* none = std::get_if<NoView>(&view)) return std::move(none->reason);
        return std::make_shared<Layout>(std::get<Layout>(std::move(view)));
      },
      py::arg("layout"), py::arg("shape"), py::arg("for_dtensor") = false,
      "Returns ``layout.view(shape)``, or the reason why there is no such layout. With `for_dtensor`, only layouts "
      "that DTensor can express.");
  m.def(
      "move_before_view",
      [](const Layout& layout, const Typed<std::vector<int64_t>>& shape, bool for_dtensor, const std::string& backend,
         const PlanningTables& tables) -> std::optional<std::tuple<PlanView, LayoutPtr, std::string>> {
        const std::vector<int64_t> sizes = inferred_shape(layout, integers(shape, "shape"));
        const auto view = for_dtensor ? dtensor_view_of(layout, sizes) : view_of(layout, sizes);
        const auto* none = std::get_if<NoView>(&view);
        if (none == nullptr) return std::nullopt;
        const py::gil_scoped_release release;
        const MoveFirst first = cheapest_move(layout, sizes, 1, *none, options_between(layout, backend, tables),
                                              for_dtensor ? ViewsFor::kDTensor : ViewsFor::kAnyone);
        return std::tuple(PlanView{first.plan}, std::make_shared<Layout>(first.view),
                          move_first_text(layout, sizes, *none, first));
      },
      py::arg("layout"), py::arg("shape"), py::arg("for_dtensor"), py::arg("backend"), py::arg("tables"),
      "Returns (cheapest redistribute before a view, layout of the view after the redistribute, message with the "
      "reason), or None if the view needs no redistribute.");
  m.def("is_known_to_dtensor", &is_known_to_dtensor, py::arg("layout"),
        "Returns True if DTensor's placements can express the layout.");
}

}  // namespace shardwright
