// Which lowering a process group gets, by the name that its backend has in torch.distributed.
#pragma once

#include <string_view>

#include "cost/lowering.h"

namespace shardwright {

// "gloo" is composed. So is "fake" for tensors on CPU, which moves nothing and stands in for Gloo in dry runs. Every
// other backend, also one that nobody here has heard of (xccl, ucc, mpi, one of an extension), is taken to be like
// NCCL: its own collectives are used wherever they fit. That is right for whatever implements what c10d asks of a
// backend, all_gather_into_tensor and reduce_scatter_tensor included, if perhaps not the fastest it could do; one that
// lacks a collective says so when the first plan that needs it runs.
const Lowering& lowering_of_backend(std::string_view backend, std::string_view device_type);

}  // namespace shardwright
