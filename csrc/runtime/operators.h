// torch.ops.shardwright: redistributes as operators of PyTorch's dispatcher, which compilers can see.
//
// Schemas keep to tensors, ints and strings. A plan travels as text: anything, then "|", then the plan's own bytes in
// base64; products as products/matmul.h writes them. Process groups go by their registered names, in the order of
// program().groups; `rank` is this rank by the plan's mesh. Fake kernels are in operators.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "runtime/executable.h"

namespace shardwright {

// The executable of a plan, or of a matmul's text, for a rank, bound to these groups; kept, and bound anew where a name
// stands for another group by now. Throws c10::ValueError on what is no plan.
ExecutablePtr executable_of(const std::string& plan, const std::vector<std::string>& groups, int64_t rank);

// The bytes of a plan in text.
std::string plan_bytes_of(const std::string& plan);

}  // namespace shardwright
