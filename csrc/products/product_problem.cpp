#include "products/product_problem.h"

#include <algorithm>

#include "planning/serialize.h"
#include "search/make_plan.h"
#include "support/base64.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr const char* kTag = "product1";
constexpr const char* kScaledByNames[] = {"", "tensor", "row"};

std::map<char, int64_t> sizes_of(const std::string& letters, const Layout& layout, const std::string& what) {
  check_user(letters.size() == layout.shape().size(), what, ": ", layout.to_string(), " for the axes '", letters,
             "'; allowed is one dim for each");
  std::map<char, int64_t> sizes;
  for (size_t d = 0; d < letters.size(); ++d) sizes[letters[d]] = layout.shape()[d];
  return sizes;
}

void check_sizes(const ProductProblem& problem, size_t j, const AxisLetters& letters) {
  const std::string weight_name = concat("weights[", j, "]");
  std::map<char, int64_t> sizes = sizes_of(letters.weight, problem.weights[j], weight_name);
  for (const auto& [axis, size] : sizes_of(letters.operand, problem.operand, "operand")) {
    const auto [found, is_new] = sizes.emplace(axis, size);
    check_user(found->second == size, weight_name, ": the axis '", std::string(1, axis), "' has ", found->second,
               " elements, and ", size, " in the operand; allowed is one size");
  }
  const std::string result_name = concat("results[", j, "]");
  for (const auto& [axis, size] : sizes_of(letters.result, problem.results[j], result_name)) {
    check_user(sizes.at(axis) == size, result_name, ": the axis '", std::string(1, axis), "' has ", size,
               " elements; allowed are ", sizes.at(axis));
  }
  const std::optional<Layout>& bias = problem.biases[j];
  if (!bias) return;
  check_user(!letters.result.empty() && bias->ndim() == 1 && bias->shape()[0] == sizes.at(letters.result.back()),
             "biases[", j, "]: ", bias->to_string(), "; allowed is one dim, as the last of ",
             problem.results[j].to_string());
}

void check_cuts(const ProductProblem& problem) {
  if (!problem.cuts) return;
  const int ndim = problem.operand.mesh().ndim();
  check_user(static_cast<int>(problem.cuts->size()) == ndim, "cuts: '", *problem.cuts, "' for a mesh of ", ndim,
             " dims; allowed is one axis per mesh dim, or '-'");
  for (const char axis : *problem.cuts) {
    check_user(axis == kNoAxis || (axis >= 'a' && problem.axes[0].find(axis) != std::string::npos), "cuts: '",
               *problem.cuts, "' for the product ", problem.axes[0], "; allowed are its axes, and '-' for none");
  }
}

}  // namespace

AxisLetters AxisLetters::parse(const std::string& axes) {
  Contraction::parse(axes);
  const size_t comma = axes.find(',');
  const size_t arrow = axes.find("->");
  return {axes.substr(0, comma), axes.substr(comma + 1, arrow - comma - 1), axes.substr(arrow + 2)};
}

const char* scaled_by_name(ScaledBy scaled_by) { return kScaledByNames[static_cast<int>(scaled_by)]; }

ScaledBy parse_scaled_by(const std::string& name) {
  for (const ScaledBy one : {ScaledBy::kNothing, ScaledBy::kTensor, ScaledBy::kRow}) {
    if (name == scaled_by_name(one)) return one;
  }
  throw UserError(concat("scaled_by: '", name, "'; allowed are 'tensor', 'row' and nothing"));
}

const GemmModel& ProductContext::gemm_model(const DType& dtype) const {
  const auto found = gemm_models.find(dtype.name());
  check_user(found != gemm_models.end(), "gemm_models: there is none for ", dtype.name());
  return found->second;
}

Plan ProductContext::unmoved(const Layout& layout) const {
  return make_plan(layout, layout, {.lowering = lowering, .topology = topology});
}

void check(const ProductProblem& problem) {
  const size_t count = problem.weights.size();
  check_user(count >= 1, "weights: got none; allowed is one or more");
  check_user(problem.axes.size() == count && problem.biases.size() == count && problem.results.size() == count,
             "axes, biases, results: got ", problem.axes.size(), ", ", problem.biases.size(), " and ",
             problem.results.size(), " for ", count, " weights; allowed is one of each per weight");
  const std::string operand = AxisLetters::parse(problem.axes[0]).operand;
  std::vector<const Layout*> layouts;
  for (size_t j = 0; j < count; ++j) {
    const AxisLetters letters = AxisLetters::parse(problem.axes[j]);
    check_user(letters.operand == operand, "axes: '", problem.axes[j], "' and '", problem.axes[0],
               "' name the operand's axes differently");
    check_sizes(problem, j, letters);
    layouts.insert(layouts.end(), {&problem.weights[j], &problem.results[j]});
    if (problem.biases[j]) layouts.push_back(&*problem.biases[j]);
  }
  check_user(problem.scales.empty() || (problem.scaled_by == ScaledBy::kRow && problem.scales.size() == count + 1),
             "scales: got ", problem.scales.size(), " layouts; allowed are those of operand and weights, by row");
  for (const auto& scale : problem.scales) {
    if (scale) layouts.push_back(&*scale);
  }
  for (const Layout* layout : layouts) {
    check_user(layout->mesh() == problem.operand.mesh(), "mesh: ", layout->to_string(), " and ",
               problem.operand.to_string(), " lie on different meshes; allowed is one");
  }
  check_cuts(problem);
}

// tag|axes|cuts|scaled by|keeps|method|chunks|depth|models|pinned|operand|weights|biases|results|scales; items of lists
// are told apart by ';'. Layouts are written as plans that leave them as they are, by the problem's backend and
// topology.

namespace {

std::vector<std::string> split(const std::string& text, char mark) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == mark) {
      parts.emplace_back();
    } else {
      parts.back().push_back(c);
    }
  }
  return parts;
}

std::string text_of(const GemmModel& model) {
  const int64_t figures[] = {model.num_processors, model.tile_rows,         model.tile_columns,      model.flops_per_us,
                             model.launch_ps,      model.memory_ps_per_kib, model.contention_percent};
  return to_base64(model.name) + ":" + join(figures, ":");
}

int64_t parse_integer(const std::string& text) {
  const bool is_number = !text.empty() && text.size() <= 18 &&
                         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  check_user(is_number, "product: '", text, "' is no figure of one");
  return std::stoll(text);
}

std::map<std::string, GemmModel> parse_models(const std::string& text) {
  std::map<std::string, GemmModel> models;
  for (const std::string& one : split(text, ';')) {
    if (one.empty()) continue;
    const std::vector<std::string> fields = split(one, ':');
    check_user(fields.size() == 9, "product: '", one, "' is no table of products");
    GemmModel model{from_base64(fields[1])};
    int64_t* const figures[] = {&model.num_processors,    &model.tile_rows, &model.tile_columns,
                                &model.flops_per_us,      &model.launch_ps, &model.memory_ps_per_kib,
                                &model.contention_percent};
    for (size_t i = 0; i < std::size(figures); ++i) *figures[i] = parse_integer(fields[i + 2]);
    model.check();
    models.emplace(DType::parse(fields[0]).name(), model);
  }
  return models;
}

Plan parse_plan(const std::string& text) { return from_bytes(from_base64(text)); }

// Each is closed by a mark; one that is missing is empty.
std::vector<std::optional<Layout>> parse_layouts(const std::string& text) {
  std::vector<std::optional<Layout>> layouts;
  if (text.empty()) return layouts;
  check_user(text.back() == ';', "product: a list of layouts is not closed");
  for (const std::string& one : split(text.substr(0, text.size() - 1), ';')) {
    layouts.emplace_back();
    if (!one.empty()) layouts.back() = parse_plan(one).src;
  }
  return layouts;
}

std::vector<Layout> parse_all_layouts(const std::string& text) {
  std::vector<Layout> layouts;
  for (const std::optional<Layout>& one : parse_layouts(text)) {
    check_user(one.has_value(), "product: a layout is missing");
    layouts.push_back(*one);
  }
  return layouts;
}

std::string chunks_text(const ScheduleRequest& request) {
  if (!request.distances.empty()) return chunks_text(Schedule{Method::kRing, 1, request.distances});
  return request.chunks ? std::to_string(*request.chunks) : "";
}

ScheduleRequest parse_request(const std::string& method, const std::string& chunks, const std::string& depth) {
  ScheduleRequest request;
  if (!method.empty()) request.method = parse_method(method);
  if (!depth.empty()) request.depth = parse_integer(depth);
  if (chunks.empty()) return request;
  const Schedule parsed = parse_schedule("ring", chunks);
  request.distances = parsed.distances;
  if (parsed.distances.empty()) request.chunks = parsed.chunks;
  return request;
}

}  // namespace

std::string to_text(const ProductProblem& problem) {
  const ProductContext& context = problem.context;
  const auto layout_text = [&](const std::optional<Layout>& layout) {
    return layout ? to_base64(to_bytes(context.unmoved(*layout))) : std::string();
  };
  const auto layouts_text = [&](const auto& layouts) {
    std::string all;
    for (const auto& layout : layouts) all += layout_text(layout) + ";";
    return all;
  };
  std::vector<std::string> models;
  for (const auto& [dtype, model] : context.gemm_models) models.push_back(dtype + ":" + text_of(model));
  std::vector<std::string> pinned;
  if (context.pins) {
    for (const CertifiedPlanPtr& plan : context.pins->on(problem.operand.mesh(), context.lowering)) {
      pinned.push_back(to_base64(to_bytes(plan->plan())));
    }
  }
  const ScheduleRequest& schedule = problem.schedule;
  return join(std::vector<std::string>{kTag, join(problem.axes, ";"), problem.cuts.value_or(""),
                                       scaled_by_name(problem.scaled_by), problem.keeps_gathered ? "1" : "0",
                                       schedule.method ? method_name(*schedule.method) : "", chunks_text(schedule),
                                       schedule.depth ? std::to_string(*schedule.depth) : "", join(models, ";"),
                                       join(pinned, ";"), layout_text(problem.operand), layouts_text(problem.weights),
                                       layouts_text(problem.biases), layouts_text(problem.results),
                                       layouts_text(problem.scales)},
              "|");
}

ProductProblem parse_problem(const std::string& text) {
  const std::vector<std::string> fields = split(text, '|');
  check_user(fields.size() == 15 && fields[0] == kTag && (fields[4] == "0" || fields[4] == "1"), "product: '",
             text.substr(0, 40), "' is no product as text");
  const Plan like = parse_plan(fields[10]);
  ProductContext context{like.lowering, like.topology, nullptr, parse_models(fields[8])};
  for (const std::string& one : split(fields[9], ';')) {
    if (one.empty()) continue;
    const Pins before = context.pins ? *context.pins : Pins();
    context.pins = before.with(std::make_shared<const CertifiedPlan>(parse_plan(one)));
  }
  ProductProblem problem{.axes = split(fields[1], ';'),
                         .operand = like.src,
                         .weights = parse_all_layouts(fields[11]),
                         .biases = parse_layouts(fields[12]),
                         .results = parse_all_layouts(fields[13]),
                         .scaled_by = parse_scaled_by(fields[3]),
                         .scales = parse_layouts(fields[14]),
                         .keeps_gathered = fields[4] == "1",
                         .schedule = parse_request(fields[5], fields[6], fields[7]),
                         .context = std::move(context)};
  if (!fields[2].empty()) problem.cuts = fields[2];
  check(problem);
  return problem;
}

}  // namespace shardwright
