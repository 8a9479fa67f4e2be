// Makes c10d's process groups available as groups to which programs are bound.
#pragma once

#include <chrono>
#include <string>

#include "runtime/transport.h"

namespace shardwright {

// Returns the process group that is registered under this name. There is one object for each process group, as long as
// that exists. Throws c10::Error if no group has the name. Thread-safe.
RankGroupPtr group_named(const std::string& name);

// After which its backend for such devices gives a transfer up.
std::chrono::milliseconds timeout_of(const std::string& name, c10::Device device);

}  // namespace shardwright
