// Communicators that backends create late.
//
// NCCL's groups of torch 2.11 create their communicator in their first operation, which needs all ranks of the group,
// also where that operation is a batch of messages. In a sparse exchange some ranks have no messages: they would not
// take part, and the others would wait for them.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include "runtime/c10d_adapter.h"

namespace shardwright {

// Runs one tiny collective, on the current stream, on each group that is used on this device for the first time.
// Collective among the groups' ranks, in the order given. On CPU, and while a graph is captured, it does nothing.
void make_communicators(c10::ArrayRef<comm::GroupPtr> groups, c10::Device device);

}  // namespace shardwright
