#include "products/serialize.h"

#include <map>
#include <memory>

#include "planning/serialize.h"
#include "support/error.h"
#include "support/match.h"
#include "support/wire_format.h"

namespace shardwright {
namespace {

constexpr std::string_view kMatmulKind = "matmul";
constexpr std::string_view kProblemKind = "product";

// Schedule::distances: by chunk of a ring, the distances of its peers.
using Distances = std::vector<std::vector<int64_t>>;

void write(Writer& out, const Distances& distances) {
  out.list(distances, [&](const std::vector<int64_t>& chunk) { out.integers(chunk); });
}

Distances read_distances(Reader& in) {
  return in.list([&] { return in.integers(); });
}

void write(Writer& out, const std::optional<int64_t>& value) {
  out.optional(value, [&](int64_t present) { out.integer(present); });
}

// Reads a number that may be absent.
std::optional<int64_t> read_number(Reader& in) {
  return in.optional([&] { return in.integer(); });
}

template <typename Layouts>
void write_layouts(Writer& out, const Layouts& layouts) {
  out.list(layouts, [&](const Layout& layout) { write(out, layout); });
}

std::vector<Layout> read_layouts(Reader& in, const MeshPtr& mesh) {
  return in.list([&] { return read_layout(in, mesh); });
}

using OptionalLayouts = std::vector<std::optional<Layout>>;

void write(Writer& out, const OptionalLayouts& layouts) {
  out.list(layouts, [&](const auto& optional_layout) {
    out.optional(optional_layout, [&](const Layout& layout) { write(out, layout); });
  });
}

OptionalLayouts read_optional_layouts(Reader& in, const MeshPtr& mesh) {
  return in.list([&] { return in.optional([&] { return read_layout(in, mesh); }); });
}

// ---- matmuls: the plan comes first, because all layouts are on its mesh

void write(Writer& out, const Schedule& schedule) {
  out.enumerator(schedule.method);
  out.integer(schedule.chunks);
  write(out, schedule.distances);
  out.integer(schedule.depth);
  out.integer(schedule.sms_left);
}

Schedule read_schedule(Reader& in) {
  Schedule schedule{in.enumerator(Method::kFlags)};
  schedule.chunks = in.integer();
  schedule.distances = read_distances(in);
  schedule.depth = in.integer();
  schedule.sms_left = in.integer();
  return schedule;
}

void write(Writer& out, const std::optional<Scaling>& scaling) {
  out.optional(scaling, [&](const Scaling& value) {
    out.boolean(value.by_row);
    out.text(value.result.name());
    out.optional(value.plan, [&](const Plan& plan) { write(out, plan); });
  });
}

std::optional<Scaling> read_scaling(Reader& in) {
  return in.optional([&] {
    const bool by_row = in.boolean();
    const DType result = DType::parse(in.text());
    return Scaling{by_row, result, in.optional([&] { return read_plan(in); })};
  });
}

void write(Writer& out, const GatherMatmul& matmul) {
  write(out, matmul.plan);
  out.list(matmul.products, [&](const GatherMatmul::Product& product) {
    out.text(product.axes.to_string());
    write(out, product.other);
    out.boolean(product.has_bias);
  });
  out.boolean(matmul.keeps_gathered);
  write(out, matmul.scaling);
}

GatherMatmul read_gather(Reader& in) {
  GatherMatmul matmul{read_plan(in), {}};
  matmul.products = in.list([&] {
    const Contraction axes = Contraction::parse(in.text());
    Layout other = read_layout(in, matmul.plan.src.mesh_ptr());
    return GatherMatmul::Product{axes, std::move(other), in.boolean()};
  });
  matmul.keeps_gathered = in.boolean();
  matmul.scaling = read_scaling(in);
  return matmul;
}

void write(Writer& out, const MatmulScatter& matmul) {
  write(out, matmul.plan);
  out.list(matmul.terms, [&](const MatmulScatter::Term& term) {
    out.text(term.axes.to_string());
    write(out, term.lhs);
    write(out, term.rhs);
  });
  out.boolean(matmul.has_addend);
  write(out, matmul.scaling);
}

MatmulScatter read_scatter(Reader& in) {
  MatmulScatter matmul{read_plan(in), {}};
  const MeshPtr& mesh = matmul.plan.src.mesh_ptr();
  matmul.terms = in.list([&] {
    const Contraction axes = Contraction::parse(in.text());
    Layout lhs = read_layout(in, mesh);
    return MatmulScatter::Term{axes, std::move(lhs), read_layout(in, mesh)};
  });
  matmul.has_addend = in.boolean();
  matmul.scaling = read_scaling(in);
  return matmul;
}

// Returns the axes of the first product.
const Contraction& axes_of(const Matmul& matmul) {
  return match(
      matmul, [](const GatherMatmul& gather) -> const Contraction& { return gather.products[0].axes; },
      [](const MatmulScatter& scatter) -> const Contraction& { return scatter.terms[0].axes; });
}

// ---- problems: the mesh comes first, because all layouts are on it

void write(Writer& out, const ScheduleRequest& request) {
  out.optional(request.method, [&](Method method) { out.enumerator(method); });
  write(out, request.chunks);
  write(out, request.distances);
  write(out, request.depth);
}

ScheduleRequest read_request(Reader& in) {
  ScheduleRequest request;
  request.method = in.optional([&] { return in.enumerator(Method::kFlags); });
  request.chunks = read_number(in);
  request.distances = read_distances(in);
  request.depth = read_number(in);
  return request;
}

// Only the pins on this mesh are written, because no others apply to the problem.
void write(Writer& out, const ProductContext& context, const Mesh& mesh) {
  write(out, context.lowering);
  out.optional(context.topology, [&](const Topology& topology) { write(out, topology); });
  const auto pinned = context.pins ? context.pins->on(mesh, context.lowering) : std::vector<CertifiedPlanPtr>{};
  out.list(pinned, [&](const CertifiedPlanPtr& plan) { write(out, plan->plan()); });
  out.list(context.gemm_models, [&](const auto& model) {
    out.text(model.first);
    write(out, model.second);
  });
}

ProductContext read_context(Reader& in) {
  ProductContext context{read_lowering(in)};
  context.topology = in.optional([&] { return read_topology(in); });
  for (Plan& plan : in.list([&] { return read_plan(in); })) {
    const Pins before = context.pins ? *context.pins : Pins();
    context.pins = before.with(std::make_shared<const CertifiedPlan>(std::move(plan)));
  }
  const auto models = in.list([&] {
    const DType dtype = DType::parse(in.text());
    return std::pair(dtype.name(), read_gemm_model(in));
  });
  context.gemm_models.insert(models.begin(), models.end());
  return context;
}

}  // namespace

std::string to_bytes(const Matmul& matmul, const Schedule& schedule) {
  Writer out(kMatmulKind);
  write(out, schedule);
  out.boolean(std::holds_alternative<GatherMatmul>(matmul));
  std::visit([&](const auto& alternative) { write(out, alternative); }, matmul);
  return std::move(out).finish();
}

std::pair<Matmul, Schedule> matmul_from_bytes(std::string_view bytes) {
  Reader in(bytes, kMatmulKind);
  Schedule schedule = read_schedule(in);
  const bool gathers = in.boolean();
  Matmul matmul = gathers ? Matmul(read_gather(in)) : Matmul(read_scatter(in));
  in.finish();
  check(matmul, schedule);
  return {std::move(matmul), std::move(schedule)};
}

bool is_matmul(std::string_view bytes) { return kind_of(bytes) == kMatmulKind; }

std::string to_bytes(const ProductProblem& problem) {
  Writer out(kProblemKind);
  write(out, problem.operand.mesh());
  out.list(problem.axes, [&](const std::string& axes) { out.text(axes); });
  write(out, problem.operand);
  write_layouts(out, problem.weights);
  write(out, problem.biases);
  write_layouts(out, problem.results);
  out.optional(problem.cuts, [&](const AxisCuts& cuts) { out.text(cuts); });
  out.enumerator(problem.scaled_by);
  write(out, problem.scales);
  out.boolean(problem.keeps_gathered);
  write(out, problem.schedule);
  write(out, problem.context, problem.operand.mesh());
  return std::move(out).finish();
}

ProductProblem product_problem_from_bytes(std::string_view bytes) {
  Reader in(bytes, kProblemKind);
  const MeshPtr mesh = read_mesh(in);
  std::vector<std::string> axes = in.list([&] { return in.text(); });
  Layout operand = read_layout(in, mesh);
  std::vector<Layout> weights = read_layouts(in, mesh);
  OptionalLayouts biases = read_optional_layouts(in, mesh);
  ProductProblem problem{std::move(axes), std::move(operand), std::move(weights), std::move(biases),
                         read_layouts(in, mesh)};
  problem.cuts = in.optional([&] { return in.text(); });
  problem.scaled_by = in.enumerator(ScaledBy::kRow);
  problem.scales = read_optional_layouts(in, mesh);
  problem.keeps_gathered = in.boolean();
  problem.schedule = read_request(in);
  problem.context = read_context(in);
  in.finish();
  check(problem);
  return problem;
}

std::string to_text(const ProductProblem& problem) { return to_text(problem.axes[0], to_bytes(problem)); }

std::string to_text(const Matmul& matmul, const Schedule& schedule) {
  const char* kind = std::holds_alternative<GatherMatmul>(matmul) ? "gather " : "scatter ";
  return to_text(concat(kind, axes_of(matmul).to_string()), to_bytes(matmul, schedule));
}

}  // namespace shardwright
