// _planner: topologies, links, and the lowerings of transports.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/views.h"
#include "cost/backend.h"
#include "cost/gemm_model.h"
#include "cost/topology.h"
#include "planning/json.h"

namespace py = pybind11;

namespace shardwright {
namespace {

// Defines the class Lowering.
void define_lowering(py::module_& m) {
  py::class_<Lowering>(
      m, "Lowering",
      "The capabilities of a process group's transport, which determine the instructions that carry out a plan "
      "(csrc/cost/lowering.h).")
      .def_static(
          "named", [](const Typed<std::string>& name) { return Lowering::named(text(name, "backend")); },
          py::arg("name"), "Returns the lowering ``\"nccl\"`` or ``\"gloo\"``. Raises ValueError for other names.")
      .def_static(
          "of_backend",
          [](const std::string& backend, const std::string& device_type) {
            return lowering_of_backend(backend, device_type);
          },
          py::arg("backend"), py::arg("device_type"),
          "Returns the lowering for the backend of a process group, given by its name, on a type of device.")
      .def_static(
          "of_device", [](const std::string& device_type) { return lowering_of_device(device_type); },
          py::arg("device_type"), "Returns the lowering for programs of a single rank on a type of device.")
      .def_static(
          "names",
          [] {
            std::vector<std::string> names;
            for (const Lowering& lowering : Lowering::all()) names.emplace_back(lowering.name);
            return names;
          },
          "Returns the names of all lowerings.")
      .def_property_readonly(
          "name", [](const Lowering& lowering) { return std::string(lowering.name); }, "The name.")
      .def_property_readonly(
          "default_topology", [](const Lowering& lowering) { return Topology::named(lowering.default_topology); },
          "The topology for plans without another one.")
      .def_property_readonly(
          "default_gemm_model", [](const Lowering& lowering) { return default_gemm_model(lowering); },
          "The model of products for plans without another one.")
      .def_readonly("is_on_device", &Lowering::is_on_device,
                    "True if transfers read and write device memory; otherwise they use host memory.")
      .def("uses_messages", &Lowering::uses_messages, py::arg("bytes_to_each_peer"),
           "Returns True if an exchange of this size is sent as messages, False if it is one all-to-all.")
      .def(
          "__eq__", [](const Lowering& a, const Lowering& b) { return a == b; }, py::is_operator())
      .def("__hash__", [](const Lowering& lowering) { return py::hash(py::str(std::string(lowering.name))); })
      .def("__repr__", [](const Lowering& lowering) { return concat("Lowering(", lowering.name, ")"); });
}

// Defines the class Link.
void define_link(py::module_& m) {
  py::class_<Link>(m, "Link", "The latency and bandwidth of messages to other ranks.")
      .def(py::init([](const Typed<int64_t>& message_ps, const Typed<int64_t>& ps_per_kib) {
             return Link{integer(message_ps, "message_ps"), integer(ps_per_kib, "ps_per_kib")};
           }),
           py::arg("message_ps"), py::arg("ps_per_kib"), "Takes the picoseconds of a message and of a KiB.")
      .def_readonly("message_ps", &Link::message_ps, "Picoseconds for each message received.")
      .def_readonly("ps_per_kib", &Link::ps_per_kib,
                    "Picoseconds per KiB of the larger of bytes sent and bytes received by a rank.")
      .def(
          "__eq__", [](const Link& a, const Link& b) { return a == b; }, py::is_operator())
      .def("__repr__", [](const Link& link) {
        return concat("Link(message_ps=", link.message_ps, ", ps_per_kib=", link.ps_per_kib, ")");
      });
}

}  // namespace

void define_topology(py::module_& m) {
  define_link(m);
  py::class_<Topology, std::shared_ptr<Topology>>(
      m, "Topology",
      "The latencies and bandwidths between ranks, in integer picoseconds, so that every rank computes the same "
      "plan.\n\nA node is `ranks_per_node` consecutive ranks (0: all ranks). Groups within a node use the link "
      "`inside`, other groups `between`. `mesh_dims` has other links for some mesh dims, by name.")
      .def(
          py::init([](const Typed<std::string>& name, const Typed<int64_t>& ranks_per_node,
                      const Typed<int64_t>& step_ps, const Typed<int64_t>& memory_ps_per_kib, const Typed<Link>& inside,
                      const Typed<Link>& between, const Typed<std::map<std::string, Link>>& mesh_dims) {
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
          [](const Typed<std::string>& name) {
            return std::make_shared<Topology>(Topology::named(text(name, "topology")));
          },
          py::arg("name"),
          "Returns a built-in topology. Raises ValueError for other names; the message lists the names.")
      .def_static("names", &Topology::names, "Returns the names of the built-in topologies.")
      .def_readonly("name", &Topology::name, "The name, which plans report.")
      .def_readonly("ranks_per_node", &Topology::ranks_per_node, "Number of consecutive ranks on a node; 0: all ranks.")
      .def_readonly("step_ps", &Topology::step_ps, "Fixed cost of a collective, in picoseconds.")
      .def_readonly("memory_ps_per_kib", &Topology::memory_ps_per_kib, "Picoseconds per KiB of local copies.")
      .def_readonly("inside", &Topology::inside, "The link within a node.")
      .def_readonly("between", &Topology::between, "The link between nodes.")
      .def_readonly("mesh_dims", &Topology::mesh_dims, "The links of mesh dims, by name.")
      .def(
          "__eq__", [](const Topology& a, const Topology& b) { return a == b; }, py::is_operator())
      .def("__hash__", [](const Topology& t) { return py::hash(py::str(t.name)); })
      .def(
          "to_json", [](const Topology& topology) { return to_json(topology); },
          "Returns JSON that `load_topology` reads.")
      .def("__repr__", [](const Topology& topology) { return concat("Topology(", topology.name, ")"); });
  define_lowering(m);
}

}  // namespace shardwright
