// Compiles an attention from its bytes (attention/serialize.h) into a rank's program.
#pragma once

#include <memory>
#include <string>

#include "runtime/executable.h"

namespace shardwright {

// Throws UserError if `bytes` are not an attention, or if the rank is not on its mesh.
std::shared_ptr<const CompiledProgram> compiled_attention(const std::string& bytes, Rank rank);

}  // namespace shardwright
