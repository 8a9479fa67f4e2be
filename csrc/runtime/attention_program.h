// Attention from its bytes (attention/serialize.h) to a rank's program.
#pragma once

#include <memory>
#include <string>

#include "runtime/executable.h"

namespace shardwright {

// Throws UserError if they are not the bytes of an attention, or if the rank is not on its mesh.
std::shared_ptr<const CompiledProgram> compiled_attention(const std::string& bytes, Rank rank);

}  // namespace shardwright
