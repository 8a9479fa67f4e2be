// Groups of NCCL calls that a user has left open on a thread, such as a block of torch.distributed._coalescing_manager.
//
// NCCL starts the calls of a thread in an open group only when the group ends, on any communicator. A transfer of ours
// would start after the event that marks its end. So our transfers raise an error there.
#pragma once

#include <c10/core/Device.h>

namespace shardwright {

// Throws c10::Error with the remedy if the calling thread has such a group open for this type of device.
void check_no_open_group(c10::Device device);

// Returns the number of groups that the calling thread has open, for one type of device.
using OpenGroupsQuery = int64_t (*)();
bool register_open_groups_query(c10::DeviceType device, OpenGroupsQuery query);

}  // namespace shardwright
