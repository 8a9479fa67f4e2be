#include <torch/extension.h>

#include <chrono>
#include <thread>

#include "allocator.h"
#include "driver.h"

namespace py = pybind11;

void bind_process_group(py::module_& m);

namespace async_device {
uintptr_t copy_address();  // copies.cpp
}

struct CapturedGraph {
  std::shared_ptr<async_device::Graph> graph;
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace async_device;
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  m.def("set_delays", &set_delays, py::arg("seed"), py::arg("probability"), py::arg("max_microseconds"));
  m.def("set_poison", [](bool is_nan) { set_poison(is_nan ? Poison::kNan : Poison::kNumber); }, py::arg("is_nan"));
  m.def("synchronize", &synchronize_device, without_gil);
  m.def("current_device", [] { return device().index(); });
  m.def("set_device", [](int index) { set_device(static_cast<c10::DeviceIndex>(index)); });
  m.def("counts", [] {
    const Counts all = counts();
    return py::dict(py::arg("works") = all.works, py::arg("events") = all.events, py::arg("waits") = all.waits);
  });
  m.def("forbid_device", [](int index) { forbid_device(static_cast<c10::DeviceIndex>(index)); }, py::arg("index"));
  m.def("refuse_unknown_memory", &refuse_unknown_memory, py::arg("refuses"));
  m.def("empty_cache", &empty_cache, without_gil);
  m.def("forget_failure", &forget_failure);
  m.def("refuse_launch", &refuse_launch, py::arg("number"));
  m.def("launches_before_refusal", &launches_before_refusal);
  m.def("fail", &fail, py::arg("reason"));
  m.def("allocated_bytes", &allocated_bytes);
  m.def("peak_allocated_bytes", &peak_allocated_bytes);
  m.def("reset_peak", &reset_peak);
  py::class_<CapturedGraph>(m, "Graph")
      .def(py::init([] { return CapturedGraph{begin_capture()}; }))
      .def("end", [](const CapturedGraph& captured) { end_capture(captured.graph); })
      .def("replay", [](const CapturedGraph& captured) { replay(*captured.graph); }, without_gil);
  m.def("is_capturing", [] { return is_capturing(current_stream()); });
  m.def("copy_address", &copy_address);
  // Returns the functions of shardwright's CaptureQuery.
  m.def("capture_query_address", [] { return reinterpret_cast<uintptr_t>(&is_capturing); });
  // Keeps the current stream busy for some milliseconds, for tests that need a late stream.
  m.def("sleep", [](int64_t milliseconds) {
    enqueue(current_stream(), [milliseconds] { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); });
  });
#ifndef ASYNC_DEVICE_WITHOUT_GROUPS
  bind_process_group(m);
#endif
}
