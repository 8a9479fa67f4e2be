// _runtime: programs, and programs bound to process groups.
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/arguments.h"
#include "bindings/runtime_parts.h"
#include "moves/traffic.h"
#include "runtime/arena_view.h"
#include "runtime/c10d/process_groups.h"
#include "runtime/executor.h"
#include "runtime/operators.h"
#include "runtime/peers/peer_transport.h"
#include "runtime/writes.h"

namespace shardwright {
namespace {

namespace py = pybind11;

// The classes that Python sees. They exist because pybind11 has no holder for const objects.
struct CompiledView {
  std::shared_ptr<const CompiledProgram> compiled;
};

struct ExecutableView {
  ExecutablePtr executable;

  const CompiledProgram& compiled() const { return executable->compiled(); }
  const Program& program() const { return executable->program(); }
};

using GroupMembers = std::vector<std::pair<std::vector<int>, std::vector<int64_t>>>;

// Returns the mesh dims and ranks of each group that a program needs.
GroupMembers members_of(const Program& program) {
  GroupMembers members;
  for (const Group& group : program.groups) members.emplace_back(group.mesh_dims.to_vector(), to_ints(group.ranks));
  return members;
}

// `names` are the registered names of the process groups, in the order of program().groups.
ExecutableView bind(const CompiledView& view, const std::vector<std::string>& names) {
  std::vector<RankGroupPtr> groups;
  for (const std::string& name : names) groups.push_back(group_named(name));
  return {std::make_shared<const Executable>(view.compiled, groups)};
}

using CommunicationParts =
    std::tuple<std::string, std::string, std::vector<int>, std::vector<int64_t>, int64_t, int64_t, int64_t>;

// Returns the ranks of a rank's group in a step, ascending; none if no mesh of the step contains the rank.
std::vector<int64_t> members_in(const Step& step, Rank rank) {
  const Mesh& mesh = step.before.mesh();
  const std::optional<Position> position = mesh.position_of(rank);
  if (is_cross_or_rearrange(step.op)) {
    const bool takes_part = position || step.after.mesh().position_of(rank);
    return takes_part ? to_ints(ranks_of(mesh, step.after.mesh())) : std::vector<int64_t>{};
  }
  if (!position) return {};
  return to_ints(mesh.ranks_at(mesh.group(*position, step.mesh_dims)));
}

std::vector<CommunicationParts> communications_of(const ExecutableView& view) {
  std::vector<std::vector<int64_t>> members;
  for (const Plan& plan : view.compiled().origin().plans()) {
    for (const Step& step : plan.steps) {
      if (communicates(step)) members.push_back(members_in(step, view.compiled().rank()));
    }
  }
  std::vector<CommunicationParts> all;
  for (const Communication& c : view.executable->communications()) {
    std::vector<int64_t>& ranks = members[all.size()];
    all.emplace_back(c.op, c.reduce_op, c.mesh_dims, std::move(ranks), c.group_size, c.gather_dim, c.shard_dim);
  }
  return all;
}

std::vector<std::string> group_names_of(const ExecutableView& view) {
  std::vector<std::string> names;
  for (const RankGroupPtr& group : view.executable->groups()) names.push_back(group->name());
  return names;
}

py::typing::Dict<py::str, py::str> signature_of(const ExecutableView& view) {
  py::typing::Dict<py::str, py::str> fields;
  for (const auto& [name, value] : view.compiled().origin().signature()) fields[py::str(name)] = value;
  return fields;
}

std::pair<at::Tensor, bool> start_registered(const ExecutableView& view, const at::Tensor& input) {
  auto [output, work] = start(view.executable, input);
  if (work) c10d::register_work(output, work);
  return {output, static_cast<bool>(work)};
}

void define_memory_of_peers(py::module_& m) {
  m.def(
      "use_peer_copies",
      [](const std::string& group_name, const std::string& device_name, int64_t arena_bytes, int64_t min_bytes) {
        const c10::Device device(device_name);
        use_peer_copies(*group_named(group_name), device, {arena_bytes, min_bytes, timeout_of(group_name, device)});
      },
      py::arg("group_name"), py::arg("device"), py::arg("arena_bytes"), py::arg("min_bytes"),
      py::call_guard<py::gil_scoped_release>(),
      "Gives the group an arena; see csrc/runtime/peers/peer_transport.h. Collective among its ranks.");
  // Creates communicators now instead of in the first transfer (Transport::connect).
  m.def(
      "connect_group",
      [](const std::string& group_name, const std::string& device) {
        if (const GroupLease lease = group_named(group_name)->lease()) lease->connect(c10::Device(device));
      },
      py::arg("group_name"), py::arg("device"), py::call_guard<py::gil_scoped_release>(),
      "Creates the group's communicator on a device; see csrc/runtime/transport.h. Collective among its ranks.");
  m.def(
      "record_use", [](const at::Tensor& tensor, const c10::Stream& stream) { record_use(tensor, stream); },
      py::arg("tensor"), py::arg("stream"),
      "Keeps the tensor's memory until a stream has finished with it; see csrc/runtime/arena_view.h.");
  m.def("view_arena", &view_arena, py::arg("tensor"), py::arg("arena"), py::arg("offset_bytes"),
        "Makes `tensor` and all its views use the memory of `arena` from `offset_bytes` on; see "
        "csrc/runtime/arena_view.h.");
  m.def("release_memory", &release_memory, py::arg("tensor"), py::arg("when_read"),
        "Takes the memory of the arena away from `tensor`. An operator that reads the tensor or a view of it before "
        "the next `view_arena` raises RuntimeError with the message `when_read`.");
  m.def("fingerprint_of", &fingerprint_of, py::arg("tensor"), py::call_guard<py::gil_scoped_release>(),
        "Returns a hash of a tensor's contents; see csrc/runtime/writes.h.");
}

void check_out_of(const ExecutableView& v, const at::Tensor& input, const at::Tensor& out) {
  check_out(v.executable, input, out);
}

std::vector<std::vector<int64_t>> input_shapes_of(const ExecutableView& v) {
  std::vector<std::vector<int64_t>> shapes;
  for (size_t i = 0; i < v.program().num_inputs(); ++i) shapes.push_back(v.program().buffers[i].shape);
  return shapes;
}

void define_runs(py::class_<ExecutableView>& executable) {
  using release_gil = py::call_guard<py::gil_scoped_release>;
  executable
      .def(
          "run", [](const ExecutableView& v, const at::Tensor& input) { return run(v.executable, input); },
          py::arg("input"), release_gil())
      .def(
          "run_into",
          [](const ExecutableView& v, const at::Tensor& input, const at::Tensor& out) {
            run_into(v.executable, input, out);
          },
          py::arg("input"), py::arg("out"), release_gil())
      .def("check_out", &check_out_of, py::arg("input"), py::arg("out"),
           "Raises the error that `run_into` would raise for `out`.")
      .def("start", &start_registered, py::arg("input"), release_gil(),
           "Returns the result and whether it is still being computed; if so, it is registered for `wait_tensor`.")
      .def(
          "start_into",
          [](const ExecutableView& v, const at::Tensor& input, const at::Tensor& out) {
            const auto work = start_into(v.executable, input, out);
            return work ? std::optional(work) : std::nullopt;
          },
          py::arg("input"), py::arg("out"), release_gil(),
          "Starts to write the result to `out`. Returns a work to wait for, or None if nothing is pending.")
      .def(
          "run_all",
          [](const ExecutableView& v, const std::vector<at::Tensor>& inputs) { return run_all(v.executable, inputs); },
          py::arg("inputs"), release_gil());
}

}  // namespace

void define_executable(py::module_& m) {
  define_memory_of_peers(m);
  py::class_<ExecutableView> executable(m, "Executable",
                                        "A program bound to process groups, which it does not keep alive.");
  py::class_<CompiledView>(m, "CompiledProgram",
                           "One rank's program for a plan, or for an operator's text (`compiled`).")
      .def(py::init([](const py::bytes& plan_bytes, int64_t rank) {
             return CompiledView{CompiledProgram::from_plan_bytes(std::string(plan_bytes), Rank{rank})};
           }),
           py::arg("plan_bytes"), py::arg("rank"))
      .def_property_readonly(
          "groups", [](const CompiledView& v) { return members_of(v.compiled->program()); },
          "(mesh dims, ranks ascending) of each group the program communicates in.")
      .def("bind", &bind, py::arg("group_names"),
           "Binds the program to process groups. `group_names` has a registered name for each of `groups`.");

  executable
      .def_property_readonly(
          "groups", [](const ExecutableView& v) { return members_of(v.program()); },
          "(mesh dims, ranks ascending) of each group the program communicates in.")
      .def_property_readonly("input_shape", [](const ExecutableView& v) { return v.program().buffers[0].shape; })
      .def_property_readonly("input_shapes", &input_shapes_of)
      .def_property_readonly("output_shape", [](const ExecutableView& v) { return v.program().outputs[0].shape; })
      .def_property_readonly(
          "is_identity", [](const ExecutableView& v) { return v.program().outputs[0].buffer == kInputBuffer; },
          "True if the result is the input itself.")
      .def_property_readonly(
          "communications", &communications_of,
          "For each step that communicates: op, reduce op, mesh dims, group size, gather dim, shard dim.")
      .def_property_readonly("group_names", &group_names_of, "Registered names of the process groups.")
      .def_property_readonly("communicates", [](const ExecutableView& v) { return v.compiled().communicates(); })
      .def_property_readonly("received_bytes", [](const ExecutableView& v) { return v.compiled().received_bytes(); })
      .def_property_readonly("rank", [](const ExecutableView& v) { return to_int(v.compiled().rank()); })
      .def_property_readonly("mesh_ranks", [](const ExecutableView& v) { return to_ints(v.executable->mesh_ranks()); })
      .def_property_readonly("signature", &signature_of,
                             "The fields that must be equal on all ranks of a redistribute, by name.")
      .def("__str__", [](const ExecutableView& v) { return v.compiled().origin().text(); });
  define_runs(executable);
  m.def(
      "compiled", [](const std::string& text, int64_t rank) { return CompiledView{compiled_of(text, Rank{rank})}; },
      py::arg("text"), py::arg("rank"),
      "Compiles an operator's text for a rank and caches the program. `executable` uses the same cache.");
  m.def(
      "executable",
      [](const std::string& text, const std::vector<std::string>& groups, int64_t rank) {
        return ExecutableView{executable_of(text, groups, rank)};
      },
      py::arg("text"), py::arg("group_names"), py::arg("rank"),
      "Returns the executable for an operator's text, bound to these groups. It is cached.");
}

}  // namespace shardwright
