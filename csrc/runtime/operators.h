// torch.ops.shardwright: redistributes and products as operators of PyTorch's dispatcher, for graphs that compilers
// trace.
//
// Operators take only tensors, numbers and strings. A plan, a matmul or an attention is passed as its *text*: a label,
// then "|", then its bytes in base64 (support/wire_format.h). Process groups are passed by their registered names, in
// the order of program().groups. `rank` is this rank's global number, which the plan's mesh uses. The fake kernels are
// in torch_ext/shardwright/graph/operators.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "runtime/executable.h"

namespace shardwright {

// Returns the program of a rank for the text of a plan, a matmul or an attention. Programs are cached, also for
// executable_of. Throws c10::ValueError if `text` is not a label and base64, and UserError if its bytes are none of the
// three or the rank is not on the mesh.
std::shared_ptr<const CompiledProgram> compiled_of(const std::string& text, Rank rank);

// Returns the program of compiled_of, bound to the groups with these names. It is cached, and bound again if a name now
// refers to another group. Throws c10::ValueError where compiled_of throws, and for groups that do not fit the program;
// c10::Error if a name has no group.
ExecutablePtr executable_of(const std::string& text, const std::vector<std::string>& groups, int64_t rank);

// Makes the operator redistribute_start forget the plans that it has made for `sizes`, so that its next calls plan
// again. Must be called after each change of the tables from which plans are made (PlanningTables).
void invalidate_sized_plans();

// If `enabled`, all ranks compare the program of each operator before anything is sent (sw.debug.check_ranks).
// Initially false.
void set_check_ranks(bool enabled);

}  // namespace shardwright
