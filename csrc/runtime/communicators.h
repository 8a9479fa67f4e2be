// Communicators that backends make late.
//
// NCCL's groups of torch 2.11 make their communicator in the first operation, together with all ranks of the group,
// also where that operation is a batch of messages. In a sparse exchange some ranks have none: they would not come, and
// the others would wait for them.
#pragma once

#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include "runtime/c10d_adapter.h"

namespace shardwright {

// Runs one tiny collective on each group whose first use on this device it is, on the current stream. Collective among
// the groups' ranks, in the order given. While a graph is captured, and on CPU, it does nothing.
void make_communicators(c10::ArrayRef<comm::GroupPtr> groups, c10::Device device);

}  // namespace shardwright
