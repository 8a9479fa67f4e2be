// _planner, continued: products in chunks, their predicted times and their programs.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "bindings/arguments.h"
#include "bindings/views.h"
#include "overlap/matmul.h"
#include "overlap/timeline.h"

namespace py = pybind11;

namespace shardwright {
namespace {

// Wrapped, because pybind11 takes a variant apart.
struct MatmulView {
  Matmul matmul;
};

// A number, or of a ring the distances of each chunk.
using Chunks = std::variant<int64_t, std::vector<std::vector<int64_t>>>;

Schedule schedule_of(const std::string& method, const Chunks& chunks) {
  if (const auto* count = std::get_if<int64_t>(&chunks)) return {parse_method(method), *count, {}};
  const auto& distances = std::get<1>(chunks);
  return {parse_method(method), static_cast<int64_t>(distances.size()) + 1, distances};
}

Chunks chunks_of(const Schedule& schedule) {
  if (schedule.distances.empty()) return schedule.chunks;
  return schedule.distances;
}

Program program_at(const Matmul& matmul, const std::string& method, const Chunks& chunks, int64_t rank) {
  return compile(matmul, schedule_of(method, chunks), position_of(plan_of(matmul).src, rank));
}

// By row or not, dtype of the result, and the plan of the moved operand's scales.
using ScalingParts = std::tuple<bool, std::string, std::optional<PlanView>>;

std::optional<Scaling> scaling_of(const std::optional<ScalingParts>& parts) {
  if (!parts) return std::nullopt;
  const auto& [by_row, result, plan] = *parts;
  Scaling scaling{by_row, DType::parse(result)};
  if (plan) scaling.plan = plan->plan();
  return scaling;
}

py::dict timeline_of(const Matmul& matmul, const Schedule& schedule, const GemmModel& model) {
  const Program program = compile(matmul, schedule, 0);
  const Timeline timeline = predict(program, plan_of(matmul), model);
  py::list spans;
  for (const Span& span : timeline.spans) {
    const Instruction& instruction = program.instructions[span.instruction];
    spans.append(py::make_tuple(span.is_communication ? "communication" : "compute", to_string(instruction.operation),
                                instruction.chunk, span.start_ps, span.end_ps));
  }
  return py::dict(py::arg("spans") = spans, py::arg("total_ps") = timeline.total_ps,
                  py::arg("communication_ps") = timeline.communication_ps, py::arg("gemm_ps") = timeline.gemm_ps);
}

void define_gemm_model(py::module_& m) {
  py::class_<GemmModel>(m, "GemmModel")
      .def(py::init([](const py::object& name, const py::object& num_processors, const py::object& tile_rows,
                       const py::object& tile_columns, const py::object& flops_per_us, const py::object& launch_ps,
                       const py::object& memory_ps_per_kib, const py::object& contention_percent) {
             const GemmModel model{text(name, "name"),
                                   integer(num_processors, "num_processors"),
                                   integer(tile_rows, "tile_rows"),
                                   integer(tile_columns, "tile_columns"),
                                   integer(flops_per_us, "flops_per_us"),
                                   integer(launch_ps, "launch_ps"),
                                   integer(memory_ps_per_kib, "memory_ps_per_kib"),
                                   integer(contention_percent, "contention_percent")};
             model.check();
             return model;
           }),
           py::kw_only(), py::arg("name"), py::arg("num_processors"), py::arg("tile_rows"), py::arg("tile_columns"),
           py::arg("flops_per_us"), py::arg("launch_ps"), py::arg("memory_ps_per_kib"), py::arg("contention_percent"))
      .def_static(
          "named", [](const py::object& name) { return GemmModel::named(text(name, "gemm_model")); }, py::arg("name"))
      .def_static("names", &GemmModel::names)
      .def_readonly("name", &GemmModel::name)
      .def_readonly("num_processors", &GemmModel::num_processors)
      .def_readonly("tile_rows", &GemmModel::tile_rows)
      .def_readonly("tile_columns", &GemmModel::tile_columns)
      .def_readonly("flops_per_us", &GemmModel::flops_per_us)
      .def_readonly("launch_ps", &GemmModel::launch_ps)
      .def_readonly("memory_ps_per_kib", &GemmModel::memory_ps_per_kib)
      .def_readonly("contention_percent", &GemmModel::contention_percent)
      .def(
          "picoseconds",
          [](const GemmModel& model, const py::object& m_, const py::object& n_, const py::object& k_,
             const py::object& count, const py::object& item_bytes) {
            const auto size = [](const py::object& given, const char* argument) {
              const int64_t value = integer(given, argument);
              check_user(value >= 0, argument, ": ", value, "; allowed is 0 or more");
              return value;
            };
            return model.picoseconds(size(m_, "m"), size(n_, "n"), size(k_, "k"), size(count, "count"),
                                     size(item_bytes, "item_bytes"));
          },
          py::arg("m"), py::arg("n"), py::arg("k"), py::arg("count") = 1, py::arg("item_bytes") = 2)
      .def(
          "__eq__", [](const GemmModel& a, const GemmModel& b) { return a == b; }, py::is_operator())
      .def("__hash__", [](const GemmModel& model) { return py::hash(py::str(model.name)); })
      .def("__repr__", [](const GemmModel& model) { return concat("GemmModel(", model.name, ")"); });
}

}  // namespace

void define_matmul(py::module_& m) {
  define_gemm_model(m);
  using Product = std::tuple<std::string, Layout, bool>;
  using Term = std::tuple<std::string, Layout, Layout>;
  py::class_<MatmulView>(m, "Matmul")
      .def_static(
          "gather",
          [](const PlanView& plan, const std::vector<Product>& products, bool keeps_gathered,
             const std::optional<ScalingParts>& scaling) {
            GatherMatmul matmul{plan.plan(), {}, keeps_gathered, scaling_of(scaling)};
            for (const auto& [axes, other, has_bias] : products) {
              matmul.products.push_back({Contraction::parse(axes), other, has_bias});
            }
            check(matmul, {});
            return MatmulView{std::move(matmul)};
          },
          py::arg("plan"), py::arg("products"), py::arg("keeps_gathered") = false, py::arg("scaling") = py::none())
      .def_static(
          "scatter",
          [](const PlanView& plan, const std::vector<Term>& terms, bool has_addend,
             const std::optional<ScalingParts>& scaling) {
            MatmulScatter matmul{plan.plan(), {}, has_addend, scaling_of(scaling)};
            for (const auto& [axes, lhs, rhs] : terms) matmul.terms.push_back({Contraction::parse(axes), lhs, rhs});
            check(matmul, {});
            return MatmulView{std::move(matmul)};
          },
          py::arg("plan"), py::arg("terms"), py::arg("has_addend") = false, py::arg("scaling") = py::none())
      .def_static(
          "parse",
          [](const std::string& text) {
            const auto [matmul, schedule] = parse_matmul(text);
            return py::make_tuple(MatmulView{matmul}, method_name(schedule.method), chunks_of(schedule));
          },
          py::arg("text"))
      .def_property_readonly("plan", [](const MatmulView& view) { return view_of(plan_of(view.matmul)); })
      .def_property_readonly("num_partners", [](const MatmulView& view) { return num_partners(view.matmul); })
      .def_property_readonly("communicates",
                             [](const MatmulView& view) {
                               const std::vector<Step>& steps = plan_of(view.matmul).steps;
                               return std::any_of(steps.begin(), steps.end(),
                                                  [](const Step& step) { return !is_local(step.op); });
                             })
      .def_property_readonly("why_only_serial", [](const MatmulView& view) { return why_only_serial(view.matmul); })
      .def(
          "check",
          [](const MatmulView& view, const std::string& method, const Chunks& chunks) {
            check(view.matmul, schedule_of(method, chunks));
          },
          py::arg("method"), py::arg("chunks"))
      .def(
          "predictions",
          [](const MatmulView& view, const GemmModel& model) {
            std::vector<std::tuple<std::string, int64_t, int64_t>> all;
            for (const Prediction& one : predictions(view.matmul, model)) {
              all.emplace_back(method_name(one.schedule.method), one.schedule.chunks, one.total_ps);
            }
            return all;
          },
          py::arg("model"))
      .def(
          "choose",
          [](const MatmulView& view, const GemmModel& model) {
            const Schedule schedule = choose(view.matmul, model);
            return std::pair<std::string, int64_t>(method_name(schedule.method), schedule.chunks);
          },
          py::arg("model"))
      .def(
          "timeline",
          [](const MatmulView& view, const std::string& method, const Chunks& chunks, const GemmModel& model) {
            return timeline_of(view.matmul, schedule_of(method, chunks), model);
          },
          py::arg("method"), py::arg("chunks"), py::arg("model"))
      .def(
          "program",
          [](const MatmulView& view, const std::string& method, const Chunks& chunks, int64_t rank) {
            return program_at(view.matmul, method, chunks, rank).to_string();
          },
          py::arg("method"), py::arg("chunks"), py::arg("rank"))
      .def(
          "peak_bytes",
          [](const MatmulView& view, const std::string& method, const Chunks& chunks, int64_t rank) {
            return program_at(view.matmul, method, chunks, rank).peak_bytes();
          },
          py::arg("method"), py::arg("chunks"), py::arg("rank"))
      .def(
          "groups",
          [](const MatmulView& view, const std::string& method, const Chunks& chunks, int64_t rank) {
            std::vector<std::pair<std::vector<int>, std::vector<int64_t>>> groups;
            for (const Group& group : program_at(view.matmul, method, chunks, rank).groups) {
              groups.emplace_back(group.mesh_dims.to_vector(), group.ranks);
            }
            return groups;
          },
          py::arg("method"), py::arg("chunks"), py::arg("rank"))
      .def(
          "shapes",
          [](const MatmulView& view, int64_t rank) {
            const Program program = program_at(view.matmul, "serial", 1, rank);
            std::vector<std::vector<int64_t>> outputs;
            for (const Output& output : program.outputs) outputs.push_back(output.shape);
            std::vector<std::string> dtypes;
            for (const Output& output : program.outputs) dtypes.push_back(program.dtype_of(output.buffer).name());
            return std::make_tuple(program.input_shapes, outputs, dtypes);
          },
          py::arg("rank"))
      .def(
          "to_text",
          [](const MatmulView& view, const std::string& method, const Chunks& chunks) {
            return to_text(view.matmul, schedule_of(method, chunks));
          },
          py::arg("method"), py::arg("chunks"));
}

}  // namespace shardwright
