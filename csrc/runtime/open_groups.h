// Groups of calls that a user has left open on a thread, such as the block of torch.distributed._coalescing_manager.
//
// NCCL starts what a thread gives to any communicator in an open group only when the group ends. A transfer of ours
// would then begin after the event that says it has ended. So nothing of ours starts there.
#pragma once

#include <c10/core/Device.h>

namespace shardwright {

// Throws c10::Error that says what to do if the calling thread has such a group open for this type of device.
void check_no_open_group(c10::Device device);

// Queries the number of groups that the calling thread has open, for one type of device.
using OpenGroupsQuery = int64_t (*)();
bool register_open_groups_query(c10::DeviceType device, OpenGroupsQuery query);

}  // namespace shardwright
