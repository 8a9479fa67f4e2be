// _planner: the torch-free half for Python. The command line lives on this alone.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>

#include "layout/error.h"
#include "planner/cost.h"
#include "planner/plan.h"
#include "planner/serialize.h"
#include "program/program.h"
#include "simulate/simulate.h"

namespace py = pybind11;

namespace shardwright {
namespace {

StridedMeaning parse_strided(const std::string& text) {
  if (text == "auto") return StridedMeaning::kAuto;
  if (text == "order") return StridedMeaning::kOrder;
  if (text == "literal") return StridedMeaning::kLiteral;
  throw UserError(concat("strided: '", text, "' is not known; allowed are auto, order, literal"));
}

int64_t position_of(const Layout& layout, int64_t rank) {
  const auto position = layout.mesh().position_of(rank);
  check_user(position.has_value(), "rank: ", rank, " is not on the mesh (", layout.mesh().to_string(), ")");
  return *position;
}

// A plan with what is worth computing once.
class InspectablePlan {
 public:
  explicit InspectablePlan(Plan plan) : plan_(std::move(plan)) {}

  const Plan& plan() const { return plan_; }
  const TrafficTotals& traffic() {
    if (!traffic_) traffic_ = totals(plan_);
    return *traffic_;
  }
  const Bound& bound() {
    if (!bound_) bound_ = lower_bound(plan_.src, plan_.dst);
    return *bound_;
  }
  int64_t peak_bytes() {
    if (!peak_bytes_) {
      peak_bytes_ = 0;
      for (const int64_t p : seen_positions(plan_.src.mesh())) {
        peak_bytes_ = std::max(*peak_bytes_, compile(plan_, p).peak_bytes());
      }
    }
    return *peak_bytes_;
  }

 private:
  Plan plan_;
  std::optional<TrafficTotals> traffic_;
  std::optional<Bound> bound_;
  std::optional<int64_t> peak_bytes_;
};

// A step as Python sees it.
struct StepView {
  Step step;
  Backend backend;
  TrafficTotals traffic;
};

MeshDimSet mesh_dim_set(const std::vector<int>& mesh_dims, const Mesh& mesh) {
  MeshDimSet set;
  for (const int d : mesh_dims) {
    check_user(d >= 0 && d < mesh.ndim(), "mesh_dims: ", d, " is not a dim of ", mesh.to_string());
    set.insert(d);
  }
  return set;
}

void define_mesh(py::module_& m) {
  py::class_<Mesh, std::shared_ptr<Mesh>>(m, "Mesh")
      .def(py::init<std::vector<std::string>, std::vector<int64_t>, std::vector<int64_t>>(), py::arg("dim_names"),
           py::arg("dim_sizes"), py::arg("ranks") = std::vector<int64_t>{})
      .def_property_readonly("dim_names", &Mesh::dim_names)
      .def_property_readonly("shape", [](const Mesh& mesh) { return py::tuple(py::cast(mesh.dim_sizes())); })
      .def_property_readonly("size", &Mesh::size)
      .def_property_readonly("ndim", &Mesh::ndim)
      .def_property_readonly("ranks",
                             [](const Mesh& mesh) {
                               std::vector<int64_t> ranks(mesh.size());
                               for (int64_t p = 0; p < mesh.size(); ++p) ranks[p] = mesh.rank_at(p);
                               return ranks;
                             })
      .def(
          "coordinate",
          [](const Mesh& mesh, int64_t rank) -> std::optional<std::vector<int64_t>> {
            const auto position = mesh.position_of(rank);
            if (!position) return std::nullopt;
            return mesh.coordinate(*position);
          },
          py::arg("rank"))
      .def(
          "group_ranks",
          [](const Mesh& mesh, int64_t rank, const std::vector<int>& mesh_dims) {
            const MeshDimSet dims = mesh_dim_set(mesh_dims, mesh);
            const auto position = mesh.position_of(rank);
            check_user(position.has_value(), "rank: ", rank, " is not on the mesh (", mesh.to_string(), ")");
            std::vector<int64_t> ranks;
            for (const int64_t p : mesh.group(*position, dims)) ranks.push_back(mesh.rank_at(p));
            return ranks;
          },
          py::arg("rank"), py::arg("mesh_dims"))
      .def(
          "__eq__", [](const Mesh& a, const Mesh& b) { return a == b; }, py::is_operator())
      .def("__hash__", [](const Mesh& mesh) { return py::hash(py::str(mesh.to_string())); })
      .def("__repr__", [](const Mesh& mesh) { return concat("Mesh(", mesh.to_string(), ")"); });
}

void define_layout(py::module_& m) {
  py::class_<Layout, std::shared_ptr<Layout>>(m, "Layout")
      .def(py::init([](std::shared_ptr<Mesh> mesh, std::vector<int64_t> shape,
                       const std::vector<std::string>& placements, const std::string& dtype,
                       const ShardOrder& shard_order, const std::string& strided) {
             std::vector<Placement> parsed;
             for (const std::string& text : placements) parsed.push_back(Placement::parse(text));
             return std::make_shared<Layout>(std::move(mesh), std::move(shape), DType::parse(dtype), std::move(parsed),
                                             shard_order, parse_strided(strided));
           }),
           py::arg("mesh"), py::arg("shape"), py::arg("placements"), py::arg("dtype") = "float32",
           py::arg("shard_order") = ShardOrder{}, py::arg("strided") = "auto")
      .def_property_readonly("mesh",
                             [](const Layout& layout) { return std::const_pointer_cast<Mesh>(layout.mesh_ptr()); })
      .def_property_readonly("shape", [](const Layout& layout) { return py::tuple(py::cast(layout.shape())); })
      .def_property_readonly("dtype", [](const Layout& layout) { return layout.dtype().name(); })
      .def_property_readonly("placements",
                             [](const Layout& layout) {
                               py::tuple texts(layout.placements().size());
                               for (size_t d = 0; d < layout.placements().size(); ++d) {
                                 texts[d] = layout.placements()[d].to_string();
                               }
                               return texts;
                             })
      .def_property_readonly("shard_order",
                             [](const Layout& layout) {
                               ShardOrder order;
                               for (int t = 0; t < layout.ndim(); ++t) {
                                 for (const Cut& c : layout.cuts(t)) order[t].push_back(c.mesh_dim);
                               }
                               return order;
                             })
      .def(
          "local_shape",
          [](const Layout& layout, int64_t rank) { return py::tuple(py::cast(layout.local_shape_of_rank(rank))); },
          py::arg("rank"))
      .def(
          "region",
          [](const Layout& layout, int64_t rank) {
            std::vector<std::vector<std::pair<int64_t, int64_t>>> out;
            for (const IntervalList& list : layout.region(position_of(layout, rank))) {
              out.emplace_back();
              for (const Interval& interval : list) out.back().emplace_back(interval.begin, interval.end);
            }
            return out;
          },
          py::arg("rank"))
      .def(
          "__eq__", [](const Layout& a, const Layout& b) { return a == b; }, py::is_operator())
      .def("__hash__", [](const Layout& layout) { return py::hash(py::str(layout.to_string())); })
      .def("__repr__", [](const Layout& layout) { return concat("Layout(", layout.to_string(), ")"); });
}

void define_plan(py::module_& m) {
  py::class_<StepView>(m, "Step")
      .def_property_readonly("op", [](const StepView& s) { return step_op_name(s.step.op); })
      .def_property_readonly("mesh_dims",
                             [](const StepView& s) { return py::tuple(py::cast(s.step.mesh_dims.to_vector())); })
      .def_property_readonly("before", [](const StepView& s) { return s.step.before; })
      .def_property_readonly("after", [](const StepView& s) { return s.step.after; })
      .def_property_readonly("ordered", [](const StepView& s) { return s.step.ordered; })
      .def_property_readonly("sharing", [](const StepView& s) { return sharing_name(s.step.sharing); })
      .def_property_readonly("wire_bytes_max", [](const StepView& s) { return s.traffic.received_bytes_max; })
      .def_property_readonly("wire_bytes_sum", [](const StepView& s) { return s.traffic.received_bytes_sum; })
      .def_property_readonly("send_bytes_max", [](const StepView& s) { return s.traffic.sent_bytes_max; })
      .def_property_readonly("messages_max", [](const StepView& s) { return s.traffic.messages_max; })
      .def("__repr__", [](const StepView& s) {
        return concat("Step(", step_op_name(s.step.op), " over ", s.step.before.mesh().names_of(s.step.mesh_dims), ": ",
                      s.step.before.placements_string(), " -> ", s.step.after.placements_string(), ")");
      });

  py::class_<InspectablePlan>(m, "Plan")
      .def_property_readonly("src", [](const InspectablePlan& p) { return p.plan().src; })
      .def_property_readonly("dst", [](const InspectablePlan& p) { return p.plan().dst; })
      .def_property_readonly("backend", [](const InspectablePlan& p) { return backend_name(p.plan().backend); })
      .def_property_readonly("objective", [](const InspectablePlan& p) { return objective_name(p.plan().objective); })
      .def_property_readonly("topology", [](const InspectablePlan& p) { return p.plan().topology.name; })
      .def_property_readonly("steps",
                             [](const InspectablePlan& p) {
                               std::vector<StepView> views;
                               for (const Step& step : p.plan().steps) {
                                 views.push_back({step, p.plan().backend, totals(step, p.plan().backend)});
                               }
                               return views;
                             })
      .def_property_readonly("wire_bytes_max", [](InspectablePlan& p) { return p.traffic().received_bytes_max; })
      .def_property_readonly("wire_bytes_sum", [](InspectablePlan& p) { return p.traffic().received_bytes_sum; })
      .def_property_readonly("wire_bytes_sum_is_exact", [](InspectablePlan& p) { return p.traffic().sum_is_exact; })
      .def_property_readonly("send_bytes_max", [](InspectablePlan& p) { return p.traffic().sent_bytes_max; })
      .def_property_readonly("messages_max", [](InspectablePlan& p) { return p.traffic().messages_max; })
      .def_property_readonly("bound_bytes_max", [](InspectablePlan& p) { return p.bound().bytes_max; })
      .def_property_readonly("bound_bytes_sum", [](InspectablePlan& p) { return p.bound().bytes_sum; })
      .def_property_readonly("peak_bytes", &InspectablePlan::peak_bytes)
      .def_property_readonly(
          "predicted_us",
          [](const InspectablePlan& p) { return static_cast<double>(predicted_picoseconds(p.plan())) / 1e6; })
      .def(
          "wire_bytes",
          [](const InspectablePlan& p, int64_t rank) {
            int64_t bytes = 0;
            for (const Step& step : p.plan().steps) {
              bytes += traffic_at(step, p.plan().backend, position_of(p.plan().src, rank)).received_bytes;
            }
            return bytes;
          },
          py::arg("rank"))
      .def(
          "rank_peak_bytes",
          [](const InspectablePlan& p, int64_t rank) {
            return compile(p.plan(), position_of(p.plan().src, rank)).peak_bytes();
          },
          py::arg("rank"))
      .def(
          "program",
          [](const InspectablePlan& p, int64_t rank) {
            return compile(p.plan(), position_of(p.plan().src, rank)).to_string();
          },
          py::arg("rank"))
      .def(
          "simulate", [](const InspectablePlan& p) { return simulate(p.plan()).received_bytes_sum; },
          py::call_guard<py::gil_scoped_release>())
      .def("to_bytes", [](const InspectablePlan& p) { return py::bytes(to_bytes(p.plan())); })
      .def_static(
          "from_bytes", [](const py::bytes& bytes) { return InspectablePlan(from_bytes(std::string(bytes))); },
          py::arg("data"))
      .def("to_json", [](InspectablePlan& p) { return to_json(p.plan(), p.peak_bytes()); })
      .def("__str__", [](const InspectablePlan& p) { return p.plan().to_string(); })
      .def("__repr__", [](const InspectablePlan& p) { return concat("Plan(", p.plan().to_string(), ")"); });

  m.def(
      "make_plan",
      [](const Layout& src, const Layout& dst, const std::string& backend, const std::string& objective,
         const std::optional<std::string>& topology, const std::vector<std::vector<int>>& groups,
         const std::optional<std::vector<Layout>>& through, bool ordered) {
        PlanOptions options{parse_backend(backend), parse_objective(objective), ordered};
        if (topology) options.topology = Topology::named(*topology);
        for (const std::vector<int>& mesh_dims : groups) options.groups.push_back(mesh_dim_set(mesh_dims, src.mesh()));
        if (!through) return InspectablePlan(make_plan(src, dst, options));
        std::vector<Layout> layouts{src};
        layouts.insert(layouts.end(), through->begin(), through->end());
        layouts.push_back(dst);
        return InspectablePlan(plan_through(layouts, options));
      },
      py::arg("src"), py::arg("dst"), py::arg("backend") = "nccl", py::arg("objective") = "time",
      py::arg("topology") = py::none(), py::arg("groups") = std::vector<std::vector<int>>{},
      py::arg("through") = py::none(), py::arg("ordered") = false);
}

}  // namespace
}  // namespace shardwright

PYBIND11_MODULE(_planner, m) {
  m.doc() = "Layouts, plans, programs and the simulator of shardwright, without torch.";
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const shardwright::UserError& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const shardwright::InvariantError& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
  });
  shardwright::define_mesh(m);
  shardwright::define_layout(m);
  shardwright::define_plan(m);
}
