#include "moves/step_exchange.h"

#include "exchange/indexed_exchange.h"
#include "support/error.h"

namespace shardwright {

GridExchange crossing_of(const Step& step) {
  return GridExchange(step.before, step.after, step.policy, step.ranks_per_node);
}

MeshExchange mesh_exchange_of(const Step& step) {
  return MeshExchange(step.before, step.after, step.mesh_dims, step.policy, step.rounds);
}

std::unique_ptr<const Exchange> exchange_of(const Step& step) {
  check_invariant(step.op != StepOp::kReduceScatter && step.op != StepOp::kAllReduce,
                  "exchange_of was called for a step that reduces: ", step_op_name(step.op));
  if (step.op == StepOp::kCross) return std::make_unique<const GridExchange>(crossing_of(step));
  if (step.op == StepOp::kRearrange) {
    return std::make_unique<const IndexedExchange>(step.before, step.after, step.policy);
  }
  // A local step sends nothing, even if other ranks hold elements that a rank fills with zeros.
  if (is_local(step.op)) return std::make_unique<const MeshExchange>(step.before, step.after, MeshDimSet());
  return std::make_unique<const MeshExchange>(step.before, step.after, step.mesh_dims, step.policy, step.rounds);
}

}  // namespace shardwright
