// Detects an open group of NCCL calls (ncclGroupStart) on a thread, such as a block of
// torch.distributed._coalescing_manager.
//
// NCCL delays all calls in an open group until the group ends. A transfer of ours in an open group would start only
// after the event that should mark its end was recorded, so such a transfer raises an error instead.
#pragma once

#include <c10/core/Device.h>

namespace shardwright {

// Throws c10::Error that names the remedy if the calling thread has an open group for this type of device. Does nothing
// for types of device without a registered query.
void check_no_open_group(c10::Device device);

// Returns the number of groups that are open on the calling thread, for one type of device.
using OpenGroupsQuery = int64_t (*)();
// Registers the query of a type of device. Returns true.
bool register_open_groups_query(c10::DeviceType device, OpenGroupsQuery query);

}  // namespace shardwright
