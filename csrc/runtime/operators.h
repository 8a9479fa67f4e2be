// torch.ops.shardwright: redistributes as operators of PyTorch's dispatcher, which compilers can see.
//
// Schemas use only tensors, ints and strings. A plan or a matmul is passed as a string: a label, then "|", then its
// bytes in base64 (support/wire_format.h). Process groups are passed by their registered names, in the order of
// program().groups; `rank` is this rank on the plan's mesh. Fake kernels are in operators.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "runtime/executable.h"

namespace shardwright {

// The executable of a plan or a matmul, as text, for a rank, bound to these groups. It is cached, and bound anew
// where a name has come to mean another group. Throws c10::ValueError where the text is no plan.
ExecutablePtr executable_of(const std::string& plan, const std::vector<std::string>& groups, int64_t rank);

// To be called where the tables that plans are made with have changed: operators with sizes then ask for plans anew.
void note_changed_tables();

// The bytes in such a string. Throws c10::ValueError where it is none.
std::string bytes_of(const std::string& text);

}  // namespace shardwright
