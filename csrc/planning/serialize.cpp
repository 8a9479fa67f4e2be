#include "planning/serialize.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "planning/validate.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr std::string_view kMagic = "shardwright plan 3\n";
constexpr uint64_t kMaxListLength = uint64_t{1} << 32;

uint64_t checksum(std::string_view bytes) {  // FNV-1a
  uint64_t hash = 14695981039346656037ull;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

class Writer {
 public:
  void integer(int64_t value) {
    for (int shift = 0; shift < 64; shift += 8)
      bytes_.push_back(static_cast<char>(static_cast<uint64_t>(value) >> shift));
  }
  void real(double value) {
    int64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    integer(bits);
  }
  void text(const std::string& value) {
    integer(static_cast<int64_t>(value.size()));
    bytes_ += value;
  }
  void integers(const std::vector<int64_t>& values) {
    integer(static_cast<int64_t>(values.size()));
    for (const int64_t value : values) integer(value);
  }
  void raw(std::string_view value) { bytes_ += value; }
  std::string take() { return std::move(bytes_); }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  std::string_view raw(size_t count) {
    check_user(count <= bytes_.size(), "plan bytes: end too early");
    const std::string_view out = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return out;
  }
  int64_t integer() {
    uint64_t value = 0;
    const std::string_view eight = raw(8);
    for (int i = 7; i >= 0; --i) value = value << 8 | static_cast<unsigned char>(eight[i]);
    return static_cast<int64_t>(value);
  }
  double real() {
    const int64_t bits = integer();
    double value = 0;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
  size_t count(size_t item_bytes) {
    const auto n = static_cast<uint64_t>(integer());
    check_user(n < kMaxListLength && n * item_bytes <= bytes_.size(), "plan bytes: a list of ", n,
               " items does not fit in what is left");
    return n;
  }
  std::string text() { return std::string(raw(count(1))); }
  std::vector<int64_t> integers() {
    std::vector<int64_t> values(count(8));
    for (int64_t& value : values) value = integer();
    return values;
  }
  template <typename Enum>
  Enum enumerator(Enum last) {
    const int64_t value = integer();
    check_user(value >= 0 && value <= static_cast<int64_t>(last), "plan bytes: ", value, " is out of range");
    return static_cast<Enum>(value);
  }
  bool boolean() {
    const int64_t value = integer();
    check_user(value == 0 || value == 1, "plan bytes: ", value, " is neither 0 nor 1");
    return value == 1;
  }
  bool at_end() const { return bytes_.empty(); }

 private:
  std::string_view bytes_;
};

void write_mesh(Writer& out, const Mesh& mesh) {
  out.integer(mesh.ndim());
  for (const std::string& name : mesh.dim_names()) out.text(name);
  out.integers(mesh.dim_sizes());
  out.integers(mesh.ranks_are_positions() ? std::vector<int64_t>{} : numbers(mesh.ranks()));
}

MeshPtr read_mesh(Reader& in) {
  std::vector<std::string> names(in.count(8));
  for (std::string& name : names) name = in.text();
  std::vector<int64_t> sizes = in.integers();
  return std::make_shared<Mesh>(std::move(names), std::move(sizes), in.integers());
}

// By its place among those that have a name.
void write_lowering(Writer& out, const Lowering& lowering) {
  const std::vector<Lowering>& all = Lowering::all();
  out.integer(std::find(all.begin(), all.end(), Lowering::named(lowering.name)) - all.begin());
}

const Lowering& read_lowering(Reader& in) {
  const std::vector<Lowering>& all = Lowering::all();
  const int64_t place = in.integer();
  check_user(place >= 0 && place < static_cast<int64_t>(all.size()), "plan bytes: ", place, " is out of range");
  return all[place];
}

// Placements and the order of cuts; mesh, shape and dtype are common to all layouts of a plan.
void write_layout(Writer& out, const Layout& layout) {
  for (const Placement& placement : layout.placements()) {
    out.integer(static_cast<int64_t>(placement.kind));
    out.integer(placement.dim);
    out.integer(placement.split_factor);
    out.integer(static_cast<int64_t>(placement.op));
    out.real(placement.norm_power);
  }
  for (const std::vector<Cut>& cuts : layout.cuts()) {
    std::vector<int64_t> mesh_dims;
    for (const Cut& c : cuts) mesh_dims.push_back(c.mesh_dim);
    out.integers(mesh_dims);
  }
}

// What does not belong to its kind is dropped.
Placement read_placement(Reader& in) {
  const auto kind = in.enumerator(PlacementKind::kPartial);
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
  }
  return Placement::replicate();
}

Layout read_layout(Reader& in, const MeshPtr& mesh, const std::vector<int64_t>& shape, const DType& dtype) {
  std::vector<Placement> placements(mesh->ndim());
  for (Placement& placement : placements) placement = read_placement(in);
  ShardOrder order;
  for (size_t t = 0; t < shape.size(); ++t) {
    std::vector<int>& mesh_dims = order[static_cast<int64_t>(t)];
    for (const int64_t d : in.integers()) mesh_dims.push_back(static_cast<int>(d));
    // Mesh dims of size 1 cut nothing and have no place in the order; Layout wants them named all the same.
    for (int d = 0; d < mesh->ndim(); ++d) {
      const bool cuts = placements[d].is_shard_like() && placements[d].dim == static_cast<int64_t>(t);
      if (cuts && mesh->dim_size(d) == 1) mesh_dims.push_back(d);
    }
  }
  return Layout(mesh, shape, dtype, std::move(placements), order, StridedMeaning::kLiteral);
}

void write_topology(Writer& out, const Topology& topology) {
  out.text(topology.name);
  for (const int64_t value :
       {topology.ranks_per_node, topology.step_ps, topology.memory_ps_per_kib, topology.inside.message_ps,
        topology.inside.ps_per_kib, topology.between.message_ps, topology.between.ps_per_kib}) {
    out.integer(value);
  }
  out.integer(static_cast<int64_t>(topology.mesh_dims.size()));
  for (const auto& [mesh_dim, link] : topology.mesh_dims) {
    out.text(mesh_dim);
    out.integer(link.message_ps);
    out.integer(link.ps_per_kib);
  }
}

Topology read_topology(Reader& in) {
  Topology topology;
  topology.name = in.text();
  for (int64_t* value :
       {&topology.ranks_per_node, &topology.step_ps, &topology.memory_ps_per_kib, &topology.inside.message_ps,
        &topology.inside.ps_per_kib, &topology.between.message_ps, &topology.between.ps_per_kib}) {
    *value = in.integer();
  }
  const size_t num_mesh_dims = in.count(24);
  for (size_t i = 0; i < num_mesh_dims; ++i) {
    Link& link = topology.mesh_dims[in.text()];
    link.message_ps = in.integer();
    link.ps_per_kib = in.integer();
  }
  topology.check();
  return topology;
}

}  // namespace

std::string to_bytes(const Plan& plan) {
  Writer out;
  out.raw(kMagic);
  write_mesh(out, plan.src.mesh());
  out.integers(plan.src.shape());
  out.text(plan.src.dtype().name());
  write_lowering(out, plan.lowering);
  out.integer(static_cast<int64_t>(plan.objective));
  write_topology(out, plan.topology);
  out.integer(plan.named_groups_only ? 1 : 0);
  write_layout(out, plan.src);
  write_layout(out, plan.dst);
  out.integer(static_cast<int64_t>(plan.steps.size()));
  for (const Step& step : plan.steps) {
    out.integer(static_cast<int64_t>(step.op));
    out.integer(step.mesh_dims.bits());
    write_layout(out, step.before);
    write_layout(out, step.after);
    out.integer(static_cast<int64_t>(step.sharing));
    out.integer(step.ordered ? 1 : 0);
    out.integer(step.rounds);
  }
  out.integer(static_cast<int64_t>(checksum(out.bytes())));
  return out.take();
}

Plan from_bytes(std::string_view bytes) {
  check_user(bytes.size() >= kMagic.size() + 8 && bytes.substr(0, kMagic.size()) == kMagic,
             "plan bytes: do not begin with '", kMagic.substr(0, kMagic.size() - 1), "'");
  const std::string_view body = bytes.substr(0, bytes.size() - 8);
  Reader tail(bytes.substr(bytes.size() - 8));
  check_user(static_cast<uint64_t>(tail.integer()) == checksum(body), "plan bytes: the checksum does not match");

  Reader in(body.substr(kMagic.size()));
  const MeshPtr mesh = read_mesh(in);
  const std::vector<int64_t> shape = in.integers();
  const DType dtype = DType::parse(in.text());
  const Lowering& lowering = read_lowering(in);
  const auto objective = in.enumerator(Objective::kBytes);
  Topology topology = read_topology(in);
  const bool named_groups_only = in.boolean();
  Layout src = read_layout(in, mesh, shape, dtype);
  Layout dst = read_layout(in, mesh, shape, dtype);
  Plan plan{std::move(src), std::move(dst), lowering, objective, std::move(topology), named_groups_only, {}};
  const size_t num_steps = in.count(8);
  check_user(num_steps <= kMaxSteps, "plan bytes: ", num_steps, " steps; allowed are at most ", kMaxSteps);
  for (size_t i = 0; i < num_steps; ++i) {
    const auto op = in.enumerator(StepOp::kAllReduce);
    const int64_t bits = in.integer();
    check_user(bits > 0 && bits < int64_t{1} << mesh->ndim(), "plan bytes: a step names mesh dims that are not there");
    Layout before = read_layout(in, mesh, shape, dtype);
    Layout after = read_layout(in, mesh, shape, dtype);
    const auto sharing = in.enumerator(Sharing::kBytes);
    const bool ordered = in.boolean();
    const int64_t rounds = in.integer();
    check_user(rounds >= 1 && rounds <= kMaxRounds, "plan bytes: ", rounds, " rounds; allowed are 1 to ", kMaxRounds);
    plan.steps.push_back({op, MeshDimSet::from_bits(static_cast<uint32_t>(bits)), std::move(before), std::move(after),
                          sharing, rounds, ordered});
  }
  check_user(in.at_end(), "plan bytes: go on after their end");
  check_steps(plan);
  return plan;
}

}  // namespace shardwright
