#include "moves/step.h"

#include "support/error.h"
#include "support/names.h"

namespace shardwright {

const char* step_op_name(StepOp op) {
  switch (op) {
    case StepOp::kSlice:
      return "slice";
    case StepOp::kPartition:
      return "partition";
    case StepOp::kZeroFill:
      return "zero_fill";
    case StepOp::kAllGather:
      return "all_gather";
    case StepOp::kAllToAll:
      return "all_to_all";
    case StepOp::kPermute:
      return "permute";
    case StepOp::kExchange:
      return "exchange";
    case StepOp::kReduceScatter:
      return "reduce_scatter";
    case StepOp::kAllReduce:
      return "all_reduce";
    case StepOp::kCross:
      return "cross";
    case StepOp::kRearrange:
      return "rearrange";
  }
  return "?";
}

StepOp parse_step_op(const std::string& name) { return parse_name("op", name, StepOp::kRearrange, step_op_name); }

bool is_local(StepOp op) { return op == StepOp::kSlice || op == StepOp::kPartition || op == StepOp::kZeroFill; }

bool is_cross_or_rearrange(StepOp op) { return op == StepOp::kCross || op == StepOp::kRearrange; }

std::string step_name(const Step& step) {
  if (is_cross_or_rearrange(step.op)) {
    return concat(step_op_name(step.op), step.before.mesh() == step.after.mesh() ? " on " : " to ",
                  step.after.mesh().to_string());
  }
  return concat(step_op_name(step.op), " over ", step.before.mesh().names_of(step.mesh_dims));
}

}  // namespace shardwright
