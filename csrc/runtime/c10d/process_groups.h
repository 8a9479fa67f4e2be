// c10d's process groups as RankGroups, to which programs are bound.
#pragma once

#include <chrono>
#include <string>

#include "runtime/transport.h"

namespace shardwright {

// Returns the process group that is registered under this name. There is one RankGroup for each process group, as long
// as the process group exists. Throws c10::Error if no group has the name. Thread-safe.
RankGroupPtr group_named(const std::string& name);

// Returns the timeout of transfers of the group's backend for this device.
std::chrono::milliseconds timeout_of(const std::string& name, c10::Device device);

}  // namespace shardwright
