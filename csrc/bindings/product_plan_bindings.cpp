// _planner: plans of full products, forward and backward.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <set>
#include <span>

#include "bindings/arguments.h"
#include "bindings/views.h"
#include "planning/gemm_models.h"
#include "planning/plan_cache.h"
#include "products/product_arguments.h"
#include "products/product_plan.h"
#include "products/serialize.h"
#include "products/written_product.h"
#include "support/wire_format.h"

namespace py = pybind11;

namespace shardwright {
namespace {

using ProductPlanPtr = std::shared_ptr<const ProductPlan>;

// A number of chunks, or for a ring the distances of each chunk that is sent (Schedule::distances).
using Chunks = std::variant<int64_t, std::vector<std::vector<int64_t>>>;

// None, one integer or a list.
using OneOrMany = std::optional<std::variant<int64_t, std::vector<int64_t>>>;

// Returns an integer, or nothing for None.
std::optional<int64_t> optional_integer(const py::object& value, const char* argument) {
  if (value.is_none()) return std::nullopt;
  return integer(value, argument);
}

// Returns the request for a schedule, from the arguments method, chunks and depth.
ScheduleRequest request_of(const py::object& method, const std::optional<Chunks>& chunks, const py::object& depth) {
  ScheduleRequest request;
  if (!method.is_none()) request.method = parse_method(text(method, "method"));
  request.depth = optional_integer(depth, "depth");
  if (!chunks) return request;
  if (const auto* count = std::get_if<int64_t>(&*chunks)) {
    request.chunks = *count;
  } else {
    request.distances = std::get<1>(*chunks);
  }
  return request;
}

// Makes the plan of a product without the GIL.
ProductPlanPtr make_product_plan(ProductProblem problem) {
  const py::gil_scoped_release release;
  return std::make_shared<const ProductPlan>(std::move(problem), plan_cache());
}

// Returns the layouts of gradients. Throws UserError for products with scales, which have no gradients.
const GradientLayouts& gradients_of(const ProductPlanPtr& plan) {
  check_user(plan->layouts().gradients.has_value(), "scales must be empty for a product with gradients, got scales");
  return *plan->layouts().gradients;
}

// True if for each tensor (operand, moved operand, weights, results, biases) all ranks hold parts of one size.
bool has_equal_parts(const ProductPlan& plan) {
  const ProductProblem& problem = plan.problem();
  bool all = problem.operand.has_equal_parts() && plan.layouts().operand.has_equal_parts();
  for (const Layout& weight : problem.weights) all = all && weight.has_equal_parts();
  for (const Layout& result : problem.results) all = all && result.has_equal_parts();
  for (const auto& bias : problem.biases) all = all && (!bias || bias->has_equal_parts());
  return all;
}

// True if schedules are chosen by predicted time, at least in part.
bool chooses_schedules(const ProductPlan& plan) {
  const ScheduleRequest& request = plan.problem().schedule;
  return !request.method || (!request.chunks && request.distances.empty());
}

// Returns the context in which moves and products are planned: lowering, topology, pins, and GEMM models by the dtype
// of the moved tensor.
ProductContext context_of(const Layout& operand, const std::string& backend, const std::optional<Topology>& topology,
                          const PlanningTables& tables, const std::map<std::string, GemmModel>& gemm_models) {
  const Lowering& lowering = Lowering::named(backend);
  return {lowering, topology_between(operand, operand, lowering, topology, tables), tables.pins, gemm_models};
}

// Returns the dtypes of the tensors that may be moved: operand, weights and results.
std::set<DType::Id> moved_dtypes(const ProductProblem& problem) {
  std::set<DType::Id> dtypes{problem.operand.dtype().id()};
  for (const Layout& weight : problem.weights) dtypes.insert(weight.dtype().id());
  for (const Layout& result : problem.results) dtypes.insert(result.dtype().id());
  return dtypes;
}

// Returns a model for each dtype that may be moved, by name: the given model, or else the tables' model.
std::map<std::string, GemmModel> models_of(const ProductProblem& problem, const PlanningTables& tables,
                                           const std::string& device_type, const py::object& gemm_model) {
  std::optional<GemmModel> model;
  if (!gemm_model.is_none()) model = object<GemmModel>(gemm_model, "gemm_model", "a GemmModel or None");
  std::map<std::string, GemmModel> models;
  for (const DType dtype : moved_dtypes(problem)) {
    models[dtype.name()] = model ? *model : gemm_model_on(tables, device_type, dtype);
  }
  return models;
}

// A tensor, whose metadata are read, and its layout if it is a DTensor.
using TensorAndLayout = std::pair<py::object, std::optional<Layout>>;

// Returns the metadata of a tensor for plan_product. Throws UserError if it is no tensor.
GivenTensor given_tensor(const TensorAndLayout& tensor_and_layout, std::string name) {
  const auto& [tensor, layout] = tensor_and_layout;
  const bool is_tensor = py::hasattr(tensor, "shape") && py::hasattr(tensor, "stride") && py::hasattr(tensor, "device");
  if (!is_tensor) throw UserError(concat(name, " must be a tensor, got ", shown(tensor)));
  const std::vector<int64_t> shape = integers(tensor.attr("shape"), "shape");
  const std::vector<int64_t> strides = integers(tensor.attr("stride")(), "strides");
  return {std::move(name),
          shape,
          DType::parse(py::str(tensor.attr("dtype"))),
          py::str(tensor.attr("device")),
          layout,
          !layout && is_transposed(shape, strides)};
}

// Returns the tensors by weight, named `single_name` if the argument is a single tensor, or "list_name[j]" if it is a
// list.
std::vector<std::optional<GivenTensor>> given_tensors(std::span<const std::optional<TensorAndLayout>> inputs,
                                                      const std::string& single_name, const std::string& list_name,
                                                      ProductFunction function) {
  std::vector<std::optional<GivenTensor>> tensors(inputs.size());
  for (size_t j = 0; j < inputs.size(); ++j) {
    const bool is_single = function != ProductFunction::kGather;
    if (inputs[j]) tensors[j] = given_tensor(*inputs[j], is_single ? single_name : concat(list_name, "[", j, "]"));
  }
  return tensors;
}

// Returns the scale of x, then the scales by weight.
std::vector<std::optional<GivenTensor>> given_scales(const std::vector<std::optional<TensorAndLayout>>& inputs,
                                                     ProductFunction function) {
  check_argument(!inputs.empty(), "scales", "a list of the scale of x (or None) and the scale of each weight",
                 "an empty list");
  auto scales = given_tensors(std::span(inputs).subspan(1), "weight_scale", "weight_scales", function);
  scales.emplace(scales.begin());
  if (inputs[0]) scales[0] = given_tensor(*inputs[0], "x_scale");
  return scales;
}

// Returns the columns by weight. A single number is for all weights.
std::vector<std::optional<int64_t>> columns_of(const py::object& columns, size_t num_weights) {
  if (columns.is_none()) return {};
  if (PyIndex_Check(columns.ptr())) {
    return std::vector<std::optional<int64_t>>(num_weights, integer(columns, "columns"));
  }
  const std::vector<int64_t> listed = integers(columns, "columns");
  return {listed.begin(), listed.end()};
}

// Reads `size`, the total length or a list with one length for each rank.
void read_size(const py::object& size, ProductArguments& arguments) {
  if (size.is_none() || PyIndex_Check(size.ptr())) {
    arguments.size = optional_integer(size, "size");
  } else {
    arguments.sizes = integers(size, "size");
    check_argument(!arguments.sizes.empty(), "size", "a length or a list of one length for each rank", "an empty list");
  }
}

// Returns true for the argument save="gathered".
bool keeps_gathered(const std::string& save) {
  check_argument(save == "shard" || save == "gathered", "save", "one of shard, gathered", "'", save, "'");
  return save == "gathered";
}

using ProductPlanClass = py::class_<ProductPlan, std::shared_ptr<ProductPlan>>;

// Defines the constructor of ProductPlan, from layouts.
void define_making(ProductPlanClass& plan) {
  plan.def(py::init([](const std::vector<std::string>& axes, const Layout& operand, const std::vector<Layout>& weights,
                       const std::vector<std::optional<Layout>>& biases, const std::vector<Layout>& results,
                       const std::optional<std::string>& cuts, const std::string& scaled_by,
                       const std::vector<std::optional<Layout>>& scales, bool keeps_gathered,
                       const Typed<std::optional<std::string>>& method, const std::optional<Chunks>& chunks,
                       const Typed<std::optional<int64_t>>& depth, const std::string& backend,
                       const std::optional<Topology>& topology, const PlanningTables& tables,
                       const std::map<std::string, GemmModel>& gemm_models) {
             ProductProblem problem{axes,
                                    operand,
                                    weights,
                                    biases,
                                    results,
                                    cuts,
                                    parse_scaled_by(scaled_by),
                                    scales,
                                    keeps_gathered,
                                    request_of(method, chunks, depth),
                                    context_of(operand, backend, topology, tables, gemm_models)};
             return std::const_pointer_cast<ProductPlan>(make_product_plan(std::move(problem)));
           }),
           py::arg("axes"), py::arg("operand"), py::arg("weights"), py::arg("biases"), py::arg("results"),
           py::kw_only(), py::arg("cuts") = py::none(), py::arg("scaled_by") = "",
           py::arg("scales") = std::vector<std::optional<Layout>>{}, py::arg("keeps_gathered") = false,
           py::arg("method") = py::none(), py::arg("chunks") = py::none(), py::arg("depth") = py::none(),
           py::arg("backend") = "nccl", py::arg("topology") = py::none(), py::arg_v("tables", PlanningTables{}, "..."),
           py::arg("gemm_models") = std::map<std::string, GemmModel>{});
}

// Defines plan_product, which checks the arguments of a product of tensors and makes its plan.
void define_making_from_tensors(py::module_& m) {
  m.def(
      "plan_product",
      [](const std::string& function, const TensorAndLayout& x,
         const std::vector<std::optional<TensorAndLayout>>& weights,
         const std::vector<std::optional<TensorAndLayout>>& biases,
         const std::vector<std::optional<TensorAndLayout>>& scales, bool requires_grad,
         const std::optional<std::vector<std::string>>& placements, int64_t rank, int64_t num_ranks, bool checks_parts,
         const std::string& backend, const PlanningTables& tables, const std::string& device_type,
         const Typed<std::optional<int64_t>>& dim, const Typed<OneOrMany>& size, const Typed<OneOrMany>& columns,
         const py::object& out_dtype, const Typed<std::optional<std::string>>& method,
         const std::optional<Chunks>& chunks, const Typed<std::optional<int64_t>>& depth,
         const Typed<std::string>& save, const Typed<std::optional<GemmModel>>& gemm_model) {
        const ProductFunction product = parse_product_function(function);
        ProductArguments arguments{.function = product,
                                   .x = given_tensor(x, "x"),
                                   .weights = {},
                                   .biases = given_tensors(biases, "bias", "biases", product),
                                   .scales = given_scales(scales, product),
                                   .out_dtype = std::nullopt,
                                   .requires_grad = requires_grad,
                                   .placements = std::nullopt,
                                   .dim = optional_integer(dim, "dim"),
                                   .columns = columns_of(columns, weights.size()),
                                   .rank = rank,
                                   .num_ranks = num_ranks,
                                   .checks_parts = checks_parts};
        read_size(size, arguments);
        if (!out_dtype.is_none()) arguments.out_dtype = DType::parse(py::str(out_dtype));
        for (const auto& weight : given_tensors(weights, "weight", "weights", product)) {
          check_argument(weight.has_value(), "each item of weights", "a tensor", "None");
          arguments.weights.push_back(*weight);
        }
        if (placements) {
          arguments.placements.emplace();
          for (const std::string& placement : *placements) arguments.placements->push_back(Placement::parse(placement));
        }
        ScheduleRequest request = request_of(method, chunks, depth);
        check(request);
        const bool keeps = keeps_gathered(text(save, "save"));
        ProductProblem problem = problem_of(arguments);
        problem.keeps_gathered = keeps;
        problem.schedule = std::move(request);
        problem.context = context_of(problem.operand, backend, std::nullopt, tables,
                                     models_of(problem, tables, device_type, gemm_model));
        return std::const_pointer_cast<ProductPlan>(make_product_plan(std::move(problem)));
      },
      py::arg("function"), py::arg("x"), py::arg("weights"), py::arg("biases"), py::arg("scales"), py::kw_only(),
      py::arg("requires_grad"), py::arg("placements"), py::arg("rank"), py::arg("num_ranks"), py::arg("checks_parts"),
      py::arg("backend"), py::arg("tables"), py::arg("device_type"), py::arg("dim") = py::none(),
      py::arg("size") = py::none(), py::arg("columns") = py::none(), py::arg("out_dtype") = py::none(),
      py::arg("method") = py::none(), py::arg("chunks") = py::none(), py::arg("depth") = py::none(),
      py::arg("save") = "shard", py::arg("gemm_model") = py::none(),
      "Returns the plan of a product of tensors, from the arguments of the function (``\"linear\"``, ``\"gather\"`` or "
      "``\"sum\"``) that multiplies them; see csrc/products/product_arguments.h. A DTensor is given with its layout; "
      "`scales` are those of x and of the weights. Without a `gemm_model`, the tables' model for the device type is "
      "used. Raises ValueError if the arguments are invalid.");
}

// Defines product_layouts, which makes the layouts for a ProductPlan from text.
void define_making_from_text(py::module_& m) {
  m.def(
      "product_layouts",
      [](const std::shared_ptr<Mesh>& mesh, const std::string& axes, const std::map<std::string, int64_t>& sizes,
         const std::string& dtype, const std::string& operand, const std::vector<std::string>& weights,
         const std::vector<std::string>& biases, const std::vector<std::string>& results) {
        WrittenProduct written{mesh, axes, {}, DType::parse(dtype), operand, weights, biases, results};
        for (const auto& [axis, size] : sizes) {
          check_argument(axis.size() == 1, "each axis of sizes", "a single letter", "'", axis, "'");
          written.sizes[axis[0]] = size;
        }
        const ProductProblem problem = problem_of(written);
        return std::tuple(problem.operand, problem.weights, problem.biases, problem.results);
      },
      py::arg("mesh"), py::arg("axes"), py::arg("sizes"), py::arg("dtype"), py::arg("operand"), py::arg("weights"),
      py::arg("biases"), py::arg("results"),
      "Returns the layouts that `ProductPlan` takes: (operand, weights, biases, results).\n\n`axes` are as in einsum, "
      "`sizes` are those of the axes, and the other arguments are placements as text, one text per tensor. Empty "
      "`biases` mean no biases. Empty `results` are placed so that they need no move. Raises ValueError if an axis has "
      "no size, or if placements do not fit a tensor.");
}

// Returns the request for a backward. `given` has the layout of each result's gradient (None for the usual one) and
// optionally, at the end, the layout of an addend to the operand's gradient. `needs` has a flag for the operand, then
// for each weight, then for each bias.
GradientRequest request_of(const ProductPlan& plan, const std::vector<std::optional<Layout>>& given,
                           const std::vector<bool>& needs) {
  GradientRequest request = plan.all_gradients();
  const size_t count = request.given.size();
  check_user(given.size() == count || given.size() == count + 1, "given must be a list of ", count,
             " layouts, one per result, and optionally one for the addend, got ", given.size(), " layouts");
  check_user(needs.size() == 1 + 2 * count, "needs must be a list of ", 1 + 2 * count,
             " flags, for operand, weights and biases, got ", needs.size());
  for (size_t j = 0; j < count; ++j) {
    if (given[j]) request.given[j] = *given[j];
  }
  if (given.size() > count) request.addend = given[count];
  request.operand = needs[0];
  request.weights.assign(needs.begin() + 1, needs.begin() + 1 + static_cast<int64_t>(count));
  request.biases.assign(needs.begin() + 1 + static_cast<int64_t>(count), needs.end());
  return request;
}

// Defines the layouts and settings of a ProductPlan.
void define_layouts(ProductPlanClass& plan) {
  plan.def_property_readonly(
          "axes", [](const ProductPlan& plan) { return plan.problem().axes; },
          "The axes of each product, as in einsum.")
      .def_property_readonly(
          "operand", [](const ProductPlan& plan) { return plan.problem().operand; }, "The layout of the operand.")
      .def_property_readonly(
          "weights", [](const ProductPlan& plan) { return plan.problem().weights; }, "The layouts of the weights.")
      .def_property_readonly(
          "biases", [](const ProductPlan& plan) { return plan.problem().biases; },
          "The layouts of the biases; None for weights without one.")
      .def_property_readonly(
          "results", [](const ProductPlan& plan) { return plan.problem().results; }, "The layouts of the results.")
      .def_property_readonly(
          "scaled_by", [](const ProductPlan& plan) { return scaled_by_name(plan.problem().scaled_by); },
          "The scaling of 8-bit operands: ``\"tensor\"``, ``\"row\"`` or ``\"\"`` (not).")
      .def_property_readonly("cuts", &ProductPlan::cuts,
                             "The axis that is sharded along each mesh dim during the product, or ``\"-\"``.")
      .def_property_readonly(
          "lead", [](const ProductPlan& plan) { return lead_name(plan.lead()); },
          "The tensor whose move overlaps with the product: ``\"operand\"``, ``\"weight\"`` or ``\"result\"``.")
      .def_property_readonly("keeps_gathered", &ProductPlan::keeps_gathered,
                             "True if the forward also returns the moved operand, for the backward.")
      .def_property_readonly("has_equal_parts", &has_equal_parts,
                             "True if, for every tensor, all ranks hold parts of one size.")
      .def_property_readonly("chooses_schedules", &chooses_schedules,
                             "True if the method or the number of chunks is chosen by predicted time.")
      .def_property_readonly(
          "moved_operand", [](const ProductPlan& plan) { return plan.layouts().operand; },
          "The operand's layout during the product.")
      .def_property_readonly(
          "operand_gradient", [](const ProductPlanPtr& plan) { return gradients_of(plan).operand_out; },
          "The layout in which the backward returns the operand's gradient. Raises ValueError for products with "
          "scales.")
      .def_property_readonly(
          "result_gradients", [](const ProductPlan& plan) { return plan.all_gradients().given; },
          "The layouts of the results' gradients if they are placed like the results.");
}

// Defines the forward and the backward of a ProductPlan.
void define_directions(ProductPlanClass& plan) {
  plan.def_property_readonly(
          "forward", [](const ProductPlan& plan) { return DataflowView{plan.forward()}; },
          "The operations of the forward. Inputs: operand, weights, biases of the weights that have one, scales. "
          "Outputs: results, then the moved operand if it is kept.")
      .def(
          "backward",
          [](const ProductPlan& plan, const std::vector<std::optional<Layout>>& given, const std::vector<bool>& needs) {
            const GradientRequest request = request_of(plan, given, needs);
            const py::gil_scoped_release release;
            return DataflowView{plan.backward(request, plan_cache())};
          },
          py::arg("given"), py::arg("needs"),
          R"(Returns the operations of a backward.

Inputs: operand (the moved one if it is kept), weights, gradients of the results, then the addend to the operand's
gradient if there is one. Outputs: gradients of operand, weights and biases.

Args:
    given: the layouts of the results' gradients, None for the usual ones (`result_gradients`). One more item is
        the layout of the addend, or None.
    needs: flags for the gradients of the operand, each weight, and the bias of each weight.)");
}

}  // namespace

void define_product_plan(py::module_& m) {
  ProductPlanClass plan(m, "ProductPlan",
                        R"(The plan of a product of placed tensors, forward and backward (csrc/products/product_plan.h).

Args:
    axes: one text per weight, as in einsum: ``"bsk,nk->bsn"``.
    operand, weights, biases, results: the layouts of the given tensors, and the requested layouts of the results.
    cuts: the axis that is sharded along each mesh dim during the product, or ``"-"`` for none. Default: the cuts
        predicted to be fastest.
    scaled_by: how operands of 8-bit floats are scaled: ``"tensor"`` or ``"row"``.
    scales: if by row, the layouts of scales of operand and weights that are not placed like their operand's rows.
    keeps_gathered: True if the forward also returns the moved operand, for the backward.
    method, chunks, depth: as in `shardwright.linear`.
    backend, topology, tables: as in `shardwright.plan`.
    gemm_models: the models that predict products, by the dtype of the moved tensor.

Raises:
    ValueError: the arguments contradict each other, or the schedule is not possible.)");
  define_product_dataflow(m);
  define_making(plan);
  define_making_from_tensors(m);
  define_making_from_text(m);
  define_layouts(plan);
  plan.def_static(
          "parse",
          [](const std::string& text) {
            return std::const_pointer_cast<ProductPlan>(
                make_product_plan(product_problem_from_bytes(bytes_from_text(text, "product"))));
          },
          py::arg("text"), "Returns the plan from the result of `to_text`. Raises ValueError for other texts.")
      .def(
          "to_text", [](const ProductPlan& plan) { return to_text(plan.problem()); },
          "Returns the arguments of the plan as text, which operators take. Equal plans give equal texts in every "
          "process.")
      .def(
          "to_json", [](const ProductPlan& plan) { return plan.to_json(plan_cache()); },
          "Returns the layouts, moves and costs as JSON.")
      .def("__str__", [](const ProductPlan& plan) { return plan.to_string(plan_cache()); })
      .def(
          "gemm_model",
          [](const ProductPlan& plan, const std::string& dtype) {
            return plan.problem().context.gemm_model(DType::parse(dtype));
          },
          py::arg("dtype"), "Returns the model for products whose moved tensor has this dtype.")
      .def(
          "predicted_ps",
          [](const ProductPlan& plan) { return predicted_picoseconds(plan.forward(), plan.problem().context); },
          "Returns the predicted time of the forward, in picoseconds.");
  define_directions(plan);
}

}  // namespace shardwright
