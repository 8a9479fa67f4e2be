// _planner: PlanningTables, the defaults for planning in a process. They are immutable in Python too.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <optional>
#include <string>
#include <utility>

#include "bindings/arguments.h"
#include "bindings/views.h"
#include "planning/context.h"
#include "planning/gemm_models.h"

namespace py = pybind11;

namespace shardwright {
namespace {

// Models by (device type, dtype).
using GemmModels = std::map<std::pair<std::string, std::string>, GemmModel>;

// Returns the pinned plans of the tables.
Pins pins_of(const PlanningTables& tables) { return tables.pins ? *tables.pins : Pins(); }

// Returns the value of a key; nothing if the map does not have the key.
template <typename Map, typename Key>
std::optional<typename Map::mapped_type> value_at(const Map& map, const Key& key) {
  const auto found = map.find(key);
  return found == map.end() ? std::nullopt : std::optional<typename Map::mapped_type>(found->second);
}

using TablesClass = py::class_<PlanningTables>;

// Defines the methods for pinned plans.
void define_pins(TablesClass& tables) {
  tables.def(py::init<>())
      .def(
          "with_pin",
          [](PlanningTables tables, const PlanView& plan) {
            tables.pins = pins_of(tables).with(plan.certified);
            return tables;
          },
          py::arg("plan"), "Returns tables in which this plan is pinned for its layouts and backend.")
      .def(
          "without_pin",
          [](PlanningTables tables, const PlanView& plan) {
            tables.pins = pins_of(tables).without(plan.plan());
            return tables;
          },
          py::arg("plan"),
          "Returns tables without the pin for the layouts and backend of this plan. Raises ValueError if there is "
          "none.")
      .def(
          "pinned",
          [](const PlanningTables& tables, const Layout& src, const Layout& dst,
             const std::string& backend) -> std::optional<PlanView> {
            const CertifiedPlanPtr plan = tables.pins ? tables.pins->find(src, dst, Lowering::named(backend)) : nullptr;
            if (!plan) return std::nullopt;
            return PlanView{plan};
          },
          py::arg("src"), py::arg("dst"), py::arg("backend"), "Returns the pinned plan, or None.");
}

// Defines the methods for measured topologies and models.
void define_measurements(TablesClass& tables) {
  tables
      .def(
          "with_measured",
          [](PlanningTables tables, const std::string& backend, const Topology& topology, const GemmModels& models) {
            tables.topologies[std::string(Lowering::named(backend).name)] = topology;
            for (const auto& [key, model] : models) tables.gemm_models[key] = model;
            return tables;
          },
          py::arg("backend"), py::arg("topology"), py::arg("gemm_models"),
          "Returns tables with a measured topology for the backend, and with measured models by (device type, dtype).")
      .def(
          "without_measured",
          [](PlanningTables tables) {
            tables.topologies.clear();
            tables.gemm_models.clear();
            return tables;
          },
          "Returns tables without measured topologies and models.")
      .def(
          "with_environment",
          [](PlanningTables tables, const std::optional<Topology>& topology) {
            tables.environment = topology;
            return tables;
          },
          py::arg("topology"),
          "Returns tables in which the environment variable ``SHARDWRIGHT_TOPOLOGY`` gives this topology, or none.")
      .def(
          "measured_topology",
          [](const PlanningTables& tables, const std::string& backend) { return value_at(tables.topologies, backend); },
          py::arg("backend"), "Returns the measured topology, or None.")
      .def(
          "measured_gemm_model",
          [](const PlanningTables& tables, const std::string& device_type, const std::string& dtype) {
            return measured_gemm_model(tables, device_type, DType::parse(dtype));
          },
          py::arg("device_type"), py::arg("dtype"),
          "Returns the model that was measured for this dtype, else a model for another dtype of the device type, else "
          "None.")
      .def(
          "gemm_model",
          [](const PlanningTables& tables, const std::string& device_type, const std::string& dtype) {
            return gemm_model_on(tables, device_type, DType::parse(dtype));
          },
          py::arg("device_type"), py::arg("dtype"),
          "Returns the measured model, else the default model of the device type.");
}

// Defines equality, hash and texts.
void define_comparisons(TablesClass& tables) {
  tables.def_readonly("environment", &PlanningTables::environment)
      .def(
          "summary",
          [](const PlanningTables& tables) {
            py::typing::Dict<py::str, py::str> fields;
            for (const auto& [name, value] : tables.summary()) fields[py::str(name)] = value;
            return fields;
          },
          "Returns a text with a hash of the content for each table, by name, for ranks to compare.")
      .def(
          "__eq__", [](const PlanningTables& a, const PlanningTables& b) { return a == b; }, py::is_operator())
      .def("__hash__", &PlanningTables::hash)
      .def("__repr__", [](const PlanningTables& tables) {
        std::vector<std::string> parts;
        for (const auto& [name, value] : tables.summary()) parts.push_back(concat(name, ": ", value));
        return concat("PlanningTables(", join(parts, "; "), ")");
      });
}

}  // namespace

void define_context(py::module_& m) {
  TablesClass tables(m, "PlanningTables",
                     "The defaults for plans and products. Immutable: the ``with...`` methods return a new object.");
  define_pins(tables);
  define_measurements(tables);
  define_comparisons(tables);
}

}  // namespace shardwright
