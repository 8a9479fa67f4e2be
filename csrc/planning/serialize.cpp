#include "planning/serialize.h"

#include <algorithm>
#include <array>
#include <limits>
#include <memory>

#include "moves/segments.h"
#include "planning/validate.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr std::string_view kKind = "plan";

// Return pointers to the members that are written and read, in this order (to const for a const argument).
template <typename TopologyLike>
auto fields_of_topology(TopologyLike& t) {
  return std::array{&t.ranks_per_node,    &t.step_ps,           &t.memory_ps_per_kib,
                    &t.inside.message_ps, &t.inside.ps_per_kib, &t.between.message_ps,
                    &t.between.ps_per_kib};
}

template <typename ModelLike>
auto fields_of_model(ModelLike& m) {
  return std::array{&m.num_processors,    &m.tile_rows,          &m.tile_columns, &m.flops_per_us,       &m.launch_ps,
                    &m.memory_ps_per_kib, &m.contention_percent, &m.chunk_ps,     &m.transfer_processors};
}

// Writes all fields of a placement, whatever its kind is, except the cut rule, which is written only for kShardByRule.
void write_placement(Writer& out, const Placement& placement) {
  out.enumerator(placement.kind);
  out.integer(placement.dim);
  out.integer(placement.is_plain_shard() ? placement.rule.split_factor() : 1);
  out.enumerator(placement.op);
  out.real(placement.norm_power);
  if (placement.kind == PlacementKind::kShardByRule) {
    std::vector<int64_t> encoding;
    placement.rule.append_encoding(encoding);
    out.integers(encoding);
  }
}

// Reads what write_placement() writes. Ignores fields that do not belong to the placement's kind.
Placement read_placement(Reader& in) {
  const auto kind = in.enumerator(PlacementKind::kShardByRule);
  const int64_t dim = in.integer();
  const int64_t split_factor = in.integer();
  const auto op = in.enumerator(ReduceOp::kNorm);
  const double norm_power = in.real();
  switch (kind) {
    case PlacementKind::kReplicate:
      break;
    case PlacementKind::kShard:
      return Placement::shard(dim);
    case PlacementKind::kStridedShard:
      return Placement::strided_shard(dim, split_factor);
    case PlacementKind::kPartial:
      return Placement::partial(op, op == ReduceOp::kNorm ? norm_power : 0);
    case PlacementKind::kShardByRule:
      return Placement::cut(dim, CutRule::from_encoding(in.integers()));
  }
  return Placement::replicate();
}

// Writes shape and dtype, which all layouts of one plan share.
void write_tensor(Writer& out, const Layout& layout) {
  out.integers(layout.tensor_shape());
  out.text(layout.dtype().name());
}

// Writes the number of flattened dims, the placements, and the order of cuts in each tensor dim.
void write_placements(Writer& out, const Layout& layout) {
  out.integer(layout.flattened());
  for (const Placement& placement : layout.placements()) write_placement(out, placement);
  for (const std::vector<Cut>& cuts : layout.cuts()) {
    out.list(cuts, [&](const Cut& cut) { out.integer(cut.mesh_dim); });
  }
}

// Reads what write_placements() writes, and returns the layout with this mesh, shape (before flattening) and dtype.
Layout read_placements(Reader& in, const MeshPtr& mesh, const std::vector<int64_t>& shape, const DType& dtype) {
  const int64_t flattened = in.integer(1, std::max<int64_t>(static_cast<int64_t>(shape.size()), 1));
  std::vector<Placement> placements(mesh->ndim());
  for (Placement& placement : placements) placement = read_placement(in);
  ShardOrder order;
  for (size_t t = 0; t + flattened <= shape.size(); ++t) {
    std::vector<int>& mesh_dims = order[static_cast<int64_t>(t)];
    mesh_dims = in.list([&] { return static_cast<int>(in.integer(0, mesh->ndim() - 1)); });
  }
  return Layout(mesh, shape, dtype, std::move(placements), order, StridedMeaning::kLiteral,
                static_cast<int>(flattened));
}

// Writes a step. Its meshes are written with the plan.
void write(Writer& out, const Step& step) {
  out.enumerator(step.op);
  if (step.op == StepOp::kRearrange) out.boolean(leads_to_another_mesh(step));
  out.integer(step.mesh_dims.bits());
  write_placements(out, step.before);
  write_placements(out, step.after);
  out.enumerator(step.policy);
  out.boolean(step.ordered);
  out.integer(step.rounds);
  out.integer(step.ranks_per_node);
}

// Reads a step of a tensor that has the layout `current`. If the step leads to another mesh, that mesh is `reached`.
Step read_step(Reader& in, const Layout& current, const MeshPtr& reached) {
  const auto op = in.enumerator(StepOp::kRearrange);
  const bool leads_away = op == StepOp::kRearrange ? in.boolean() : op == StepOp::kCross;
  const int64_t bits = in.integer();
  check_argument(is_cross_or_rearrange(op) ? bits == 0 : bits > 0 && bits < int64_t{1} << current.mesh().ndim(),
                 "plan bytes: mesh dims of a step", "dims of its mesh (none for cross and rearrange)", "the bit set ",
                 bits);
  Layout before = read_placements(in, current.mesh_ptr(), current.tensor_shape(), current.dtype());
  Layout after =
      read_placements(in, leads_away ? reached : current.mesh_ptr(), current.tensor_shape(), current.dtype());
  const auto policy = in.enumerator(ReplicaPolicy::kNodeLocal);
  const bool ordered = in.boolean();
  const int64_t rounds = in.integer();
  check_argument(rounds >= 1 && rounds <= kMaxRounds, "plan bytes: rounds", InRange{1, kMaxRounds}, rounds);
  const int64_t ranks_per_node = in.integer(0, std::numeric_limits<int64_t>::max());
  const auto mesh_dims = MeshDimSet::from_bits(static_cast<uint32_t>(bits));
  return {op, mesh_dims, std::move(before), std::move(after), policy, rounds, ordered, ranks_per_node};
}

}  // namespace

void write(Writer& out, const Mesh& mesh) {
  out.list(mesh.dim_names(), [&](const std::string& name) { out.text(name); });
  out.integers(mesh.dim_sizes());
  out.integers(mesh.ranks_are_positions() ? std::vector<int64_t>{} : to_ints(mesh.ranks()));
}

// The topology of a mesh is not written: a plan has its own.
MeshPtr read_mesh(Reader& in) {
  std::vector<std::string> names = in.list([&] { return in.text(); });
  std::vector<int64_t> sizes = in.integers();
  return std::make_shared<Mesh>(std::move(names), std::move(sizes), in.integers());
}

// Writes the index of the lowering in Lowering::all().
void write(Writer& out, const Lowering& lowering) {
  const std::vector<Lowering>& all = Lowering::all();
  out.integer(std::find(all.begin(), all.end(), Lowering::named(lowering.name)) - all.begin());
}

const Lowering& read_lowering(Reader& in) {
  const std::vector<Lowering>& all = Lowering::all();
  return all[in.integer(0, static_cast<int64_t>(all.size()) - 1)];
}

void write(Writer& out, const Topology& topology) {
  out.text(topology.name);
  for (const int64_t* value : fields_of_topology(topology)) out.integer(*value);
  out.list(topology.mesh_dims, [&](const auto& mesh_dim) {
    out.text(mesh_dim.first);
    out.integer(mesh_dim.second.message_ps);
    out.integer(mesh_dim.second.ps_per_kib);
  });
}

Topology read_topology(Reader& in) {
  Topology topology;
  topology.name = in.text();
  for (int64_t* value : fields_of_topology(topology)) *value = in.integer();
  const auto links = in.list([&] {
    std::string mesh_dim = in.text();
    const int64_t message_ps = in.integer();
    return std::pair(std::move(mesh_dim), Link{message_ps, in.integer()});
  });
  topology.mesh_dims.insert(links.begin(), links.end());
  topology.check();
  return topology;
}

void write(Writer& out, const GemmModel& model) {
  out.text(model.name);
  for (const int64_t* value : fields_of_model(model)) out.integer(*value);
}

GemmModel read_gemm_model(Reader& in) {
  GemmModel model;
  model.name = in.text();
  for (int64_t* value : fields_of_model(model)) *value = in.integer();
  model.check();
  return model;
}

void write(Writer& out, const Layout& layout) {
  write_tensor(out, layout);
  write_placements(out, layout);
}

Layout read_layout(Reader& in, const MeshPtr& mesh) {
  const std::vector<int64_t> shape = in.integers();
  return read_placements(in, mesh, shape, DType::parse(in.text()));
}

// Writes the source mesh first, then the number of crossings. If there are crossings, writes the meshes of relays, the
// destination mesh, and the mesh to which the last crossing leads if it differs from the destination mesh.
void write(Writer& out, const Plan& plan) {
  write(out, plan.src.mesh());
  const std::vector<MeshPtr> relays = meshes_of_relays(plan);
  out.integer((crosses(plan) ? 1 : 0) + std::ssize(relays));
  if (crosses(plan)) {
    for (const MeshPtr& mesh : relays) write(out, *mesh);
    write(out, plan.dst.mesh());
    const Mesh& reached = mesh_reached(plan);
    out.boolean(!(reached == plan.dst.mesh()));
    if (!(reached == plan.dst.mesh())) write(out, reached);
  }
  write(out, plan.lowering);
  out.enumerator(plan.objective);
  write(out, plan.topology);
  out.boolean(plan.named_groups_only);
  write(out, plan.src);
  write_placements(out, plan.dst);
  out.list(plan.steps, [&](const Step& step) { write(out, step); });
  out.integer(plan.segments.tensor_dim);
  out.integer(plan.segments.count);
}

Plan read_plan(Reader& in) {
  const MeshPtr mesh = read_mesh(in);
  const auto crossings = in.integer(0, static_cast<int64_t>(kMaxSteps));
  std::vector<MeshPtr> reached;  // the mesh that each crossing leads to
  while (std::ssize(reached) + 1 < crossings) reached.push_back(read_mesh(in));
  const MeshPtr destination = crossings > 0 ? read_mesh(in) : mesh;
  reached.push_back(crossings > 0 && in.boolean() ? read_mesh(in) : destination);
  const Lowering& lowering = read_lowering(in);
  const auto objective = in.enumerator(Objective::kBytes);
  Topology topology = read_topology(in);
  const bool named_groups_only = in.boolean();
  const Layout src = read_layout(in, mesh);
  const Layout dst = read_placements(in, destination, src.tensor_shape(), src.dtype());
  Plan plan{src, dst, lowering, objective, std::move(topology), named_groups_only, {}};
  Layout current = src;
  size_t crossed = 0;
  plan.steps = in.list(
      [&] {
        Step step = read_step(in, current, reached[std::min(crossed, reached.size() - 1)]);
        crossed += leads_to_another_mesh(step) ? 1 : 0;
        current = step.after;
        return step;
      },
      kMaxSteps);
  plan.segments.tensor_dim = in.integer(0, std::max(src.ndim() - 1, 0));
  plan.segments.count = in.integer(1, kMaxSegments);
  check_steps(plan);
  return plan;
}

std::string to_bytes(const Plan& plan) {
  Writer out(kKind);
  write(out, plan);
  return std::move(out).finish();
}

Plan from_bytes(std::string_view bytes) {
  Reader in(bytes, kKind);
  Plan plan = read_plan(in);
  in.finish();
  return plan;
}

std::string to_text(const Plan& plan) { return to_text(ends_of(plan), to_bytes(plan)); }

}  // namespace shardwright
