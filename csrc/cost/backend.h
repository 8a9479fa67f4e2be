// What carries out the moves of a plan.
#pragma once

#include <cstdint>
#include <string>

namespace shardwright {

// How the moves are lowered. kNccl uses the native reduce-scatter, all-reduce and all-gather where they fit. Gloo's own
// stage through extra copies, so kGloo composes them from messages and sums in the order of positions.
enum class Backend : uint8_t { kNccl, kGloo };

Backend parse_backend(const std::string& name);  // "nccl" or "gloo"; throws UserError
const char* backend_name(Backend backend);

}  // namespace shardwright
