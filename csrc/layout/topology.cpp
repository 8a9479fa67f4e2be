#include "layout/topology.h"

#include "layout/error.h"

namespace shardwright {
namespace {

constexpr int64_t kMicrosecond = 1'000'000;  // picoseconds

// Picoseconds for 1 KiB at this many GB/s.
constexpr int64_t per_kib(int64_t gigabytes_per_second) { return 1'024'000 / gigabytes_per_second; }

// Orders of magnitude of the hardware they are named for, not measurements.
const std::vector<Topology>& known() {
  static const std::vector<Topology> topologies{
      {"8xNVLink", 0, 12 * kMicrosecond, per_kib(1500), {kMicrosecond, per_kib(200)}, {kMicrosecond, per_kib(200)}},
      {"64x8", 8, 12 * kMicrosecond, per_kib(1500), {kMicrosecond, per_kib(200)}, {4 * kMicrosecond, per_kib(45)}},
      {"gloo-local",
       0,
       150 * kMicrosecond,
       per_kib(5),
       {40 * kMicrosecond, per_kib(2)},
       {40 * kMicrosecond, per_kib(2)}},
  };
  return topologies;
}

}  // namespace

Topology Topology::named(const std::string& name) {
  for (const Topology& topology : known()) {
    if (topology.name == name) return topology;
  }
  throw UserError(concat("topology: '", name, "' is not known; allowed are ", join(names())));
}

std::vector<std::string> Topology::names() {
  std::vector<std::string> names;
  for (const Topology& topology : known()) names.push_back(topology.name);
  return names;
}

bool Topology::crosses_nodes(const Mesh& mesh, int mesh_dim) const {
  const int64_t size = mesh.dim_size(mesh_dim);
  if (ranks_per_node <= 0 || size == 1) return false;
  if (mesh.ranks_are_positions()) {
    if (mesh.size() <= ranks_per_node) return false;
    // Blocks of stride * size ranks: each lies within a node exactly if nodes are whole blocks.
    return ranks_per_node % (mesh.stride(mesh_dim) * size) != 0;
  }
  for (int64_t p = 0; p < mesh.size(); ++p) {
    const int64_t first = p - mesh.coordinate(p, mesh_dim) * mesh.stride(mesh_dim);
    if (mesh.rank_at(p) / ranks_per_node != mesh.rank_at(first) / ranks_per_node) return true;
  }
  return false;
}

Link Topology::link(const Mesh& mesh, MeshDimSet mesh_dims) const {
  for (const int d : mesh_dims.to_vector()) {
    if (crosses_nodes(mesh, d)) return between;
  }
  return inside;
}

}  // namespace shardwright
