// _runtime: batches of many tensors, received from _planner as bytes.
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "bindings/runtime_parts.h"
#include "runtime/batch.h"
#include "runtime/c10d/process_groups.h"

namespace shardwright {
namespace {

namespace py = pybind11;

std::shared_ptr<BoundBatch> bind_batch(const py::bytes& batch_bytes, int64_t rank, const std::string& group_name,
                                       const std::string& wire) {
  const std::string bytes(batch_bytes);
  const py::gil_scoped_release release;
  return std::make_shared<BoundBatch>(std::make_shared<const BatchPlan>(Batch::from_bytes(bytes)), Rank{rank},
                                      group_named(group_name), c10::Device(wire).type());
}

}  // namespace

void define_batch_runs(py::module_& m) {
  using release_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<BatchHandle>(m, "BatchHandle",
                          "A batch under way. On devices with streams, waiting makes the current stream wait.")
      .def("wait_for_sources", &BatchHandle::wait_for_sources, release_gil())
      .def("wait_for_destination", &BatchHandle::wait_for_destination, py::arg("destination"), release_gil())
      .def("wait_for_departure", &BatchHandle::wait_for_departure, py::arg("destination"), release_gil(),
           "Waits until a destination is complete on this rank and its elements for other ranks are sent.")
      .def("wait", &BatchHandle::wait, release_gil())
      .def("is_done", &BatchHandle::is_done)
      .def_property_readonly("departures", &BatchHandle::departures,
                             "Indices of the destinations, in the order in which `wait_for_departure` returns.");
  py::class_<BoundBatch, std::shared_ptr<BoundBatch>>(
      m, "BoundBatch",
      "One rank's part of a batch, bound to the group whose ranks the batch names. It does not keep the group "
      "alive.\n\n`wire` is the device type of the tensors that the group transfers.")
      .def(py::init(&bind_batch), py::arg("batch_bytes"), py::arg("rank"), py::arg("group_name"), py::arg("wire"))
      .def("run", &BoundBatch::run, py::arg("sources"), py::arg("destinations"), release_gil())
      .def("start", &BoundBatch::start, py::arg("sources"), py::arg("destinations"), release_gil());
}

}  // namespace shardwright
