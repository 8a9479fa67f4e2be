// _runtime: the executor for Python. Plans come as bytes from _planner.
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <limits>

#include "bindings/arguments.h"
#include "runtime/executor.h"
#include "runtime/gemm.h"
#include "runtime/local_ops.h"
#include "runtime/operators.h"
#include "runtime/progress.h"
#include "runtime/side_stream.h"
#include "runtime/staging.h"
#include "runtime/trace.h"
#include "support/error.h"

namespace py = pybind11;

namespace shardwright {
namespace {

// Process groups by their registered names, in the order of program().groups.
void bind_groups(Executable& executable, const std::vector<std::string>& names) {
  std::vector<comm::GroupPtr> groups;
  for (const std::string& name : names) groups.push_back(c10d::resolve_process_group(name));
  executable.bind(groups);
}

// Whether no mode, trace or transform is to see what this thread does, and no backward is under way, or may be.
bool nothing_watches(bool in_backward) {
  return !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::PythonDispatcher) &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) &&
         (in_backward || torch::autograd::get_current_node() == nullptr);
}

}  // namespace
}  // namespace shardwright

PYBIND11_MODULE(_runtime, m) {
  using shardwright::Executable;
  m.doc() = "The executor of shardwright: programs over c10d process groups.";
  shardwright::register_errors();

  py::class_<Executable, std::shared_ptr<Executable>>(m, "Executable")
      .def(py::init<const std::string&, int64_t>(), py::arg("plan_bytes"), py::arg("rank"))
      .def_property_readonly("groups",
                             [](const Executable& e) {
                               std::vector<std::pair<std::vector<int>, std::vector<int64_t>>> groups;
                               for (const auto& group : e.program().groups) {
                                 groups.emplace_back(group.mesh_dims.to_vector(), group.ranks);
                               }
                               return groups;
                             })
      .def_property_readonly("input_shape", [](const Executable& e) { return e.program().input_shapes[0]; })
      .def_property_readonly("output_shape", [](const Executable& e) { return e.program().outputs[0].shape; })
      .def_property_readonly(
          "is_identity", [](const Executable& e) { return e.program().outputs[0].buffer == shardwright::kInputBuffer; })
      .def_property_readonly(
          "communications",
          [](const Executable& e) {
            using Parts = std::tuple<std::string, std::string, std::vector<int>, int64_t, int64_t, int64_t>;
            std::vector<Parts> all;
            for (const auto& c : e.communications()) {
              all.emplace_back(c.op, c.reduce_op, c.mesh_dims, c.group_size, c.gather_dim, c.shard_dim);
            }
            return all;
          })
      .def_property_readonly("group_names",
                             [](const Executable& e) {
                               std::vector<std::string> names;
                               for (const auto& group : e.groups()) names.push_back(group->getGroupName());
                               return names;
                             })
      .def_property_readonly("communicates", &Executable::communicates)
      .def_property_readonly("received_bytes", &Executable::received_bytes)
      .def_property_readonly("rank", &Executable::rank)
      .def_property_readonly("mesh_ranks", &Executable::mesh_ranks)
      .def_property_readonly("signature",
                             [](const Executable& e) {
                               py::dict fields;
                               for (const auto& [name, value] : e.signature()) fields[py::str(name)] = value;
                               return fields;
                             })
      .def("bind", &shardwright::bind_groups, py::arg("group_names"))
      .def("run", &Executable::run, py::arg("input"), py::call_guard<py::gil_scoped_release>())
      .def(
          "start",
          [](const Executable& e, const at::Tensor& input) {
            auto [output, work] = e.start(input);
            if (work) c10d::register_work(output, work);
            return std::make_pair(output, static_cast<bool>(work));
          },
          py::arg("input"), py::call_guard<py::gil_scoped_release>())
      .def(
          "run_all", [](const Executable& e, const std::vector<at::Tensor>& inputs) { return e.run_all(inputs); },
          py::arg("inputs"), py::call_guard<py::gil_scoped_release>())
      .def("__str__", &Executable::text);
  m.def(
      "executable",
      [](const std::string& text, const std::vector<std::string>& groups, int64_t rank) {
        return std::const_pointer_cast<Executable>(shardwright::executable_of(text, groups, rank));
      },
      py::arg("text"), py::arg("group_names"), py::arg("rank"));

  using shardwright::StridedCopy;
  using BoxParts = std::tuple<int64_t, int64_t, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>>;
  py::class_<StridedCopy>(m, "StridedCopy")
      .def(py::init([](const std::vector<BoxParts>& parts, int64_t item_bytes) {
             std::vector<shardwright::Box> boxes;
             for (const auto& [src_offset, dst_offset, sizes, src_strides, dst_strides] : parts) {
               boxes.push_back({src_offset, dst_offset, sizes, src_strides, dst_strides});
             }
             return StridedCopy(boxes, item_bytes);
           }),
           py::arg("boxes"), py::arg("item_bytes"))
      .def(
          "run",
          [](const StridedCopy& copy, const at::Tensor& src, at::Tensor dst) { shardwright::run(copy, src, dst); },
          py::arg("src"), py::arg("dst"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "reduce_parts",
      [](const std::string& op, const std::vector<at::Tensor>& parts, double divisor, at::Tensor dst, bool with_aten) {
        const auto reduce =
            with_aten ? shardwright::reduce_parts_with_aten
                      : static_cast<decltype(&shardwright::reduce_parts_with_aten)>(shardwright::reduce_parts);
        reduce(shardwright::Placement::parse(shardwright::concat("P(", op, ")")).op, parts, divisor, dst);
      },
      py::arg("op"), py::arg("parts"), py::arg("divisor"), py::arg("dst"), py::arg("with_aten") = false,
      py::call_guard<py::gil_scoped_release>());

  using shardwright::Gemm;
  using Place = std::array<int64_t, 3>;  // offset, row stride, column stride
  const auto matrix = [](const Place& place) { return shardwright::Matrix{0, place[0], place[1], place[2]}; };
  py::class_<Gemm>(m, "Gemm")
      .def(py::init([matrix](const std::array<int64_t, 3>& sizes, const Place& lhs, const Place& rhs, const Place& dst,
                             int64_t count, const std::array<int64_t, 3>& batch_strides, bool accumulates,
                             const std::optional<Place>& bias) {
             Gemm gemm{matrix(lhs), matrix(rhs),      matrix(dst),      sizes[0],         sizes[1],   sizes[2],
                       count,       batch_strides[0], batch_strides[1], batch_strides[2], accumulates};
             if (bias) gemm.bias = matrix(*bias);
             return gemm;
           }),
           py::arg("sizes"), py::arg("lhs"), py::arg("rhs"), py::arg("dst"), py::arg("count") = 1,
           py::arg("batch_strides") = std::array<int64_t, 3>{}, py::arg("accumulates") = false,
           py::arg("bias") = py::none())
      .def(
          "multiply",
          [](const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, at::Tensor dst,
             const std::optional<at::Tensor>& bias,
             int sms_left) { shardwright::multiply(gemm, lhs, rhs, dst, bias.value_or(at::Tensor()), {sms_left}); },
          py::arg("lhs"), py::arg("rhs"), py::arg("dst"), py::arg("bias") = py::none(), py::arg("sms_left") = 0,
          py::call_guard<py::gil_scoped_release>())
      .def(
          "multiply_scaled",
          [](Gemm gemm, const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& lhs_scale,
             const at::Tensor& rhs_scale, at::Tensor dst, int sms_left, bool fast_accumulation) {
            gemm.lhs_scale = shardwright::Scale{0, 0, lhs_scale.numel() == 1 ? 0 : lhs_scale.stride(0)};
            gemm.rhs_scale = shardwright::Scale{0, 0, rhs_scale.numel() == 1 ? 0 : rhs_scale.stride(0)};
            shardwright::multiply_scaled(gemm, lhs, rhs, lhs_scale, rhs_scale, dst, {sms_left, fast_accumulation});
          },
          py::arg("lhs"), py::arg("rhs"), py::arg("lhs_scale"), py::arg("rhs_scale"), py::arg("dst"),
          py::arg("sms_left") = 0, py::arg("fast_accumulation") = false, py::call_guard<py::gil_scoped_release>())
      .def(
          "why_not_scaled",
          [](const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& dst) {
            return shardwright::why_not_scaled(gemm, lhs, rhs, dst);
          },
          py::arg("lhs"), py::arg("rhs"), py::arg("dst"))
      .def(
          "waves",
          [](const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& dst, int sms_left) {
            return shardwright::waves_of(gemm, lhs.scalar_type(), dst.scalar_type(), dst.device(), {sms_left});
          },
          py::arg("lhs"), py::arg("dst"), py::arg("sms_left") = 0);

  m.def("nothing_watches", &shardwright::nothing_watches, py::arg("in_backward"));
  // As autograd numbers threads: of this one, and of that which made the node whose backward runs now. Backwards of
  // nodes on other devices than CPU run on threads of autograd's.
  m.def("thread_id", &at::RecordFunction::currentThreadId);
  m.def("thread_of_current_node", [] {
    const auto node = torch::autograd::get_current_node();
    return node ? node->thread_id() : at::RecordFunction::currentThreadId();
  });
  m.def("begin_trace", &shardwright::begin_trace);
  m.def(
      "end_trace",
      [] {
        std::vector<std::tuple<std::string, std::string, int64_t, int64_t, double, double>> events;
        for (shardwright::TraceEvent& e : shardwright::end_trace()) {
          events.emplace_back(std::move(e.lane), std::move(e.instruction), e.chunk, e.run, e.start, e.end);
        }
        return events;
      },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "set_sm_carveout",
      [](const py::object& sms) {
        const int64_t count = shardwright::integer(sms, "sms");
        shardwright::check_user(count <= std::numeric_limits<int>::max(), "sms: ", count, "; no GPU has as many");
        shardwright::set_sm_carveout(static_cast<int>(count));
      },
      py::arg("sms"));
  // For a device that torch knows from an extension, before torch 2.15: the address of a CaptureQuery.
  m.def(
      "register_capture_query",
      [](const std::string& device_type, uintptr_t address) {
        shardwright::register_capture_query(c10::Device(device_type).type(),
                                            reinterpret_cast<shardwright::CaptureQuery>(address));
      },
      py::arg("device_type"), py::arg("address"));
  // Likewise the address of a DeviceCopy.
  m.def(
      "register_device_copy",
      [](const std::string& device_type, uintptr_t address) {
        shardwright::register_device_copy(c10::Device(device_type).type(),
                                          reinterpret_cast<shardwright::DeviceCopy>(address));
      },
      py::arg("device_type"), py::arg("address"));
  m.def(
      "is_capturing", [](const std::string& device) { return shardwright::is_capturing(c10::Device(device)); },
      py::arg("device"));
  m.def(
      "set_fast_accumulation",
      [](const py::object& enabled) {
        shardwright::check_user(py::isinstance<py::bool_>(enabled), "enabled: got ",
                                std::string(py::str(py::repr(enabled))), "; allowed are True and False");
        const bool before = shardwright::fast_accumulation();
        shardwright::set_fast_accumulation(enabled.cast<bool>());
        return before;
      },
      py::arg("enabled"));
  m.def("kept_staging_bytes", &shardwright::kept_staging_bytes);
  m.def("release_staging", &shardwright::release_staging);
  m.def("finish_programs", &shardwright::finish_programs, py::arg("timeout_seconds"),
        py::call_guard<py::gil_scoped_release>());
  m.def("drain", &shardwright::drain_lanes, py::call_guard<py::gil_scoped_release>());
  m.def("counters", [] {
    return py::dict(py::arg("runs") = shardwright::counters().runs.load(),
                    py::arg("received_bytes") = shardwright::counters().received_bytes.load(),
                    py::arg("through_host") = shardwright::counters().through_host.load());
  });
  m.def("cast_products", &shardwright::cast_products);
  m.def("reset_counters", [] {
    shardwright::reset_cast_products();
    shardwright::counters().runs = 0;
    shardwright::counters().received_bytes = 0;
    shardwright::counters().through_host = 0;
  });
  m.attr("torch_version") = TORCH_VERSION;
#ifdef SHARDWRIGHT_CUDA
  m.attr("has_cuda") = true;
#else
  m.attr("has_cuda") = false;
#endif
}
