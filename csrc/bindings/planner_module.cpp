// _planner: the torch-free half for Python. The command line lives on this alone.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>

#include "bindings/arguments.h"
#include "bindings/views.h"
#include "cost/cost.h"
#include "moves/describe.h"
#include "moves/figures.h"
#include "moves/plan.h"
#include "moves/traffic.h"
#include "picture/picture.h"
#include "planning/fit.h"
#include "planning/json.h"
#include "planning/plan_cache.h"
#include "planning/serialize.h"
#include "program/program.h"
#include "search/make_plan.h"
#include "simulate/simulate.h"
#include "support/error.h"

namespace py = pybind11;

namespace shardwright {

PlanCache& plan_cache() {
  static PlanCache cache;
  return cache;
}

namespace {

StridedMeaning parse_strided(const std::string& text) {
  if (text == "auto") return StridedMeaning::kAuto;
  if (text == "order") return StridedMeaning::kOrder;
  if (text == "literal") return StridedMeaning::kLiteral;
  throw UserError(concat("strided: '", text, "' is not known; allowed are auto, order, literal"));
}

// A step as Python sees it.
struct StepView {
  Step step;
  Lowering lowering;
  TrafficTotals traffic;
  int64_t predicted_ps;
};

MeshDimSet mesh_dim_set(const std::vector<int64_t>& mesh_dims, const Mesh& mesh) {
  MeshDimSet set;
  for (const int64_t d : mesh_dims) {
    check_user(d >= 0 && d < mesh.ndim(), "mesh_dims: ", d, " is not a dim of ", mesh.to_string());
    set.insert(static_cast<int>(d));
  }
  return set;
}

void define_mesh(py::module_& m) {
  py::class_<Mesh, std::shared_ptr<Mesh>>(m, "Mesh")
      .def(py::init([](const py::object& dim_names, const py::object& dim_sizes, const py::object& ranks,
                       std::shared_ptr<Topology> topology) {
             std::vector<int64_t> given = ranks.is_none() ? std::vector<int64_t>{} : integers(ranks, "ranks");
             check_user(ranks.is_none() || !given.empty(), "ranks: got none; leave them out for 0, 1, 2, ...");
             return std::make_shared<Mesh>(texts(dim_names, "mesh: dim name"), integers(dim_sizes, "mesh: size"),
                                           std::move(given), std::move(topology));
           }),
           py::arg("dim_names"), py::arg("dim_sizes"), py::arg("ranks") = py::none(), py::arg("topology") = nullptr)
      .def_property_readonly("topology",
                             [](const Mesh& mesh) { return std::const_pointer_cast<Topology>(mesh.topology()); })
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
          [](const Mesh& mesh, const py::object& rank) -> std::optional<std::vector<int64_t>> {
            const auto position = mesh.position_of(integer(rank, "rank"));
            if (!position) return std::nullopt;
            return mesh.coordinate(*position);
          },
          py::arg("rank"))
      .def(
          "group_ranks",
          [](const Mesh& mesh, const py::object& given_rank, const py::object& mesh_dims) {
            const MeshDimSet dims = mesh_dim_set(integers(mesh_dims, "mesh_dims"), mesh);
            const int64_t rank = integer(given_rank, "rank");
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
      .def(py::init([](std::shared_ptr<Mesh> mesh, const py::object& shape, const py::object& placements,
                       const py::object& dtype, const ShardOrder& shard_order, const py::object& strided) {
             std::vector<Placement> parsed;
             for (const std::string& one : texts(placements, "placements")) parsed.push_back(Placement::parse(one));
             return std::make_shared<Layout>(std::move(mesh), integers(shape, "shape"),
                                             DType::parse(text(dtype, "dtype")), std::move(parsed), shard_order,
                                             parse_strided(text(strided, "strided")));
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
      .def_property_readonly("has_equal_parts", &Layout::has_equal_parts)
      .def(
          "local_shape",
          [](const Layout& layout, const py::object& rank) {
            return py::tuple(py::cast(layout.local_shape_of_rank(integer(rank, "rank"))));
          },
          py::arg("rank"))
      .def(
          "region",
          [](const Layout& layout, const py::object& given_rank) {
            const int64_t rank = integer(given_rank, "rank");
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
      .def("__hash__", [](const Layout& layout) { return layout.hash(); })
      .def("__repr__", [](const Layout& layout) { return concat("Layout(", layout.to_string(), ")"); });
}

PlanOptions options_of(const Layout& src, const Layout& dst, const py::object& backend, const py::object& objective,
                       const std::shared_ptr<Topology>& topology, const std::vector<std::vector<int64_t>>& groups,
                       const py::object& reduce) {
  PlanOptions options{Lowering::named(text(backend, "backend")), parse_objective(text(objective, "objective")),
                      is_ordered(text(reduce, "reduce"), src)};
  if (topology) {
    options.topology = *topology;
  } else {
    options.topology = topology_between(src, dst, options.backend, std::nullopt, {});
  }
  for (const std::vector<int64_t>& mesh_dims : groups) options.groups.push_back(mesh_dim_set(mesh_dims, src.mesh()));
  return options;
}

// A figure that may take long to work out the first time: other threads go on meanwhile.
template <typename Figure>
auto patiently(Figure figure) {
  return [figure](const PlanView& p) {
    const py::gil_scoped_release release;
    return figure(*p.certified);
  };
}

void define_plan(py::module_& m) {
  py::class_<StepView>(m, "Step")
      .def_property_readonly("op", [](const StepView& s) { return step_op_name(s.step.op); })
      .def_property_readonly("mesh_dims",
                             [](const StepView& s) { return py::tuple(py::cast(s.step.mesh_dims.to_vector())); })
      .def_property_readonly("before", [](const StepView& s) { return s.step.before; })
      .def_property_readonly("after", [](const StepView& s) { return s.step.after; })
      .def_property_readonly("ordered", [](const StepView& s) { return s.step.ordered; })
      .def_property_readonly("rounds", [](const StepView& s) { return s.step.rounds; })
      .def_property_readonly("predicted_us",
                             [](const StepView& s) { return static_cast<double>(s.predicted_ps) / 1e6; })
      .def_property_readonly("sharing", [](const StepView& s) { return sharing_name(s.step.sharing); })
      .def_property_readonly("wire_bytes_max", [](const StepView& s) { return s.traffic.received_bytes_max; })
      .def_property_readonly("wire_bytes_sum", [](const StepView& s) { return s.traffic.received_bytes_sum; })
      .def_property_readonly("send_bytes_max", [](const StepView& s) { return s.traffic.sent_bytes_max; })
      .def_property_readonly("messages_max", [](const StepView& s) { return s.traffic.messages_max; })
      .def("__repr__", [](const StepView& s) {
        return concat("Step(", step_op_name(s.step.op), " over ", s.step.before.mesh().names_of(s.step.mesh_dims), ": ",
                      s.step.before.placements_string(), " -> ", s.step.after.placements_string(), ")");
      });

  py::class_<PlanView>(m, "Plan")
      .def_property_readonly("src", [](const PlanView& p) { return p.plan().src; })
      .def_property_readonly("dst", [](const PlanView& p) { return p.plan().dst; })
      .def_property_readonly("backend", [](const PlanView& p) { return p.plan().backend.name; })
      .def_property_readonly("objective", [](const PlanView& p) { return objective_name(p.plan().objective); })
      .def_property_readonly("topology", [](const PlanView& p) { return p.plan().topology.name; })
      .def_property_readonly(
          "certificate",
          [](const PlanView& p) {
            const auto all = patiently([](const CertifiedPlan& plan) { return figures_of(plan.certificate()); })(p);
            py::dict figures;
            for (const auto& [name, value, bound] : all) {
              figures[py::str(name)] = py::make_tuple(value, bound);
            }
            return figures;
          })
      .def_property_readonly("remarks", patiently([](const CertifiedPlan& plan) { return plan.remarks(); }))
      .def_property_readonly("replicas_are_bitwise_equal", patiently([](const CertifiedPlan& plan) {
                               return plan.certificate().replicas_are_bitwise_equal;
                             }))
      .def_property_readonly("steps",
                             [](const PlanView& p) {
                               std::vector<StepView> views;
                               for (const Step& step : p.plan().steps) {
                                 views.push_back({step, p.plan().backend, totals(step, p.plan().backend),
                                                  predicted_picoseconds(step, p.plan().backend, p.plan().topology)});
                               }
                               return views;
                             })
      .def_property_readonly("wire_bytes_max",
                             patiently([](const CertifiedPlan& plan) { return plan.traffic().received_bytes_max; }))
      .def_property_readonly("wire_bytes_sum",
                             patiently([](const CertifiedPlan& plan) { return plan.traffic().received_bytes_sum; }))
      .def_property_readonly("wire_bytes_sum_is_exact",
                             patiently([](const CertifiedPlan& plan) { return plan.traffic().sum_is_exact; }))
      .def_property_readonly("send_bytes_max",
                             patiently([](const CertifiedPlan& plan) { return plan.traffic().sent_bytes_max; }))
      .def_property_readonly("messages_max",
                             patiently([](const CertifiedPlan& plan) { return plan.traffic().messages_max; }))
      .def_property_readonly("bound_bytes_max",
                             patiently([](const CertifiedPlan& plan) { return plan.bound().bytes_max; }))
      .def_property_readonly("bound_bytes_sum",
                             patiently([](const CertifiedPlan& plan) { return plan.bound().bytes_sum; }))
      .def_property_readonly("peak_bytes", patiently([](const CertifiedPlan& plan) { return plan.peak_bytes(); }))
      .def_property_readonly(
          "predicted_us", [](const PlanView& p) { return static_cast<double>(predicted_picoseconds(p.plan())) / 1e6; })
      .def(
          "wire_bytes",
          [](const PlanView& p, const py::object& given_rank) {
            const int64_t rank = integer(given_rank, "rank");
            int64_t bytes = 0;
            for (const Step& step : p.plan().steps) {
              bytes += traffic_at(step, p.plan().backend, position_of(p.plan().src, rank)).received_bytes;
            }
            return bytes;
          },
          py::arg("rank"))
      .def(
          "rank_peak_bytes",
          [](const PlanView& p, const py::object& rank) {
            return compile(p.plan(), position_of(p.plan().src, integer(rank, "rank"))).peak_bytes();
          },
          py::arg("rank"))
      .def(
          "program",
          [](const PlanView& p, const py::object& rank) {
            return compile(p.plan(), position_of(p.plan().src, integer(rank, "rank"))).to_string();
          },
          py::arg("rank"))
      .def(
          "simulate", [](const PlanView& p) { return simulate(p.plan()).received_bytes_sum; },
          py::call_guard<py::gil_scoped_release>())
      .def("to_bytes", [](const PlanView& p) { return py::bytes(to_bytes(p.plan())); })
      .def_static(
          "from_bytes",
          [](const py::object& data) {
            return view_of(from_bytes(std::string(object<py::bytes>(data, "data", "bytes, as Plan.to_bytes gives"))));
          },
          py::arg("data"))
      .def("to_json", patiently([](const CertifiedPlan& plan) {
             return to_json(plan.plan(), plan.certificate(), plan.remarks());
           }))
      .def("to_svg", patiently([](const CertifiedPlan& plan) { return to_svg(plan.plan()); }))
      .def("to_html", patiently([](const CertifiedPlan& plan) { return to_html(plan.plan()); }))
      .def("_repr_html_", [](const PlanView& p) { return to_svg(p.plan()); })  // in notebooks
      .def("__str__", [](const PlanView& p) { return to_string(p.plan()); })
      .def("__repr__", [](const PlanView& p) { return concat("Plan(", to_string(p.plan()), ")"); });

  m.def(
      "make_plan",
      [](const Layout& src, const Layout& dst, const py::object& backend, const py::object& objective,
         const std::shared_ptr<Topology>& topology, const std::vector<std::vector<int64_t>>& groups,
         const py::object& reduce, const py::object& memory_limit) {
        std::optional<int64_t> limit;
        if (!memory_limit.is_none()) limit = integer(memory_limit, "memory_limit");
        const PlanRequest request{
            src, dst, PlanningContext::make(options_of(src, dst, backend, objective, topology, groups, reduce), limit)};
        const py::gil_scoped_release release;
        return PlanView{plan_cache().get(request)};
      },
      py::arg("src"), py::arg("dst"), py::arg("backend") = "nccl", py::arg("objective") = "time",
      py::arg("topology") = nullptr, py::arg("groups") = std::vector<std::vector<int64_t>>{},
      py::arg("reduce") = "fast", py::arg("memory_limit") = py::none());
  m.def(
      "plan_through",
      [](const std::vector<Layout>& layouts, const py::object& backend, const py::object& objective,
         const std::shared_ptr<Topology>& topology, const std::vector<std::vector<int64_t>>& groups,
         const py::object& reduce) {
        check_user(!layouts.empty(), "through: names no layouts");
        return view_of(plan_through(
            layouts, options_of(layouts.front(), layouts.back(), backend, objective, topology, groups, reduce)));
      },
      py::arg("layouts"), py::arg("backend") = "nccl", py::arg("objective") = "time", py::arg("topology") = nullptr,
      py::arg("groups") = std::vector<std::vector<int64_t>>{}, py::arg("reduce") = "fast");
  using StepFields = std::tuple<std::string, std::vector<int64_t>, Layout, Layout, std::string, int64_t, bool>;
  m.def(
      "plan_of_steps",
      [](const Layout& src, const Layout& dst, const std::vector<StepFields>& steps, const std::string& backend,
         const std::string& objective, const Topology& topology, bool named_groups_only) {
        Plan plan{src, dst, Lowering::named(backend), parse_objective(objective), topology, named_groups_only, {}};
        for (const auto& [op, mesh_dims, before, after, sharing, rounds, ordered] : steps) {
          plan.steps.push_back({parse_step_op(op), mesh_dim_set(mesh_dims, src.mesh()), before, after,
                                parse_sharing(sharing), rounds, ordered});
        }
        return view_of(from_bytes(to_bytes(plan)));  // which refuses what is no plan
      },
      py::arg("src"), py::arg("dst"), py::arg("steps"), py::arg("backend"), py::arg("objective"), py::arg("topology"),
      py::arg("named_groups_only"));
  m.def(
      "simulation_bytes", [](const PlanView& p) { return simulation_bytes(p.plan(), p.certified->peak_bytes()); },
      py::arg("plan"), py::call_guard<py::gil_scoped_release>());
  m.def("plan_cache_counts", [] {
    const PlanCache::Counts counts = plan_cache().counts();
    return py::dict(py::arg("hits") = counts.hits, py::arg("misses") = counts.misses, py::arg("size") = counts.size);
  });
  m.def("reset_plan_cache_counts", [] { plan_cache().reset_counts(); });
  m.def("clear_plan_cache", [] { plan_cache().clear(); });
}

void define_topology(py::module_& m) {
  py::class_<Link>(m, "Link")
      .def(py::init([](const py::object& message_ps, const py::object& ps_per_kib) {
             return Link{integer(message_ps, "message_ps"), integer(ps_per_kib, "ps_per_kib")};
           }),
           py::arg("message_ps"), py::arg("ps_per_kib"))
      .def_readonly("message_ps", &Link::message_ps)
      .def_readonly("ps_per_kib", &Link::ps_per_kib)
      .def(
          "__eq__", [](const Link& a, const Link& b) { return a == b; }, py::is_operator())
      .def("__repr__", [](const Link& link) {
        return concat("Link(message_ps=", link.message_ps, ", ps_per_kib=", link.ps_per_kib, ")");
      });
  py::class_<Topology, std::shared_ptr<Topology>>(m, "Topology")
      .def(py::init([](const py::object& name, const py::object& ranks_per_node, const py::object& step_ps,
                       const py::object& memory_ps_per_kib, const py::object& inside, const py::object& between,
                       const py::object& mesh_dims) {
             auto topology = std::make_shared<Topology>(Topology{text(name, "name"),
                                                                 integer(ranks_per_node, "ranks_per_node"),
                                                                 integer(step_ps, "step_ps"),
                                                                 integer(memory_ps_per_kib, "memory_ps_per_kib"),
                                                                 object<Link>(inside, "inside", "a Link"),
                                                                 object<Link>(between, "between", "a Link"),
                                                                 {}});
             const auto links = object<py::dict>(mesh_dims, "mesh_dims", "a dict of mesh dims and Links");
             for (const auto& [mesh_dim, link] : links) {
               topology->mesh_dims.emplace(text(mesh_dim, "mesh_dims"), object<Link>(link, "mesh_dims", "a Link"));
             }
             topology->check();
             return topology;
           }),
           py::arg("name"), py::arg("ranks_per_node"), py::arg("step_ps"), py::arg("memory_ps_per_kib"),
           py::arg("inside"), py::arg("between"), py::arg("mesh_dims") = py::dict())
      .def_static(
          "named",
          [](const py::object& name) { return std::make_shared<Topology>(Topology::named(text(name, "topology"))); },
          py::arg("name"))
      .def_static("names", &Topology::names)
      .def_readonly("name", &Topology::name)
      .def_readonly("ranks_per_node", &Topology::ranks_per_node)
      .def_readonly("step_ps", &Topology::step_ps)
      .def_readonly("memory_ps_per_kib", &Topology::memory_ps_per_kib)
      .def_readonly("inside", &Topology::inside)
      .def_readonly("between", &Topology::between)
      .def_readonly("mesh_dims", &Topology::mesh_dims)
      .def(
          "__eq__", [](const Topology& a, const Topology& b) { return a == b; }, py::is_operator())
      .def("__hash__", [](const Topology& t) { return py::hash(py::str(t.name)); })
      .def("to_json", [](const Topology& topology) { return to_json(topology); })
      .def("__repr__", [](const Topology& topology) { return concat("Topology(", topology.name, ")"); });
}

}  // namespace
}  // namespace shardwright

PYBIND11_MODULE(_planner, m) {
  m.doc() = "Layouts, plans, programs and the simulator of shardwright, without torch.";
  shardwright::register_errors();
  shardwright::define_topology(m);
  shardwright::define_mesh(m);
  shardwright::define_layout(m);
  shardwright::define_plan(m);
  shardwright::define_matmul(m);
  shardwright::define_calibration(m);
}
