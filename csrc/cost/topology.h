// The links between the ranks of a mesh and their costs. Every predicted time is computed from a Topology.
//
// The model is latency plus bandwidth ("alpha-beta"). Times are integer picoseconds, so that all ranks break ties in
// the same way. A node has `ranks_per_node` consecutive ranks. A group within one node uses the link `inside`, every
// other group the link `between`. A mesh dim may have its own link, by name. A group over several mesh dims has the
// worst latency and the worst bandwidth of their links.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "layout/mesh.h"

namespace shardwright {

// The costs of one rank's transfers over a link.
struct Link {
  int64_t message_ps = 0;  // per message; the larger of the numbers of messages received and sent counts
  int64_t ps_per_kib = 0;  // per KiB; the larger of the bytes received and sent counts. Includes sharing of a NIC
  bool operator==(const Link&) const = default;
};

// Returns a link with the worse latency and the worse bandwidth of the two links.
Link slower(const Link& a, const Link& b);

struct Topology {
  // Maximum value of each number: about a second in picoseconds. Sums of a few do not overflow.
  static constexpr int64_t kMaxValue = int64_t{1} << 40;

  std::string name;
  int64_t ranks_per_node = 0;     // 0: all ranks are on one node
  int64_t step_ps = 0;            // fixed cost of a collective
  int64_t memory_ps_per_kib = 0;  // of a local copy, per KiB copied
  Link inside;
  Link between;
  std::map<std::string, Link> mesh_dims;  // by name; other mesh dims use inside or between

  bool operator==(const Topology&) const = default;

  // The built-in topologies. "8xNVLink" is one node of GPUs; "64x8" is nodes of eight such GPUs with a 400 Gb/s NIC
  // each; "gloo-local" is processes of one machine over loopback. Throws UserError on other names.
  static Topology named(std::string_view name);
  static std::vector<std::string> names();  // of the built-in topologies

  // Throws UserError if a number is not in [0, kMaxValue], or if a name is not UTF-8.
  void check() const;

  // Returns the link of a group over `mesh_dims`, which has the worst latency and the worst bandwidth of the links
  // along them. Without mesh dims, returns a link with costs of 0.
  Link slowest_link(const Mesh& mesh, MeshDimSet mesh_dims) const;
  // Returns the link of a group over one mesh dim: its own if it has one, else `between` or `inside`.
  Link link_along(const Mesh& mesh, int mesh_dim) const;
  // Returns true if a group over these mesh dims uses the link `between`: none of the mesh dims has its own link, and
  // one of them crosses nodes. Two ranks of such a group that are on one node use the link `inside`.
  bool is_between_nodes(const Mesh& mesh, MeshDimSet mesh_dims) const;
  // Returns true if some two ranks that differ only in this mesh dim are on different nodes.
  bool crosses_nodes(const Mesh& mesh, int mesh_dim) const;
};

// Returns true if both meshes have equal topologies, or if neither has one.
bool same_topology(const Mesh& a, const Mesh& b);

}  // namespace shardwright
