// _planner: functions that make plans, and the cache of plans.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/views.h"
#include "planning/plan_cache.h"
#include "planning/serialize.h"
#include "planning/validate.h"
#include "search/make_plan.h"
#include "simulate/simulate.h"

namespace py = pybind11;

namespace shardwright {
namespace {

// Returns the options of make_plan. Checks the arguments.
PlanOptions options_of(const Layout& src, const Layout& dst, const Typed<std::string>& backend,
                       const Typed<std::string>& objective, const std::shared_ptr<Topology>& topology,
                       const std::vector<std::vector<int64_t>>& groups, const Typed<std::string>& reduce,
                       const PlanningTables& tables) {
  PlanOptions options{Lowering::named(text(backend, "backend")), parse_objective(text(objective, "objective")),
                      is_ordered(text(reduce, "reduce"), src)};
  const std::optional<Topology> requested_topology = topology ? std::optional<Topology>(*topology) : std::nullopt;
  options.topology = topology_between(src, dst, options.lowering, requested_topology, tables);
  for (const std::vector<int64_t>& mesh_dims : groups) options.groups.push_back(mesh_dim_set(mesh_dims, src.mesh()));
  return options;
}

// Defines functions that make plans.
void define_making(py::module_& m) {
  m.def(
      "make_plan",
      [](const Layout& src, const Layout& dst, const Typed<std::string>& backend, const Typed<std::string>& objective,
         const std::shared_ptr<Topology>& topology, const std::vector<std::vector<int64_t>>& groups,
         const Typed<std::string>& reduce, const Typed<std::optional<int64_t>>& memory_limit,
         const PlanningTables& tables) {
        std::optional<int64_t> limit;
        if (!memory_limit.is_none()) limit = integer(memory_limit, "memory_limit");
        const PlanOptions options = options_of(src, dst, backend, objective, topology, groups, reduce, tables);
        const PlanRequest request{src, dst, PlanningContext::make(options, limit)};
        const py::gil_scoped_release release;
        return PlanView{plan_cache().get(request)};
      },
      py::arg("src"), py::arg("dst"), py::arg("backend") = "nccl", py::arg("objective") = "time",
      py::arg("topology") = nullptr, py::arg("groups") = std::vector<std::vector<int64_t>>{},
      py::arg("reduce") = "fast", py::arg("memory_limit") = py::none(), py::arg_v("tables", PlanningTables{}, "..."),
      "Returns the cheapest plan from one layout to another, from the cache of plans if possible.\n\nThe arguments are "
      "those of `shardwright.plan`; `tables` are the defaults, and `memory_limit` is in bytes. Raises ValueError if an "
      "argument is invalid or no plan meets the memory limit.");
  m.def(
      "plan_through",
      [](const std::vector<Layout>& layouts, const Typed<std::string>& backend, const Typed<std::string>& objective,
         const std::shared_ptr<Topology>& topology, const std::vector<std::vector<int64_t>>& groups,
         const Typed<std::string>& reduce, const PlanningTables& tables) {
        check_argument(!layouts.empty(), "through", "a list of at least one layout", "none");
        const Layout &src = layouts.front(), &dst = layouts.back();
        Plan plan = plan_through(layouts, options_of(src, dst, backend, objective, topology, groups, reduce, tables));
        check_user(plan.steps.size() <= kMaxSteps, "through must have at most ", kMaxSteps, " moves, got ",
                   plan.steps.size());
        return view_of(std::move(plan));
      },
      py::arg("layouts"), py::arg("backend") = "nccl", py::arg("objective") = "time", py::arg("topology") = nullptr,
      py::arg("groups") = std::vector<std::vector<int64_t>>{}, py::arg("reduce") = "fast",
      py::arg_v("tables", PlanningTables{}, "..."),
      "Returns the plan with one move from each layout to the next, at most 30 moves. Raises ValueError if there is no "
      "such move, or if there are more.");
  // Kind of step, mesh dims, layouts before and after, replica policy, rounds, ordered, ranks per node.
  using StepFields = std::tuple<std::string, std::vector<int64_t>, Layout, Layout, std::string, int64_t, bool, int64_t>;
  m.def(
      "plan_of_steps",
      [](const Layout& src, const Layout& dst, const std::vector<StepFields>& steps, const std::string& backend,
         const std::string& objective, const Topology& topology, bool named_groups_only, int64_t segments_dim,
         int64_t segments) {
        Plan plan{src, dst, Lowering::named(backend), parse_objective(objective), topology, named_groups_only, {}};
        plan.segments = {segments_dim, segments};
        for (const auto& [op, mesh_dims, before, after, policy, rounds, ordered, ranks_per_node] : steps) {
          plan.steps.push_back({parse_step_op(op), mesh_dim_set(mesh_dims, before.mesh()), before, after,
                                parse_replica_policy(policy), rounds, ordered, ranks_per_node});
        }
        check_meshes(plan);                          // to_bytes cannot write other meshes
        return view_of(from_bytes(to_bytes(plan)));  // from_bytes rejects steps that do not form a plan
      },
      py::arg("src"), py::arg("dst"), py::arg("steps"), py::arg("backend"), py::arg("objective"), py::arg("topology"),
      py::arg("named_groups_only"), py::arg("segments_dim"), py::arg("segments"),
      "Returns the plan with these steps: (kind of step, mesh dims, layouts before and after, replica policy, rounds, "
      "ordered, ranks per node). Raises ValueError if they do not form a plan.");
}

// Defines functions on the cache of plans.
void define_cache(py::module_& m) {
  m.def(
      "plan_cache_counts",
      [] {
        const PlanCache::Counts counts = plan_cache().counts();
        return py::typing::Dict<py::str, py::int_>(py::arg("hits") = counts.hits, py::arg("misses") = counts.misses,
                                                   py::arg("size") = counts.size);
      },
      "Returns the hits and misses of the cache of plans since the last reset, and its size.");
  m.def("reset_plan_cache_counts", [] { plan_cache().reset_counts(); }, "Sets the hits and misses to 0.");
  m.def("clear_plan_cache", [] { plan_cache().clear(); }, "Removes all plans from the cache.");
}

}  // namespace

void define_planning(py::module_& m) {
  define_making(m);
  m.def(
      "plan_text", [](const PlanView& p) { return to_text(p.plan()); }, py::arg("plan"),
      "Returns a plan as text, which operators take: a label, ``\"|\"``, and the plan's bytes in base64.");
  m.def(
      "parse_plan", [](const std::string& text) { return view_of(from_bytes(bytes_from_text(text, "plan"))); },
      py::arg("text"), "Returns the plan from the result of `plan_text`. Raises ValueError for other texts.");
  m.def(
      "simulation_bytes", [](const PlanView& p) { return simulation_bytes(p.plan(), p.certified->peak_bytes()); },
      py::arg("plan"), py::call_guard<py::gil_scoped_release>(),
      "Returns an estimate of the memory that ``plan.simulate()`` needs, in bytes.");
  define_cache(m);
}

}  // namespace shardwright
