// One move of a tensor between two layouts.
#pragma once

#include <cstdint>
#include <string>

#include "cost/lowering.h"
#include "exchange/replica_policy.h"
#include "layout/layout.h"

namespace shardwright {

enum class StepOp : uint8_t {
  kSlice,          // local: keep a subset of the elements held
  kPartition,      // local: R -> P, with contributions that reduce to the value
  kZeroFill,       // local: S -> P(sum), the own part and zeros elsewhere
  kAllGather,      // every rank receives all members' parts
  kAllToAll,       // every rank sends every other rank an equal share of its part
  kPermute,        // every rank sends its whole part to one other rank
  kExchange,       // every rank sends each peer what that peer needs
  kReduceScatter,  // reduce, each rank keeps a part
  kAllReduce,      // reduce, each rank keeps all
  kCross,      // from one mesh to another, every rank sends each peer what that peer needs (exchange/grid_exchange.h)
  kRearrange,  // an exchange of pieces or flattened dims, on one mesh or between two (exchange/indexed_exchange.h)
};

const char* step_op_name(StepOp op);
StepOp parse_step_op(const std::string& name);  // throws UserError
// Returns true for slice, partition and zero_fill, in which no rank sends anything.
bool is_local(StepOp op);
// Returns true for kCross and kRearrange, whose steps may involve the ranks of two meshes.
bool is_cross_or_rearrange(StepOp op);

constexpr int64_t kMaxRounds = int64_t{1} << 20;  // maximum number of rounds of a step

// One move from `before` to `after`, within groups of ranks that differ only in `mesh_dims`. A crossing leads from one
// mesh to another and involves the ranks of both; its `mesh_dims` are empty, and ranks that hold the same data always
// share the sending. A rearrangement is like a crossing, but may begin and end on one mesh.
struct Step {
  StepOp op;
  MeshDimSet mesh_dims;
  Layout before;
  Layout after;
  ReplicaPolicy policy = ReplicaPolicy::kAligned;  // how ranks that hold the same data share the sending
  // For an exchange, reduction or crossing: the number of rounds. Each round sends an equal share of every message, so
  // staging buffers are `rounds` times smaller. Each round counts as a step.
  int64_t rounds = 1;
  // For a reduction: contributions are exchanged and summed by this library in the order of positions, never by a
  // native collective.
  bool ordered = false;
  // For ReplicaPolicy::kNodeLocal: this many consecutive ranks form a node.
  int64_t ranks_per_node = 0;
};

// Returns the op and the step's mesh dims: "all_gather over dp+tp". For crossings and rearrangements, returns the op
// and the mesh after the step: "cross to stage=2,tp=4", or "rearrange on dp=2" if the mesh does not change.
std::string step_name(const Step& step);

}  // namespace shardwright
