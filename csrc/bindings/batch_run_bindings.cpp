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

// The constructor of BoundBatch in Python.
std::shared_ptr<BoundBatch> bind_batch(const py::bytes& batch_bytes, int64_t rank, const std::string& group_name,
                                       const std::string& group_device) {
  const std::string bytes(batch_bytes);
  const py::gil_scoped_release release;
  return std::make_shared<BoundBatch>(std::make_shared<const BatchPlan>(Batch::from_bytes(bytes)), Rank{rank},
                                      group_named(group_name), c10::Device(group_device).type());
}

}  // namespace

void define_batch_runs(py::module_& m) {
  using release_gil = py::call_guard<py::gil_scoped_release>;
  py::class_<BatchHandle>(m, "BatchHandle",
                          "A batch that was started. On CPU a wait blocks the caller; on devices with streams it makes "
                          "the current stream wait. Every wait raises DistBackendError if the batch has failed.")
      .def("wait_for_sources", &BatchHandle::wait_for_sources, release_gil(),
           "Waits until no source is read any more, so that the sources may change.")
      .def("wait_for_destination", &BatchHandle::wait_for_destination, py::arg("destination"), release_gil(),
           "Waits until this rank's part of a destination, given by its index, is complete.")
      .def("wait_for_destination_and_sends", &BatchHandle::wait_for_destination_and_sends, py::arg("destination"),
           release_gil(),
           "Waits until this rank's part of a destination is complete, and this rank has sent all elements that it "
           "sends to the destination's parts on other ranks.")
      .def("wait", &BatchHandle::wait, release_gil(), "Waits for the end of the batch.")
      .def("is_done", &BatchHandle::is_done, "Returns True once the batch has ended; does not wait.")
      .def_property_readonly(
          "completion_order", &BatchHandle::completion_order,
          "Indices of the destinations, in the order in which `wait_for_destination_and_sends` returns for them.");
  py::class_<BoundBatch, std::shared_ptr<BoundBatch>>(m, "BoundBatch",
                                                      "One rank's part of a batch, bound to a process group that has "
                                                      "all ranks of the batch's layouts. It does not keep the group "
                                                      "alive.")
      .def(
          py::init(&bind_batch), py::arg("batch_bytes"), py::arg("rank"), py::arg("group_name"),
          py::arg("group_device"),
          "`batch_bytes`: from `Batch.to_bytes`. `group_device`: the type of device whose tensors the group transfers, "
          "``\"cpu\"`` for Gloo. Raises ValueError if a rank of the layouts is not in the group.")
      .def("run", &BoundBatch::run, py::arg("sources"), py::arg("destinations"), release_gil(),
           "Fills `destinations`. Both lists have this rank's parts, with the shapes and dtypes of their layouts. "
           "Raises ValueError for other tensors, and DistBackendError if a transfer fails.")
      .def("start", &BoundBatch::start, py::arg("sources"), py::arg("destinations"), release_gil(),
           "Like `run`, but returns once the first transfers are under way. Sources must not change before "
           "`wait_for_sources` returns.");
}

}  // namespace shardwright
