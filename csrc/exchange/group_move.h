// A move on one mesh, within groups of ranks that differ only in some mesh dims.
//
// Some mesh dims of the group may not cut the layout before. Ranks that differ only in these *replica dims* hold the
// same part. By default a receiver reads from the replica that has the receiver's coordinates on the replica dims.
//
// In names, `held` is the part of a rank by the layout before the move, and `needed` its part by the layout after.
#pragma once

#include <cstdint>

#include "exchange/known_parts.h"

namespace shardwright {

struct GroupMove {
  // The layouts must be on one mesh and outlive the object.
  GroupMove(const Layout& before, const Layout& after, MeshDimSet group_dims, int64_t rounds)
      : before(before),
        after(after),
        group_dims(group_dims),
        cutting_dims(group_dims & before.cut_dims()),
        replica_dims(group_dims - before.cut_dims()),
        receivers_per_part(before.mesh().group_size(cutting_dims - after.cut_dims())),
        rounds(rounds),
        held(before),
        needed(after) {}
  GroupMove(const GroupMove&) = delete;
  GroupMove& operator=(const GroupMove&) = delete;

  const Mesh& mesh() const { return before.mesh(); }

  const Layout& before;
  const Layout& after;
  const MeshDimSet group_dims;
  const MeshDimSet cutting_dims;  // the group's mesh dims that cut `before`: members hold different parts there
  const MeshDimSet replica_dims;  // the group's other mesh dims
  // Number of ranks that differ only in mesh dims of cutting_dims that do not cut `after`. They need equal parts.
  const int64_t receivers_per_part;
  const int64_t rounds;  // number of rounds in which messages are sent
  KnownParts held;
  KnownParts needed;
};

// Returns true if `receiver` reads the part of `sender` from `sender` and not from another replica. Both are positions
// in one group and may be equal; then returns true.
bool reads_from(const Layout& before, MeshDimSet group_dims, int64_t sender, int64_t receiver);

}  // namespace shardwright
