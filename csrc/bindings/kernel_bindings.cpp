// _runtime: single local copies, reductions and products, for tests and calibration.
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/runtime_parts.h"
#include "layout/placement.h"
#include "runtime/gemm.h"
#include "runtime/local_ops.h"
#include "support/error.h"

namespace shardwright {

namespace py = pybind11;

namespace {

// Defines StridedCopy and reduce_parts.
void define_copies_and_sums(py::module_& m) {
  // The fields of Box: src_offset, dst_offset, sizes, src_strides, dst_strides.
  using BoxParts = std::tuple<int64_t, int64_t, std::vector<int64_t>, std::vector<int64_t>, std::vector<int64_t>>;
  py::class_<StridedCopy>(
      m, "StridedCopy",
      "A copy of boxes between two tensors, as in packing and unpacking, for tests and benchmarks.\n\nA box is "
      "``(src_offset, dst_offset, sizes, src_strides, dst_strides)``, in elements of `item_bytes` bytes, outermost dim "
      "first. Nothing is checked.")
      .def(py::init([](const std::vector<BoxParts>& parts, int64_t item_bytes) {
             std::vector<Box> boxes;
             for (const auto& [src_offset, dst_offset, sizes, src_strides, dst_strides] : parts) {
               boxes.push_back({src_offset, dst_offset, sizes, src_strides, dst_strides});
             }
             return StridedCopy(boxes, item_bytes);
           }),
           py::arg("boxes"), py::arg("item_bytes"))
      .def(
          "run", [](const StridedCopy& copy, const at::Tensor& src, at::Tensor dst) { run(copy, src, dst); },
          py::arg("src"), py::arg("dst"), py::call_guard<py::gil_scoped_release>(),
          "Copies the boxes from `src` to `dst`: flat tensors of one dtype on one device, which must not overlap.");
  m.def(
      "reduce_parts",
      [](const std::string& op, const std::vector<at::Tensor>& parts, double divisor, at::Tensor dst, bool with_aten) {
        const auto reduce =
            with_aten ? reduce_parts_with_aten : static_cast<decltype(&reduce_parts_with_aten)>(reduce_parts);
        reduce(Placement::parse(concat("P(", op, ")")).op, parts, divisor, dst);
      },
      py::arg("op"), py::arg("parts"), py::arg("divisor"), py::arg("dst"), py::arg("with_aten") = false,
      py::call_guard<py::gil_scoped_release>(),
      "Computes dst = (op over the parts, in order) / divisor, for tests and benchmarks.\n\n`op` is a reduction, such "
      "as ``\"sum\"``. All tensors are flat, of one size, dtype and device. With `with_aten`, ATen computes it, as on "
      "devices for which shardwright has no reduction. Nothing is checked.");
}

// Defines the class Gemm.
void define_gemm(py::module_& m) {
  using Strides = std::array<int64_t, 3>;  // offset, row stride, column stride
  const auto matrix = [](const Strides& strides) { return Matrix{kInputBuffer, strides[0], strides[1], strides[2]}; };
  py::class_<Gemm>(
      m, "Gemm",
      "A product dst = lhs x rhs of matrices in flat tensors, or a batch of `count` products, for tests and "
      "benchmarks.\n\n`sizes` are (m, n, k). A matrix is ``(offset, row_stride, column_stride)`` in elements; "
      "`batch_strides` are those of lhs, rhs and dst. With `accumulates`, the product is added to dst; otherwise the "
      "matrix at `bias`, if given, is added to every product. Nothing is checked.")
      .def(py::init([matrix](const std::array<int64_t, 3>& sizes, const Strides& lhs, const Strides& rhs,
                             const Strides& dst, int64_t count, const std::array<int64_t, 3>& batch_strides,
                             bool accumulates, const std::optional<Strides>& bias) {
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
             int sms_left) { multiply(gemm, lhs, rhs, dst, bias.value_or(at::Tensor()), {sms_left}); },
          py::arg("lhs"), py::arg("rhs"), py::arg("dst"), py::arg("bias") = py::none(), py::arg("sms_left") = 0,
          py::call_guard<py::gil_scoped_release>(),
          "Computes the product. lhs and rhs have one floating dtype; dst has the same dtype, or float32. The product "
          "leaves `sms_left` multiprocessors unused.")
      .def(
          "multiply_scaled",
          [](Gemm gemm, const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& lhs_scale,
             const at::Tensor& rhs_scale, at::Tensor dst, int sms_left, bool fast_accumulation) {
            gemm.lhs_scale = Scale{kInputBuffer, 0, lhs_scale.numel() == 1 ? 0 : lhs_scale.stride(0)};
            gemm.rhs_scale = Scale{kInputBuffer, 0, rhs_scale.numel() == 1 ? 0 : rhs_scale.stride(0)};
            multiply_scaled(gemm, lhs, rhs, lhs_scale, rhs_scale, dst, {sms_left, fast_accumulation});
          },
          py::arg("lhs"), py::arg("rhs"), py::arg("lhs_scale"), py::arg("rhs_scale"), py::arg("dst"),
          py::arg("sms_left") = 0, py::arg("fast_accumulation") = false, py::call_guard<py::gil_scoped_release>(),
          "Computes the product of 8-bit floats with float32 scales, into bfloat16 or float32.\n\nA scale has one "
          "element, or one per row of lhs or column of rhs. Raises ValueError for other dtypes.")
      .def(
          "why_not_scaled",
          [](const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& dst) {
            return why_not_scaled(gemm, lhs, rhs, dst);
          },
          py::arg("lhs"), py::arg("rhs"), py::arg("dst"),
          "Returns the reason why hardware for 8-bit floats cannot compute this scaled product, or None if it can.")
      .def(
          "waves",
          [](const Gemm& gemm, const at::Tensor& lhs, const at::Tensor& dst, int sms_left) {
            return waves_of(gemm, lhs.scalar_type(), dst.scalar_type(), dst.device(), {sms_left});
          },
          py::arg("lhs"), py::arg("dst"), py::arg("sms_left") = 0,
          "Returns the number of waves of tiles in which dst's device computes the product, or None if it does not "
          "report it.");
}

}  // namespace

void define_kernels(py::module_& m) {
  define_copies_and_sums(m);
  define_gemm(m);
}

}  // namespace shardwright
