// _runtime: batches of many tensors, which come from _planner as bytes.
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "batch/batch_program.h"
#include "bindings/runtime_parts.h"
#include "runtime/batch_run.h"
#include "runtime/c10d/process_groups.h"

namespace shardwright {
namespace {

namespace py = pybind11;

// pybind11 has no holder for const objects.
struct BatchExecutableView {
  std::shared_ptr<const BatchExecutable> executable;
};

BatchExecutableView bind_batch(const std::string& bytes, int64_t rank, const std::string& group_name,
                               const std::string& wire) {
  auto plan = std::make_shared<const BatchPlan>(Batch::from_bytes(bytes));
  auto program = std::make_shared<const BatchProgram>(std::move(plan), Rank{rank});
  return {
      std::make_shared<const BatchExecutable>(std::move(program), group_named(group_name), c10::Device(wire).type())};
}

// For each destination the last round, of those in which this rank takes part, that sends or receives something of it;
// -1 for none.
std::vector<int> last_rounds(const BatchExecutable& executable) {
  const BatchProgram& program = executable.program();
  const Batch& batch = program.plan().batch();
  std::vector<int> last(batch.destinations.size(), -1);
  for (size_t r = 0; r < program.rounds().size(); ++r) {
    for (const auto* messages : {&program.rounds()[r].sends, &program.rounds()[r].receives}) {
      for (const BatchMessage& message : *messages) {
        for (const BatchFragment& fragment : message.fragments) {
          last[batch.items[fragment.item].destination] = static_cast<int>(r);
        }
      }
    }
  }
  return last;
}

}  // namespace

void define_batch_runs(py::module_& m) {
  using release_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<BatchHandle>(m, "BatchHandle")
      .def("wait_for_sources", &BatchHandle::wait_for_sources, release_gil())
      .def("wait_for_destination", &BatchHandle::wait_for_destination, py::arg("destination"), release_gil())
      .def("wait_for_round", &BatchHandle::wait_for_round, py::arg("round"), release_gil())
      .def("wait", &BatchHandle::wait, release_gil())
      .def("is_done", &BatchHandle::is_done);
  py::class_<BatchExecutableView>(m, "BatchExecutable")
      .def(py::init(&bind_batch), py::arg("batch_bytes"), py::arg("rank"), py::arg("group_name"), py::arg("wire"),
           release_gil())
      .def_property_readonly("received_bytes",
                             [](const BatchExecutableView& v) { return v.executable->received_bytes(); })
      .def_property_readonly("num_rounds",  // in which this rank takes part
                             [](const BatchExecutableView& v) { return v.executable->program().rounds().size(); })
      .def_property_readonly("last_rounds", [](const BatchExecutableView& v) { return last_rounds(*v.executable); })
      .def(
          "run",
          [](const BatchExecutableView& v, std::vector<at::Tensor> sources, std::vector<at::Tensor> destinations) {
            run_batch(v.executable, std::move(sources), std::move(destinations));
          },
          py::arg("sources"), py::arg("destinations"), release_gil())
      .def(
          "start",
          [](const BatchExecutableView& v, std::vector<at::Tensor> sources, std::vector<at::Tensor> destinations) {
            return start_batch(v.executable, std::move(sources), std::move(destinations));
          },
          py::arg("sources"), py::arg("destinations"), release_gil());
}

}  // namespace shardwright
