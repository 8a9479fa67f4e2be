#include "cost/topology.h"

#include <algorithm>

#include "support/error.h"
#include "support/utf8.h"

namespace shardwright {
namespace {

constexpr int64_t kMicrosecond = 1'000'000;  // picoseconds

// Returns the picoseconds per KiB at this many GB/s.
constexpr int64_t per_kib(int64_t gigabytes_per_second) { return 1'024'000 / gigabytes_per_second; }

// Orders of magnitude for the hardware in the names, not measurements.
const std::vector<Topology>& built_in_topologies() {
  static const std::vector<Topology> topologies{
      {"8xNVLink", 0, 12 * kMicrosecond, per_kib(1500), {kMicrosecond, per_kib(200)}, {kMicrosecond, per_kib(200)}, {}},
      {"64x8", 8, 12 * kMicrosecond, per_kib(1500), {kMicrosecond, per_kib(200)}, {4 * kMicrosecond, per_kib(45)}, {}},
      {"gloo-local",
       0,
       150 * kMicrosecond,
       per_kib(5),
       {40 * kMicrosecond, per_kib(2)},
       {40 * kMicrosecond, per_kib(2)},
       {}},
  };
  return topologies;
}

}  // namespace

Topology Topology::named(std::string_view name) {
  for (const Topology& topology : built_in_topologies()) {
    if (topology.name == name) return topology;
  }
  throw UserError(concat("topology must be one of ", join(names()), ", got '", name, "'"));
}

std::vector<std::string> Topology::names() {
  std::vector<std::string> names;
  for (const Topology& topology : built_in_topologies()) names.push_back(topology.name);
  return names;
}

bool Topology::crosses_nodes(const Mesh& mesh, int mesh_dim) const {
  const int64_t size = mesh.dim_size(mesh_dim);
  if (ranks_per_node <= 0 || size == 1) return false;
  if (mesh.ranks_are_positions()) {
    if (mesh.size() <= ranks_per_node) return false;
    // A group is within a block of stride * size consecutive ranks. Every block is within one node exactly if the size
    // of a node is a multiple of the size of a block.
    return ranks_per_node % (mesh.stride(mesh_dim) * size) != 0;
  }
  const auto node_at = [&](int64_t position) { return to_int(mesh.rank_at(Position{position})) / ranks_per_node; };
  for (int64_t p = 0; p < mesh.size(); ++p) {
    const int64_t first = p - mesh.coordinate(p, mesh_dim) * mesh.stride(mesh_dim);
    if (node_at(p) != node_at(first)) return true;
  }
  return false;
}

void Topology::check() const {
  check_utf8(name, "topology: name");
  for (const auto& [mesh_dim, link] : mesh_dims) check_utf8(mesh_dim, "topology: mesh dim");
  const auto check_number = [&](int64_t value, const auto&... field) {
    check_user(value >= 0 && value <= kMaxValue, "topology: ", field..., " of '", name, "' must be ",
               InRange{0, kMaxValue}, ", got ", value);
  };
  const auto check_link = [&](const Link& link, const auto&... field) {
    check_number(link.message_ps, field..., ".message_ps");
    check_number(link.ps_per_kib, field..., ".ps_per_kib");
  };
  check_number(ranks_per_node, "ranks_per_node");
  check_number(step_ps, "step_ps");
  check_number(memory_ps_per_kib, "memory_ps_per_kib");
  check_link(inside, "inside");
  check_link(between, "between");
  for (const auto& [mesh_dim, link] : mesh_dims) check_link(link, "mesh_dims.", mesh_dim);
}

bool same_topology(const Mesh& a, const Mesh& b) {
  const Topology *of_a = a.topology().get(), *of_b = b.topology().get();
  return of_a == of_b || (of_a != nullptr && of_b != nullptr && *of_a == *of_b);
}

Link slower(const Link& a, const Link& b) {
  return {std::max(a.message_ps, b.message_ps), std::max(a.ps_per_kib, b.ps_per_kib)};
}

Link Topology::link_along(const Mesh& mesh, int mesh_dim) const {
  const auto own = mesh_dims.find(mesh.dim_names()[mesh_dim]);
  if (own != mesh_dims.end()) return own->second;
  return crosses_nodes(mesh, mesh_dim) ? between : inside;
}

Link Topology::slowest_link(const Mesh& mesh, MeshDimSet mesh_dims) const {
  Link slowest;
  for (const int d : mesh_dims.to_vector()) slowest = slower(slowest, link_along(mesh, d));
  return slowest;
}

bool Topology::is_between_nodes(const Mesh& mesh, MeshDimSet dims) const {
  const std::vector<int> all = dims.to_vector();
  return std::none_of(all.begin(), all.end(), [&](int d) { return mesh_dims.contains(mesh.dim_names()[d]); }) &&
         std::any_of(all.begin(), all.end(), [&](int d) { return crosses_nodes(mesh, d); });
}

}  // namespace shardwright
