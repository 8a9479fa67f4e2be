// Chooses the lowering for a process group by the name of its backend in torch.distributed, and for a single rank by
// its device.
#pragma once

#include <string_view>

#include "cost/gemm_model.h"
#include "cost/lowering.h"

namespace shardwright {

// "gloo" gets Lowering::kGloo. So does "fake" for tensors on CPU: it moves nothing and takes Gloo's place in dry runs.
// Every other backend, known here or not (xccl, ucc, mpi, one of an extension), gets Lowering::kNccl: its own
// collectives are used wherever they fit. That is correct, though perhaps not fastest, for every backend that
// implements what c10d expects, all_gather_into_tensor and reduce_scatter_tensor included. A backend that lacks a
// collective raises its own error when the first plan that needs it runs.
const Lowering& lowering_of_backend(std::string_view backend, std::string_view device_type);

// Returns the lowering of what one rank does alone, without a process group.
const Lowering& lowering_of_device(std::string_view device_type);

// Returns the times of products for plans with this lowering where no others are known: those of a GPU if transfers
// read and write device memory, else those of a CPU.
GemmModel default_products(const Lowering& lowering);

}  // namespace shardwright
