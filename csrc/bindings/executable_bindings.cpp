// _runtime: compiled programs, and programs bound to process groups.
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

// The class CompiledProgram in Python. It exists because pybind11 has no holder for const objects.
struct CompiledView {
  std::shared_ptr<const CompiledProgram> compiled;
};

// The class Executable in Python.
struct ExecutableView {
  ExecutablePtr executable;

  const CompiledProgram& compiled() const { return executable->compiled(); }
  const Program& program() const { return executable->program(); }
};

// For each group, its mesh dims and ranks.
using GroupMembers = std::vector<std::pair<std::vector<int>, std::vector<int64_t>>>;

// Returns the mesh dims and ranks of each group that a program needs.
GroupMembers members_of(const Program& program) {
  GroupMembers members;
  for (const Group& group : program.groups) members.emplace_back(group.mesh_dims.to_vector(), to_ints(group.ranks));
  return members;
}

// Binds a program to process groups. `names` are their registered names, in the order of program().groups.
ExecutableView bind(const CompiledView& view, const std::vector<std::string>& names) {
  std::vector<RankGroupPtr> groups;
  for (const std::string& name : names) groups.push_back(group_named(name));
  return {std::make_shared<const Executable>(view.compiled, groups)};
}

// The fields of Communication, with the ranks of this rank's group after the mesh dims: kind of step, reduction, mesh
// dims, ranks, size of a group, gather dim, shard dim.
using CommunicationParts =
    std::tuple<std::string, std::string, std::vector<int>, std::vector<int64_t>, int64_t, int64_t, int64_t>;

// Returns the ranks of a rank's group in a step, ascending; empty if the rank is on no mesh of the step.
std::vector<int64_t> group_ranks_in(const Step& step, Rank rank) {
  const Mesh& mesh = step.before.mesh();
  const std::optional<Position> position = mesh.position_of(rank);
  if (is_cross_or_rearrange(step.op)) {
    const bool takes_part = position || step.after.mesh().position_of(rank);
    return takes_part ? to_ints(ranks_of(mesh, step.after.mesh())) : std::vector<int64_t>{};
  }
  if (!position) return {};
  return to_ints(mesh.ranks_at(mesh.group(*position, step.mesh_dims)));
}

// Returns the description of each step that communicates.
std::vector<CommunicationParts> communications_of(const ExecutableView& view) {
  std::vector<std::vector<int64_t>> members;
  for (const Plan& plan : view.compiled().origin().plans()) {
    for (const Step& step : plan.steps) {
      if (communicates(step)) members.push_back(group_ranks_in(step, view.compiled().rank()));
    }
  }
  std::vector<CommunicationParts> all;
  for (const Communication& c : view.executable->communications()) {
    std::vector<int64_t>& ranks = members[all.size()];
    all.emplace_back(c.op, c.reduce_op, c.mesh_dims, std::move(ranks), c.group_size, c.gather_dim, c.shard_dim);
  }
  return all;
}

// Returns the registered names of an executable's process groups.
std::vector<std::string> group_names_of(const ExecutableView& view) {
  std::vector<std::string> names;
  for (const RankGroupPtr& group : view.executable->groups()) names.push_back(group->name());
  return names;
}

// Returns the signature of an executable as a dict.
py::typing::Dict<py::str, py::str> signature_of(const ExecutableView& view) {
  py::typing::Dict<py::str, py::str> fields;
  for (const auto& [name, value] : view.compiled().origin().signature()) fields[py::str(name)] = value;
  return fields;
}

// Starts a program and registers its Work for PyTorch's wait_tensor. Returns the result, and true if a Work is pending.
std::pair<at::Tensor, bool> start_registered(const ExecutableView& view, const at::Tensor& input) {
  auto [output, work] = start(view.executable, input);
  if (work) c10d::register_work(output, work);
  return {output, static_cast<bool>(work)};
}

// Defines functions on process groups and on the memory of tensors.
void define_groups_and_memory(py::module_& m) {
  m.def(
      "use_peer_copies",
      [](const std::string& group_name, const std::string& device_name, int64_t arena_bytes, int64_t min_bytes) {
        const c10::Device device(device_name);
        use_peer_copies(*group_named(group_name), device, {arena_bytes, min_bytes, timeout_of(group_name, device)});
      },
      py::arg("group_name"), py::arg("device"), py::arg("arena_bytes"), py::arg("min_bytes"),
      py::call_guard<py::gil_scoped_release>(),
      "Makes later gathers and messages of the group copy between arenas of `arena_bytes` per rank on the device; "
      "transfers of fewer than `min_bytes` still use the process group. All ranks of the group must call it. Raises "
      "ValueError if the device or the sizes do not allow it; see csrc/runtime/peers/peer_transport.h.");
  m.def(
      "connect_group",
      [](const std::string& group_name, const std::string& device) {
        if (const GroupLease lease = group_named(group_name)->lease()) lease->connect(c10::Device(device));
      },
      py::arg("group_name"), py::arg("device"), py::call_guard<py::gil_scoped_release>(),
      "Creates the group's communicator on a device, which otherwise happens in the first transfer. All ranks of the "
      "group must call it.");
  m.def(
      "record_use", [](const at::Tensor& tensor, const c10::Stream& stream) { record_use(tensor, stream); },
      py::arg("tensor"), py::arg("stream"),
      "Tells the allocator that `stream` uses the tensor's memory, so that the memory is not reused before the stream "
      "has finished its queued work.");
  m.def(
      "view_arena", &view_arena, py::arg("tensor"), py::arg("arena"), py::arg("offset_bytes"),
      "Makes `tensor` and all its views use the memory of `arena` from `offset_bytes` on. The previous content is not "
      "copied. Raises ValueError unless `tensor` is contiguous and fits into `arena`, a flat uint8 tensor on its "
      "device.");
  m.def("release_memory", &release_memory, py::arg("tensor"), py::arg("when_read"),
        "Drops the memory of `tensor`. An operator that reads the tensor or a view of it before the next `view_arena` "
        "raises RuntimeError with the message `when_read`.");
  m.def("fingerprint_of", &fingerprint_of, py::arg("tensor"), py::call_guard<py::gil_scoped_release>(),
        "Returns a hash of a tensor's content, of all bytes on CPU, else of three sums. Waits for the device.");
}

// Throws the error that run_into would throw for `out`.
void check_out_for(const ExecutableView& v, const at::Tensor& input, const at::Tensor& out) {
  check_out(v.executable, input, out);
}

// Returns the shapes of an executable's inputs.
std::vector<std::vector<int64_t>> input_shapes_of(const ExecutableView& v) {
  std::vector<std::vector<int64_t>> shapes;
  for (size_t i = 0; i < v.program().num_inputs(); ++i) shapes.push_back(v.program().buffers[i].shape);
  return shapes;
}

// Defines the properties of Executable.
void define_properties(py::class_<ExecutableView>& executable) {
  executable
      .def_property_readonly(
          "groups", [](const ExecutableView& v) { return members_of(v.program()); },
          "(mesh dims, ranks ascending) of each group the program communicates in.")
      .def_property_readonly(
          "input_shape", [](const ExecutableView& v) { return v.program().buffers[0].shape; },
          "The shape of the first input.")
      .def_property_readonly("input_shapes", &input_shapes_of, "The shapes of the inputs.")
      .def_property_readonly(
          "output_shape", [](const ExecutableView& v) { return v.program().outputs[0].shape; },
          "The shape of the first output.")
      .def_property_readonly(
          "is_identity", [](const ExecutableView& v) { return v.program().outputs[0].buffer == kInputBuffer; },
          "True if the result is the input itself.")
      .def_property_readonly("communications", &communications_of,
                             "For each step that communicates: op, reduce op or \"\", mesh dims, ranks of this rank's "
                             "group, group size, gather dim, shard dim.")
      .def_property_readonly("group_names", &group_names_of, "Registered names of the process groups.")
      .def_property_readonly(
          "communicates", [](const ExecutableView& v) { return v.compiled().communicates(); },
          "True if this rank communicates.")
      .def_property_readonly(
          "received_bytes", [](const ExecutableView& v) { return v.compiled().received_bytes(); },
          "Bytes that this rank receives from other ranks in a run.")
      .def_property_readonly("rank", [](const ExecutableView& v) { return to_int(v.compiled().rank()); })
      .def_property_readonly(
          "mesh_ranks", [](const ExecutableView& v) { return to_ints(v.executable->mesh_ranks()); },
          "The ranks of the mesh in row-major order; with two meshes, the ranks of both, ascending.")
      .def_property_readonly("signature", &signature_of,
                             "The properties that must be equal on all ranks that run the program, by name.")
      .def("__str__", [](const ExecutableView& v) { return v.compiled().origin().text(); });
}

// Defines the methods of Executable that run or start its program.
void define_runs(py::class_<ExecutableView>& executable) {
  using release_gil = py::call_guard<py::gil_scoped_release>;
  executable
      .def(
          "run", [](const ExecutableView& v, const at::Tensor& input) { return run(v.executable, input); },
          py::arg("input"), release_gil(),
          "Runs a program with one input and one output. Returns a new tensor, or `input` if there is nothing to do. "
          "Raises ValueError for an input of another shape or element size, and DistBackendError if a transfer fails.")
      .def(
          "run_into",
          [](const ExecutableView& v, const at::Tensor& input, const at::Tensor& out) {
            run_into(v.executable, input, out);
          },
          py::arg("input"), py::arg("out"), release_gil(),
          "Like `run`, but writes to `out`, which must be contiguous and not share memory with `input`. One exception: "
          "in a one-step gather of a 1-D tensor, `input` may be the part of `out` with the same elements.")
      .def("check_out", &check_out_for, py::arg("input"), py::arg("out"),
           "Raises the error that `run_into` would raise for `out`.")
      .def(
          "start", &start_registered, py::arg("input"), release_gil(),
          "Like `run`, but returns once the first transfers are under way: (result, True if it must be waited for with "
          "torch's `wait_tensor`).")
      .def(
          "start_into",
          [](const ExecutableView& v, const at::Tensor& input, const at::Tensor& out) {
            const auto work = start_into(v.executable, input, out);
            return work ? std::optional(work) : std::nullopt;
          },
          py::arg("input"), py::arg("out"), release_gil(),
          "Like `run_into`, but returns once the first transfers are under way: a Work to wait for, or None if `out` "
          "is complete.")
      .def(
          "run_all",
          [](const ExecutableView& v, const std::vector<at::Tensor>& inputs) { return run_all(v.executable, inputs); },
          py::arg("inputs"), release_gil(), "Runs a program with any number of inputs. Returns its outputs.");
}

}  // namespace

void define_executable(py::module_& m) {
  define_groups_and_memory(m);
  py::class_<ExecutableView> executable(m, "Executable",
                                        "A program bound to process groups, which it does not keep alive.");
  py::class_<CompiledView>(m, "CompiledProgram",
                           "One rank's program, compiled from a plan or from an operator's text (`compiled`).")
      .def(py::init([](const py::bytes& plan_bytes, int64_t rank) {
             return CompiledView{CompiledProgram::from_plan_bytes(std::string(plan_bytes), Rank{rank})};
           }),
           py::arg("plan_bytes"), py::arg("rank"),
           "`plan_bytes`: from `Plan.to_bytes`. Raises ValueError for other bytes, and if the rank is not on the mesh.")
      .def_property_readonly(
          "groups", [](const CompiledView& v) { return members_of(v.compiled->program()); },
          "(mesh dims, ranks ascending) of each group the program communicates in.")
      .def("bind", &bind, py::arg("group_names"),
           "Binds the program to process groups. `group_names` has a registered name for each item of `groups`. Raises "
           "ValueError if a process group has other ranks.");
  define_properties(executable);
  define_runs(executable);
  m.def(
      "compiled", [](const std::string& text, int64_t rank) { return CompiledView{compiled_of(text, Rank{rank})}; },
      py::arg("text"), py::arg("rank"),
      "Returns the program of a rank for an operator's text. Programs are cached, also for `executable`. Raises "
      "ValueError for other texts, and if the rank is not on the mesh.");
  m.def(
      "executable",
      [](const std::string& text, const std::vector<std::string>& groups, int64_t rank) {
        return ExecutableView{executable_of(text, groups, rank)};
      },
      py::arg("text"), py::arg("group_names"), py::arg("rank"),
      "Returns the executable of a rank for an operator's text, bound to these groups. It is cached. Raises ValueError "
      "for other texts and groups.");
}

}  // namespace shardwright
