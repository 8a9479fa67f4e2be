#include "planner/exchange.h"

#include <algorithm>

namespace shardwright {
namespace {

// Mesh dims of the step that do not cut `before`: along them all ranks hold the same.
MeshDimSet replica_dims(const Step& step) { return step.mesh_dims - step.before.cut_dims(); }

}  // namespace

int64_t source_for(const Step& step, int64_t holder, int64_t receiver) {
  const Mesh& mesh = step.before.mesh();
  int64_t source = holder;
  for (const int d : replica_dims(step).to_vector()) {
    source += (mesh.coordinate(receiver, d) - mesh.coordinate(holder, d)) * mesh.stride(d);
  }
  return source;
}

std::vector<int64_t> sources_of(const Step& step, int64_t receiver) {
  return step.before.mesh().group(receiver, step.mesh_dims & step.before.cut_dims());
}

int64_t transfer_elements(const Step& step, int64_t source, int64_t receiver) {
  if (source_for(step, source, receiver) != source) return 0;
  const Region held = step.before.region(source);
  const Region needed = step.after.region(receiver);
  int64_t total = 1;
  for (size_t t = 0; t < held.size() && total > 0; ++t) total *= intersection_length(held[t], needed[t]);
  return total;
}

bool reduces_natively(const Step& step, Backend backend) {
  if (backend != Backend::kNccl) return false;
  for (const int d : step.mesh_dims.to_vector()) {
    const ReduceOp op = step.before.placements()[d].op;
    if (op == ReduceOp::kBitAnd || op == ReduceOp::kBitOr || op == ReduceOp::kBitXor) return false;
  }
  const DType& dtype = step.before.dtype();
  return dtype.kind() == DTypeKind::kFloat || (dtype.kind() == DTypeKind::kInteger && dtype.name() != "int16");
}

Interval flat_chunk(int64_t n, int64_t k, int64_t index) {
  const int64_t chunk = (n + k - 1) / k;
  return {std::min(index * chunk, n), std::min((index + 1) * chunk, n)};
}

}  // namespace shardwright
