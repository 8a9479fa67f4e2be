// c10d's process groups as groups that programs are bound to.
#pragma once

#include <chrono>
#include <string>

#include "runtime/transport.h"

namespace shardwright {

// The process group that is registered under this name. One object for each process group, as long as that lives.
// Throws c10::Error where no group has the name. Thread-safe.
RankGroupPtr group_named(const std::string& name);

// After which its backend for such devices gives a transfer up.
std::chrono::milliseconds timeout_of(const std::string& name, c10::Device device);

}  // namespace shardwright
