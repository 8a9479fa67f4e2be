// Compiles attention, given as bytes (attention/serialize.h), into the program of one rank.
#pragma once

#include <memory>
#include <string>

#include "runtime/executable.h"

namespace shardwright {

// Returns the program of `rank` for the forward or the backward in `bytes`. Throws UserError if the bytes are not an
// attention, or if the rank is not on its mesh.
std::shared_ptr<const CompiledProgram> compiled_attention(const std::string& bytes, Rank rank);

}  // namespace shardwright
