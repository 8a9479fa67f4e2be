// The extension module _runtime: the executor for Python. It receives plans from _planner as bytes.
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <limits>

#include "bindings/arguments.h"
#include "bindings/runtime_parts.h"
#include "runtime/c10d/process_groups.h"
#include "runtime/executor.h"
#include "runtime/gemm.h"
#include "runtime/issue_order.h"
#include "runtime/local_ops.h"
#include "runtime/open_groups.h"
#include "runtime/operators.h"
#include "runtime/peers/peer_transport.h"
#include "runtime/progress.h"
#include "runtime/side_stream.h"
#include "runtime/staging.h"
#include "runtime/trace.h"
#include "support/error.h"

namespace py = pybind11;

namespace shardwright {
namespace {

// True if this thread runs plain eager code: no dispatch mode, trace or transform is active, and no backward runs. With
// `allow_backward`, a backward may run.
bool is_plain_eager(bool allow_backward) {
  return !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::PythonDispatcher) &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) &&
         (allow_backward || torch::autograd::get_current_node() == nullptr);
}

// Defines functions that return the state of the calling thread.
void define_thread_state(py::module_& m) {
  m.def("is_plain_eager", &is_plain_eager, py::arg("allow_backward"),
        "Returns True if this thread runs plain eager code: no dispatch mode, trace or transform is active, and no "
        "backward runs. With `allow_backward`, a backward may run.");
  m.def("thread_id", &at::RecordFunction::currentThreadId, "Returns the number that autograd gives to this thread.");
  m.def(
      "thread_of_current_node",
      [] {
        const auto node = torch::autograd::get_current_node();
        return node ? node->thread_id() : at::RecordFunction::currentThreadId();
      },
      "Returns the number (see `thread_id`) of the thread that ran the forward of the node whose backward is running, "
      "or of this thread if no backward runs. On devices other than CPU backwards run on threads of autograd.");
}

// Defines functions that change how autograd treats tensors.
void define_autograd(py::module_& m) {
  m.def(
      "as_view",
      [](const at::Tensor& base, const at::Tensor& part) {
        return torch::autograd::as_view(base, part, /*is_bw_differentiable=*/true, /*is_fw_differentiable=*/false,
                                        nullptr, nullptr, torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION);
      },
      py::arg("base"), py::arg("part"),
      "Returns `part` as a view of `base` for autograd. `part` must be new and not require a gradient. Autograd does "
      "not support writes in place to such a view: they raise RuntimeError if a gradient would be wrong.");
}

// Defines a function that swaps the memory of tensors.
void define_memory(py::module_& m) {
  m.def(
      "exchange_memory",
      [](const at::Tensor& a, const at::Tensor& b) {
        c10::StorageImpl& first = *a.storage().unsafeGetStorageImpl();
        c10::StorageImpl& second = *b.storage().unsafeGetStorageImpl();
        check_invariant(first.nbytes() == second.nbytes() && a.device() == b.device(),
                        "storages that swap memory have ", first.nbytes(), " and ", second.nbytes(),
                        " bytes, or are on different devices");
        if (&first == &second) return;
        c10::DataPtr of_first = first.set_data_ptr(c10::DataPtr(nullptr, a.device()));
        first.set_data_ptr_noswap(second.set_data_ptr(std::move(of_first)));
      },
      py::arg("a"), py::arg("b"),
      "Swaps the memory of the storages of two tensors, which must have equal sizes. All tensors on these storages are "
      "affected.");
}

// Defines functions that take a trace.
void define_tracing(py::module_& m) {
  m.def("begin_trace", &begin_trace, "Begins a trace. Discards the events of a trace that was not ended.");
  m.def(
      "end_trace",
      [] {
        std::vector<std::tuple<std::string, std::string, int64_t, int64_t, double, double>> events;
        for (TraceEvent& e : end_trace()) {
          events.emplace_back(std::move(e.lane), std::move(e.instruction), e.chunk, e.run, e.start, e.end);
        }
        return events;
      },
      py::call_guard<py::gil_scoped_release>(),
      "Ends the trace and returns its events: lane (``\"compute\"`` or ``\"communication\"``), instruction, chunk or "
      "-1, number of the run, and start and end in seconds since `begin_trace`.");
}

// Defines hooks for devices that are implemented in an extension of torch.
void define_devices(py::module_& m) {
  m.def(
      "register_capture_query",
      [](const std::string& device_type, uintptr_t address) {
        register_capture_query(c10::Device(device_type).type(), reinterpret_cast<CaptureQuery>(address));
      },
      py::arg("device_type"), py::arg("address"),
      "Registers the CaptureQuery (csrc/runtime/side_stream.h) at this address. Needed before torch 2.15.");
  m.def(
      "register_open_groups_query",
      [](const std::string& device_type, uintptr_t address) {
        register_open_groups_query(c10::Device(device_type).type(), reinterpret_cast<OpenGroupsQuery>(address));
      },
      py::arg("device_type"), py::arg("address"),
      "Registers the OpenGroupsQuery (csrc/runtime/open_groups.h) at this address.");
  m.def(
      "check_no_open_group", [](const std::string& device) { check_no_open_group(c10::Device(device)); },
      py::arg("device"),
      "Raises RuntimeError if this thread has an open group of transfers for this type of device: on CUDA, of NCCL "
      "calls; on other types, as reported by the query from `register_open_groups_query`.");
  m.def("num_stream_events_made", &num_stream_events_made, "Returns the number of device events that were created.");
  m.def(
      "register_device_copy",
      [](const std::string& device_type, uintptr_t address) {
        register_device_copy(c10::Device(device_type).type(), reinterpret_cast<DeviceCopy>(address));
      },
      py::arg("device_type"), py::arg("address"),
      "Registers the DeviceCopy (csrc/runtime/local_ops.h) at this address.");
  m.def(
      "is_capturing", [](const std::string& device) { return is_capturing(c10::Device(device)); }, py::arg("device"),
      "Returns True if a graph is being captured on the current stream of a device, such as ``\"cuda:0\"``.");
}

// Defines settings of the process, and functions on caches.
void define_settings(py::module_& m) {
  m.def(
      "set_sm_carveout",
      [](const Typed<int64_t>& sms) {
        const int64_t count = integer(sms, "sms");
        check_argument(count <= std::numeric_limits<int>::max(), "sms", InRange{0, std::numeric_limits<int>::max()},
                       count);
        set_sm_carveout(static_cast<int>(count));
      },
      py::arg("sms"),
      "Sets the number of multiprocessors that products leave to the kernels of transfers under way.\n\nThis applies "
      "to products that cuBLASLt computes on CUDA. It is a hint, whose effect depends on the kernel. 0, the initial "
      "value, means the number in each product's schedule. The setting is per process; ranks may differ. Raises "
      "ValueError if `sms` is negative.");
  m.def(
      "set_fast_accumulation",
      [](const Typed<bool>& enabled) {
        if (!py::isinstance<py::bool_>(enabled)) {
          throw UserError(concat("enabled must be True or False, got ", shown(enabled)));
        }
        const bool before = fast_accumulation();
        set_fast_accumulation(enabled.cast<bool>());
        return before;
      },
      py::arg("enabled"),
      "Sets whether scaled products of 8-bit floats accumulate fast, like ``use_fast_accum=True`` of torch's "
      "scaled_mm.\n\nThis applies to products that cuBLASLt computes on CUDA. With True, sums keep the precision of "
      "the tensor cores, about 14 bits, which is faster on Hopper. With False, they are added to float32 accumulators "
      "at intervals. The setting is per process and initially False, as in torch; if ranks differ, so may the bits of "
      "their results. Returns the previous setting. Raises ValueError for anything but a bool.");
  m.def("invalidate_sized_plans", &invalidate_sized_plans,
        "Makes operators with sizes plan again. Must be called after each change of `tables.current`.");
  m.def("set_check_ranks", &set_check_ranks, py::arg("enabled"),
        "Sets whether all ranks compare the program of each operator before anything is sent (`check_ranks`).");
  m.def("cached_staging_bytes", &cached_staging_bytes,
        "Returns the size of the memory that is cached for temporaries on CPU, without memory in use.");
  m.def("release_staging", &release_staging,
        "Frees the memory that is cached for temporaries on CPU (at most 256 MiB).");
}

// Defines functions on asynchronous programs, and counters.
void define_programs_under_way(py::module_& m) {
  m.def("finish_programs", &finish_programs, py::arg("timeout_seconds"), py::call_guard<py::gil_scoped_release>(),
        "Waits until all asynchronous programs on CPU are finished, but at most `timeout_seconds`. Then stops the "
        "progress threads, even if programs are left. For the end of the process. Returns True if all programs were "
        "finished in time.");
  m.def(
      "drain",
      [](const std::vector<std::string>& groups) {
        for (const std::string& name : groups) issue_order_of(*group_named(name)).drain();
      },
      py::arg("groups"), py::call_guard<py::gil_scoped_release>(),
      "Makes every program on CPU that uses one of these process groups (names) start all its transfers.");
  m.def(
      "counters",
      [] {
        return py::typing::Dict<py::str, py::int_>(
            py::arg("runs") = counters().runs.load(), py::arg("received_bytes") = counters().received_bytes.load(),
            py::arg("peer_bytes") = peer_bytes().load(), py::arg("compiled") = counters().compiled.load(),
            py::arg("through_host") = counters().through_host.load());
      },
      "Returns counts since the last reset: runs, bytes received from other ranks, bytes copied from peers' arenas, "
      "programs compiled from an operator's text, and runs on copies in host memory.");
  m.def(
      "cast_products", &cast_products,
      "Returns the number of products of 8-bit floats that were cast to float32 on devices other than CPU, by reason.");
  m.def(
      "reset_counters",
      [] {
        reset_cast_products();
        counters().runs = 0;
        counters().received_bytes = 0;
        peer_bytes() = 0;
        counters().compiled = 0;
        counters().through_host = 0;
      },
      "Sets `counters` and `cast_products` to 0.");
}

}  // namespace
}  // namespace shardwright

PYBIND11_MODULE(_runtime, m) {
  m.doc() = "The extension module that runs programs over c10d process groups. Import torch before it.";
  m.attr("torch_version") = TORCH_VERSION;
#ifdef SHARDWRIGHT_CUDA
  m.attr("has_cuda") = true;
#else
  m.attr("has_cuda") = false;
#endif
  shardwright::register_errors();
  shardwright::define_executable(m);
  shardwright::define_kernels(m);
  shardwright::define_experts(m);
  shardwright::define_batch_runs(m);
  shardwright::define_thread_state(m);
  shardwright::define_autograd(m);
  shardwright::define_memory(m);
  shardwright::define_tracing(m);
  shardwright::define_devices(m);
  shardwright::define_settings(m);
  shardwright::define_programs_under_way(m);
}
