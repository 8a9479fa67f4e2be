// Chooses the lowering for a process group by the name of its backend in torch.distributed.
#pragma once

#include <string_view>

#include "cost/lowering.h"

namespace shardwright {

// "gloo" gets Lowering::kGloo. So does "fake" for tensors on CPU: it moves nothing and takes Gloo's place in dry runs.
// Every other backend, known here or not (xccl, ucc, mpi, one of an extension), gets Lowering::kNccl: its own
// collectives are used wherever they fit. That is correct, though perhaps not fastest, for every backend that
// implements what c10d expects, all_gather_into_tensor and reduce_scatter_tensor included. A backend that lacks a
// collective raises its own error when the first plan that needs it runs.
const Lowering& lowering_of_backend(std::string_view backend, std::string_view device_type);

}  // namespace shardwright
