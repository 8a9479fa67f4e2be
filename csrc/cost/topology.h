// The links between the ranks of a mesh and what they cost. Every predicted time is computed from a Topology.
//
// The model is latency plus bandwidth ("alpha-beta"), in integer picoseconds, so that ties break alike on every rank.
// Ranks are on nodes of `ranks_per_node` consecutive ranks. A group whose ranks are on one node uses the inside link,
// every other group the link between nodes. A mesh dim may have its own link, by name. A group over several mesh dims
// has the worst latency and the worst bandwidth among theirs.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "layout/mesh.h"

namespace shardwright {

struct Link {
  int64_t message_ps = 0;  // per message received, or sent in a crossing if those are more
  int64_t ps_per_kib = 0;  // per rank: the larger of bytes sent and received; a shared NIC is counted in here
  bool operator==(const Link&) const = default;
};

// Combines the worse latency and the worse bandwidth of the two.
Link slower(const Link& a, const Link& b);

struct Topology {
  std::string name;
  int64_t ranks_per_node = 0;  // 0: all ranks are on one node
  int64_t step_ps = 0;         // fixed cost of a collective
  int64_t memory_ps_per_kib = 0;
  Link inside;
  Link between;
  std::map<std::string, Link> mesh_dims;  // by name; mesh dims that are not listed use inside or between

  bool operator==(const Topology&) const = default;

  // The built-in topologies. "8xNVLink" is one node of GPUs; "64x8" is nodes of eight such GPUs with a 400 Gb/s NIC
  // each; "gloo-local" is processes of one machine over loopback. Throws UserError on other names.
  static Topology named(std::string_view name);
  static std::vector<std::string> names();

  // Throws UserError if a figure is negative or more than a second, or if a name is not UTF-8.
  void check() const;

  // The slowest link that some group over `mesh_dims` crosses.
  Link link(const Mesh& mesh, MeshDimSet mesh_dims) const;
  Link link_of(const Mesh& mesh, int mesh_dim) const;
  // Returns whether the link of a group over these mesh dims is that between nodes, so that its ranks on one node have
  // a better one among themselves: `inside`.
  bool is_between_nodes(const Mesh& mesh, MeshDimSet mesh_dims) const;
  // Returns whether any two ranks that differ only in this mesh dim are on different nodes.
  bool crosses_nodes(const Mesh& mesh, int mesh_dim) const;
};

// Returns whether both meshes have equal topologies, or none.
bool same_topology(const Mesh& a, const Mesh& b);

}  // namespace shardwright
