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

// Compiles a plan, a matmul or an attention, given as a string, for a rank. The program is cached, so asking first for
// its groups and later for its executable compiles it once. Throws c10::ValueError for other strings, and UserError if
// the rank is not on the mesh.
std::shared_ptr<const CompiledProgram> compiled_of(const std::string& text, Rank rank);

// Returns the executable of a plan or a matmul, given as a string, for a rank, bound to these groups. It is cached, and
// bound again if a name now refers to another group. Throws c10::ValueError if the string is not a plan.
ExecutablePtr executable_of(const std::string& plan, const std::vector<std::string>& groups, int64_t rank);

// Discards the plans of operators with sizes, so that they are planned again. Must be called after each change of the
// tables from which plans are made.
void invalidate_sized_plans();

// Turns the comparison of ranks on or off (sw.debug.check_ranks): if it is on, all ranks compare the program of an
// operator before anything is sent.
void compare_ranks(bool on);

// Returns the bytes in a plan string. Throws c10::ValueError for other strings.
std::string bytes_of(const std::string& text);

}  // namespace shardwright
