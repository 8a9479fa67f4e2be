#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "process_group.h"
#include "symmetric_memory.h"

namespace py = pybind11;

void bind_process_group(py::module_& m) {
  using namespace async_device;
  using without_gil = py::call_guard<py::gil_scoped_release>;
  py::module_::import("torch.distributed");  // defines Backend

  py::class_<Rules>(m, "Rules")
      .def(py::init<>())
      .def_readwrite("is_eager", &Rules::is_eager)
      .def_readwrite("has_real_work", &Rules::has_real_work)
      .def_readwrite("is_high_priority", &Rules::is_high_priority)
      .def_readwrite("waits_block_host", &Rules::waits_block_host)
      .def_readwrite("records_streams", &Rules::records_streams)
      .def_readwrite("keeps_tensors", &Rules::keeps_tensors)
      .def_readwrite("holds_thread", &Rules::holds_thread)
      .def_readwrite("refuses_to_end", &Rules::refuses_to_end);

  py::class_<StrictGroup, c10d::Backend, c10::intrusive_ptr<StrictGroup>>(m, "StrictGroup")
      .def(py::init([](const StorePtr& store, int rank, int size, const std::string& name,
                       std::vector<int64_t> global_ranks, Milliseconds timeout, const Rules& rules) {
             return c10::make_intrusive<StrictGroup>(store, Place{name, rank, size, std::move(global_ranks)}, timeout,
                                                     rules);
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("name"), py::arg("global_ranks"),
           py::arg("timeout"), py::arg("rules"))
      .def("connect", &StrictGroup::connect, without_gil())
      .def("split_off", &StrictGroup::split_off, py::arg("store"), py::arg("ranks"), py::arg("name"),
           py::arg("timeout"), py::arg("rules"), without_gil())
      // PyTorch calls this on ranks outside a group that others split off.
      .def(
          "perform_nocolor_split",
          [](StrictGroup& group, const py::object&) {
            const py::gil_scoped_release release;
            group.split_off(nullptr, {}, "", Milliseconds::max(), {});
          },
          py::arg("device"));

  register_symmetric_memory();
  m.def("lose_signal", &lose_signal, py::arg("number"));
  m.def("lose_flag", &lose_flag, py::arg("number"));
  m.def("set_gloo_maker", &set_gloo_maker);
  m.def("process_group_counters", &counters);
  m.def("take_launched_groups", &take_launched_groups);
  // Returns the functions of shardwright's OpenGroupsQuery.
  m.def("open_groups_query_address", [] { return reinterpret_cast<uintptr_t>(&open_groups_of_thread); });
  m.def("refuse_message", &refuse_message, py::arg("number"));
  m.def("reset_process_group_counters", &reset_counters);
}
