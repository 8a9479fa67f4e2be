// Plans as bytes, to go from one binary or process to another.
#pragma once

#include <string>
#include <string_view>

#include "moves/plan.h"

namespace shardwright {

// Little-endian, versioned, closed by a checksum. Equal plans give equal bytes.
std::string to_bytes(const Plan& plan);

// Throws UserError on bytes that are cut short, changed, of another version, or describe no plan: steps too must follow
// from one another and be what they say.
Plan from_bytes(std::string_view bytes);

}  // namespace shardwright
