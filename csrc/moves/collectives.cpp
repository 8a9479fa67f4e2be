#include "moves/collectives.h"

#include <algorithm>
#include <vector>

namespace shardwright {

// Reductions of floats, and of integers other than int16, are native unless they are bitwise.
bool reduces_natively(const Layout& layout, MeshDimSet mesh_dims, Lowering lowering) {
  if (!lowering.reduces) return false;
  for (const int d : mesh_dims.to_vector()) {
    const ReduceOp op = layout.placements()[d].op;
    if (op == ReduceOp::kBitAnd || op == ReduceOp::kBitOr || op == ReduceOp::kBitXor) return false;
  }
  const DType& dtype = layout.dtype();
  return dtype.kind() == DTypeKind::kFloat || (dtype.kind() == DTypeKind::kInteger && dtype != DType::kInt16);
}

bool reduces_natively(const Step& step, Lowering lowering) {
  return !step.ordered && reduces_natively(step.before, step.mesh_dims, lowering);
}

bool can_run_in_rounds(const Step& step, Lowering lowering) {
  return !is_local(step.op) && (step.op != StepOp::kAllReduce || !reduces_natively(step, lowering));
}

int64_t num_collectives(StepOp op, int64_t group_size, bool native) {
  return op == StepOp::kAllReduce && !native && group_size > 2 ? 2 : 1;
}

Traffic reduce_scatter_traffic(int64_t num_held, int64_t num_kept, int64_t k, int64_t item_bytes) {
  return {(k - 1) * num_kept * item_bytes, (num_held - num_kept) * item_bytes, num_kept > 0 ? k - 1 : 0,
          num_held > num_kept ? k - 1 : 0};
}

// Native: the traffic of a ring, rounded up. Composed: the rank receives every peer's contribution to its own chunk,
// then every peer's reduced chunk. Two ranks exchange all contributions instead.
Traffic all_reduce_traffic(int64_t num_held, int64_t k, int64_t index, int64_t item_bytes, bool native) {
  if (native) {
    const int64_t bytes = (2 * num_held * item_bytes * (k - 1) + k - 1) / k;
    const int64_t messages = num_held > 0 ? 2 * (k - 1) : 0;
    return {bytes, bytes, messages, messages};
  }
  if (k == 2) return {num_held * item_bytes, num_held * item_bytes, num_held > 0 ? 1 : 0, num_held > 0 ? 1 : 0};
  const Interval own_chunk = flat_chunk(num_held, k, index);
  const int64_t own = own_chunk.end - own_chunk.begin;
  const int64_t bytes = ((k - 1) * own + num_held - own) * item_bytes;
  const int64_t chunk = (num_held + k - 1) / k;
  const int64_t num_chunks = num_held > 0 ? (num_held + chunk - 1) / chunk : 0;  // chunks that are not empty
  const int64_t messages = num_chunks - (own > 0 ? 1 : 0) + (own > 0 ? k - 1 : 0);
  return {bytes, bytes, messages, messages};
}

int64_t index_in_group(const Mesh& mesh, int64_t position, MeshDimSet mesh_dims) {
  if (!mesh.ranks_are_positions()) {
    const std::vector<int64_t> group = mesh.group(position, mesh_dims);
    return std::find(group.begin(), group.end(), position) - group.begin();
  }
  return mesh.coordinate_index(position, mesh_dims.to_vector());
}

Interval flat_chunk(int64_t n, int64_t k, int64_t index) {
  const int64_t chunk = (n + k - 1) / k;
  return {std::min(index * chunk, n), std::min((index + 1) * chunk, n)};
}

}  // namespace shardwright
