// RankGroups, to which programs are bound, for c10d's process groups.
#pragma once

#include <chrono>
#include <string>

#include "runtime/transport.h"

namespace shardwright {

// Returns the RankGroup of the process group that is registered under this name: the same object in every call, as long
// as the process group exists. Throws c10::Error if no group has the name. Thread-safe.
RankGroupPtr group_named(const std::string& name);

// Returns the timeout that the backend of the process group with this name has for transfers on this type of device.
// Throws c10::Error if no group has the name, or the group has no backend for the device.
std::chrono::milliseconds timeout_of(const std::string& name, c10::Device device);

}  // namespace shardwright
