// _planner: matrix products in chunks: schedules, predicted times and programs; models of the times of products.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/arguments.h"
#include "bindings/views.h"
#include "products/compile.h"
#include "products/local_tensors.h"
#include "products/product_choices.h"
#include "products/serialize.h"
#include "products/timeline.h"
#include "support/wire_format.h"

namespace py = pybind11;

namespace shardwright {
namespace {

// A number of chunks, or for a ring the distances of each chunk that is sent (Schedule::distances).
using Chunks = std::variant<int64_t, std::vector<std::vector<int64_t>>>;

// Returns a schedule. If `chunks` has distances, the number of chunks is one more: the chunk with the rank's own part
// is not sent.
Schedule schedule_of(const std::string& method, const Chunks& chunks, int64_t depth, int64_t sms_left) {
  Schedule schedule{parse_method(method)};
  if (const auto* count = std::get_if<int64_t>(&chunks)) {
    schedule.chunks = *count;
  } else {
    schedule.distances = std::get<1>(chunks);
    schedule.chunks = static_cast<int64_t>(schedule.distances.size()) + 1;
  }
  schedule.depth = depth;
  schedule.sms_left = sms_left;
  return schedule;
}

// Returns the distances if the schedule has any, else the number of chunks.
Chunks chunks_of(const Schedule& schedule) {
  if (schedule.distances.empty()) return schedule.chunks;
  return schedule.distances;
}

// Returns the method and the chunks of a schedule.
std::string text_of(const Schedule& schedule) {
  return concat(method_name(schedule.method), " ", chunks_text(schedule));
}

// Defines the class Schedule.
void define_schedule(py::module_& m) {
  py::class_<Schedule>(m, "Schedule", R"(The schedule of a `Matmul` (csrc/products/matmul.h).

Args:
    method: ``"serial"``, ``"ring"``, ``"collective"`` or ``"flags"``.
    chunks: the number of chunks, or for a ring, for each chunk that is sent, its distances: how many ranks away on the
        ring its parts are.
    depth: the maximum number of transfers under way during a product.
    sms_left: multiprocessors that products leave to transfers under way.

Raises:
    ValueError: the method is unknown. `Matmul.check` checks that a schedule is possible for a product.)")
      .def(py::init([](const Typed<std::string>& method, const Chunks& chunks, const Typed<int64_t>& depth,
                       const Typed<int64_t>& sms_left) {
             return schedule_of(text(method, "method"), chunks, integer(depth, "depth"), integer(sms_left, "sms_left"));
           }),
           py::arg("method"), py::arg("chunks") = 1, py::kw_only(), py::arg("depth") = 1, py::arg("sms_left") = 0)
      .def_property_readonly("method", [](const Schedule& schedule) { return method_name(schedule.method); })
      .def_property_readonly("chunks", &chunks_of)
      .def_readonly("depth", &Schedule::depth)
      .def_readonly("sms_left", &Schedule::sms_left)
      .def(
          "__eq__", [](const Schedule& a, const Schedule& b) { return a == b; }, py::is_operator())
      .def("__hash__", [](const Schedule& schedule) { return py::hash(py::str(text_of(schedule))); })
      .def("__str__", &text_of)
      .def("__repr__", [](const Schedule& schedule) { return concat("Schedule(", text_of(schedule), ")"); });
}

// Returns the argument `depth`. Throws UserError for values out of range.
std::optional<int64_t> depth_of(const py::object& value) {
  if (value.is_none()) return std::nullopt;
  const int64_t depth = integer(value, "depth");
  check_argument(depth >= 1 && depth <= kMaxChunks, "depth", InRange{1, kMaxChunks}, depth);
  return depth;
}

// The fields of Scaling: true for scales by row, dtype of the result, plan of the moved operand's scales.
using ScalingParts = std::tuple<bool, std::string, std::optional<PlanView>>;

// Returns the scaling of 8-bit operands; nothing for None.
std::optional<Scaling> scaling_of(const std::optional<ScalingParts>& parts) {
  if (!parts) return std::nullopt;
  const auto& [by_row, result, plan] = *parts;
  Scaling scaling{by_row, DType::parse(result)};
  if (plan) scaling.plan = plan->plan();
  return scaling;
}

// Returns the predicted timeline of the first rank.
py::typing::Dict<py::str, py::object> timeline_of(const Matmul& matmul, const Schedule& schedule,
                                                  const GemmModel& model) {
  const Program program = compile(matmul, schedule, plan_of(matmul).src.mesh().rank_at(Position{0}));
  const Timeline timeline = predict(program, plan_of(matmul), model);
  py::list spans;
  for (const Span& span : timeline.spans) {
    const Instruction& instruction = program.instructions[span.instruction];
    spans.append(py::make_tuple(span.is_communication ? "communication" : "compute", to_string(instruction.operation),
                                instruction.chunk, span.start_ps, span.end_ps));
  }
  return py::typing::Dict<py::str, py::object>(py::arg("spans") = spans, py::arg("total_ps") = timeline.total_ps,
                                               py::arg("communication_ps") = timeline.communication_ps,
                                               py::arg("gemm_ps") = timeline.gemm_ps);
}

// Defines the properties of GemmModel and its prediction.
void define_values(py::class_<GemmModel>& model) {
  model.def_readonly("name", &GemmModel::name)
      .def_readonly("num_processors", &GemmModel::num_processors)
      .def_readonly("tile_rows", &GemmModel::tile_rows)
      .def_readonly("tile_columns", &GemmModel::tile_columns)
      .def_readonly("flops_per_us", &GemmModel::flops_per_us)
      .def_readonly("launch_ps", &GemmModel::launch_ps)
      .def_readonly("memory_ps_per_kib", &GemmModel::memory_ps_per_kib)
      .def_readonly("contention_percent", &GemmModel::contention_percent)
      .def_readonly("chunk_ps", &GemmModel::chunk_ps)
      .def_readonly("transfer_processors", &GemmModel::transfer_processors)
      .def(
          "picoseconds",
          [](const GemmModel& model, const Typed<int64_t>& m_, const Typed<int64_t>& n_, const Typed<int64_t>& k_,
             const Typed<int64_t>& count, const Typed<int64_t>& item_bytes) {
            const auto size = [](const py::object& given, const char* argument) {
              const int64_t value = integer(given, argument);
              check_argument(value >= 0, argument, "at least 0", value);
              return value;
            };
            return model.picoseconds(size(m_, "m"), size(n_, "n"), size(k_, "k"), size(count, "count"),
                                     size(item_bytes, "item_bytes"));
          },
          py::arg("m"), py::arg("n"), py::arg("k"), py::arg("count") = 1, py::arg("item_bytes") = 2,
          "Returns the predicted time, in picoseconds, of `count` products of m x k by k x n, with operands of "
          "`item_bytes` bytes per element. Raises ValueError for negative sizes.");
}

using MatmulClass = py::class_<MatmulView>;

// Defines the functions that make a Matmul.
void define_making(MatmulClass& matmul) {
  using Product = std::tuple<std::string, Layout, bool>;  // axes, layout of the other operand, true if there is a bias
  using Term = std::tuple<std::string, Layout, Layout>;   // axes, layouts of both operands
  matmul
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
          py::arg("plan"), py::arg("products"), py::arg("keeps_gathered") = false, py::arg("scaling") = py::none(),
          R"(Returns a matmul that moves an operand by a plan and multiplies it.

Args:
    products: for each product, (axes with the moved operand first, layout of the other operand, True if a bias is
        added).
    keeps_gathered: True if the moved operand is an output too.
    scaling: for 8-bit operands, (True for scales by row, dtype of the result, plan of the moved operand's scales if
        they are by row).

Raises:
    ValueError: the arguments contradict each other.)")
      .def_static(
          "scatter",
          [](const PlanView& plan, const std::vector<Term>& terms, bool has_addend,
             const std::optional<ScalingParts>& scaling) {
            MatmulScatter matmul{plan.plan(), {}, has_addend, scaling_of(scaling)};
            for (const auto& [axes, lhs, rhs] : terms) matmul.terms.push_back({Contraction::parse(axes), lhs, rhs});
            check(matmul, {});
            return MatmulView{std::move(matmul)};
          },
          py::arg("plan"), py::arg("terms"), py::arg("has_addend") = false, py::arg("scaling") = py::none(),
          R"(Returns a matmul that sums products and moves the sum by a plan.

Args:
    terms: for each product, (axes, layouts of both operands).
    has_addend: True if one more tensor is added, in the layout of the plan's source.
    scaling: as in `gather`, without a plan.

Raises:
    ValueError: the arguments contradict each other.)")
      .def_static(
          "parse",
          [](const std::string& text) {
            const auto [matmul, schedule] = matmul_from_bytes(bytes_from_text(text, "matmul"));
            return std::pair(MatmulView{matmul}, schedule);
          },
          py::arg("text"),
          "Returns the matmul and the schedule from the result of `to_text`. Raises ValueError for other texts.");
}

// Defines the methods that predict times and choose schedules.
void define_choices(MatmulClass& matmul) {
  matmul
      .def_property_readonly(
          "plan", [](const MatmulView& view) { return view_of(plan_of(view.matmul)); }, "The plan of the move.")
      .def_property_readonly(
          "num_partners", [](const MatmulView& view) { return num_partners(view.matmul); },
          "Number of ranks that take part in the step that is divided into chunks.")
      .def_property_readonly(
          "communicates", [](const MatmulView& view) { return communicates(view.matmul); },
          "True if the plan communicates.")
      .def_property_readonly(
          "why_only_serial", [](const MatmulView& view) { return why_only_serial(view.matmul); },
          "The reason why no part of the matmul can be divided into chunks, or None if some part can.")
      .def(
          "check", [](const MatmulView& view, const Schedule& schedule) { check(view.matmul, schedule); },
          py::arg("schedule"), "Raises ValueError if the schedule is not possible for this matmul.")
      .def(
          "predictions",
          [](const MatmulView& view, const GemmModel& model, const Typed<std::optional<int64_t>>& depth) {
            std::vector<std::pair<Schedule, int64_t>> all;
            for (const Prediction& prediction : predictions(view.matmul, model, depth_of(depth))) {
              all.emplace_back(prediction.schedule, prediction.total_ps);
            }
            return all;
          },
          py::arg("model"), py::arg("depth") = py::none(),
          "Returns (schedule, predicted picoseconds) for the serial schedule, then for every method and number of "
          "chunks. Each has the number of processors left to transfers, and the depth unless `depth` is given, that "
          "are predicted to be fastest.")
      .def(
          "choose",
          [](const MatmulView& view, const GemmModel& model, const Typed<std::optional<int64_t>>& depth) {
            return choose_fastest(view.matmul, model, depth_of(depth));
          },
          py::arg("model"), py::arg("depth") = py::none(),
          "Returns the schedule with the least predicted time; the serial one unless another saves at least 2%.")
      .def(
          "tuned",
          [](const MatmulView& view, const Schedule& schedule, const GemmModel& model,
             const Typed<std::optional<int64_t>>& depth) {
            return tuned_schedule(view.matmul, schedule, model, depth_of(depth));
          },
          py::arg("schedule"), py::arg("model"), py::arg("depth") = py::none(),
          "Returns `schedule` with the depth and the processors left to transfers that `predictions` chooses.");
}

// Defines the methods that return timelines, programs, shapes and texts.
void define_programs(MatmulClass& matmul) {
  matmul
      .def(
          "timeline",
          [](const MatmulView& view, const Schedule& schedule, const GemmModel& model) {
            return timeline_of(view.matmul, schedule, model);
          },
          py::arg("schedule"), py::arg("model"),
          "Returns the predicted timeline of the first rank, in picoseconds: ``spans``, each (lane, instruction, "
          "chunk, start, end); ``total_ps``; ``communication_ps`` and ``gemm_ps``, the sums of the times of transfers "
          "and of products.")
      .def(
          "program",
          [](const MatmulView& view, const Schedule& schedule, int64_t rank) {
            return compile(view.matmul, schedule, Rank{rank}).to_string();
          },
          py::arg("schedule"), py::arg("rank"), "Returns the instructions of one rank, as text.")
      .def(
          "peak_bytes",
          [](const MatmulView& view, const Schedule& schedule, int64_t rank) {
            return compile(view.matmul, schedule, Rank{rank}).peak_bytes();
          },
          py::arg("schedule"), py::arg("rank"), "Returns the most memory that one rank allocates at once, in bytes.")
      .def(
          "shapes",
          [](const MatmulView& view, int64_t rank) {
            const LocalTensors tensors = local_tensors(view.matmul, Rank{rank});
            std::vector<std::vector<int64_t>> inputs;
            for (const LocalTensor& input : tensors.inputs) inputs.push_back(input.shape);
            std::vector<std::pair<std::vector<int64_t>, std::string>> outputs;
            for (const LocalTensor& output : tensors.outputs) outputs.emplace_back(output.shape, output.dtype.name());
            return std::pair(inputs, outputs);
          },
          py::arg("rank"), "Returns the shapes of a rank's inputs, and the shapes and dtypes of its outputs.")
      .def(
          "to_text", [](const MatmulView& view, const Schedule& schedule) { return to_text(view.matmul, schedule); },
          py::arg("schedule"), "Returns the matmul and the schedule as text, which operators take.");
}

}  // namespace

void define_gemm_model(py::module_& m) {
  py::class_<GemmModel> model(
      m, "GemmModel",
      R"(Predicts the time of matrix products. Chunks are chosen with it, so it must be the same on every rank.

A product is cut into tiles, and each processor computes one at a time: a product of few tiles leaves processors
idle.

Args:
    name: shown in messages.
    num_processors: the SMs of a GPU; 1 for all cores of a CPU together.
    tile_rows, tile_columns: the size of a tile of the result.
    flops_per_us: rate of one processor for 16-bit operands. 8 bits run twice, 32 half, 64 a quarter as fast.
    launch_ps: picoseconds per product.
    memory_ps_per_kib: picoseconds per KiB to read operands and write results.
    contention_percent: slowdown of a product during transfers, in percent.
    chunk_ps: on CPU, picoseconds by which a chunk's transfer ends later alongside products than alone.
    transfer_processors: on devices, the processors that a transfer needs for full speed; 0 if copy engines carry it
        out.

Raises:
    ValueError: a value is negative or above 2^40, or a divisor is below 1.)");
  model
      .def(py::init([](const Typed<std::string>& name, const Typed<int64_t>& num_processors,
                       const Typed<int64_t>& tile_rows, const Typed<int64_t>& tile_columns,
                       const Typed<int64_t>& flops_per_us, const Typed<int64_t>& launch_ps,
                       const Typed<int64_t>& memory_ps_per_kib, const Typed<int64_t>& contention_percent,
                       const Typed<int64_t>& chunk_ps, const Typed<int64_t>& transfer_processors) {
             const GemmModel model{text(name, "name"),
                                   integer(num_processors, "num_processors"),
                                   integer(tile_rows, "tile_rows"),
                                   integer(tile_columns, "tile_columns"),
                                   integer(flops_per_us, "flops_per_us"),
                                   integer(launch_ps, "launch_ps"),
                                   integer(memory_ps_per_kib, "memory_ps_per_kib"),
                                   integer(contention_percent, "contention_percent"),
                                   integer(chunk_ps, "chunk_ps"),
                                   integer(transfer_processors, "transfer_processors")};
             model.check();
             return model;
           }),
           py::kw_only(), py::arg("name"), py::arg("num_processors"), py::arg("tile_rows"), py::arg("tile_columns"),
           py::arg("flops_per_us"), py::arg("launch_ps"), py::arg("memory_ps_per_kib"), py::arg("contention_percent"),
           py::arg("chunk_ps") = 0, py::arg("transfer_processors") = GemmModel{}.transfer_processors)
      .def_static(
          "named", [](const Typed<std::string>& name) { return GemmModel::named(text(name, "gemm_model")); },
          py::arg("name"),
          "Returns a built-in model, ``\"h100\"``, ``\"a100\"`` or ``\"cpu\"``: orders of magnitude, not measurements. "
          "Raises ValueError on other names.")
      .def_static("names", &GemmModel::names, "Returns the names of the built-in models.")
      .def("with_copy_engines", &GemmModel::with_copy_engines,
           "Returns this model for transfers by copy engines, as between peers' arenas. They need no processors, and "
           "slow down products by at most 3%.")
      .def(
          "__eq__", [](const GemmModel& a, const GemmModel& b) { return a == b; }, py::is_operator())
      .def("__hash__", [](const GemmModel& model) { return py::hash(py::str(model.name)); })
      .def("__repr__", [](const GemmModel& model) { return concat("GemmModel(", model.name, ")"); });
  define_values(model);
}

void define_matmul(py::module_& m) {
  define_schedule(m);
  MatmulClass matmul(m, "Matmul", "Matrix products and a redistribute as one program (csrc/products/matmul.h).");
  define_making(matmul);
  define_choices(matmul);
  define_programs(matmul);
  define_product_plan(m);
}

}  // namespace shardwright
