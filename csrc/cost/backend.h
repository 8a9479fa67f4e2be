// Chooses the lowering of a process group by its torch.distributed backend, and that of a single rank by its device.
#pragma once

#include <string_view>

#include "cost/gemm_model.h"
#include "cost/lowering.h"

namespace shardwright {

// Returns Lowering::kGloo for "gloo", and for "fake" on CPU, which moves nothing and replaces Gloo in dry runs. Returns
// Lowering::kNccl for every other backend (nccl, xccl, ucc, mpi, extensions): plans use its native collectives
// wherever they apply. This is correct, though perhaps not fastest, for every backend that implements all c10d
// collectives, all_gather_into_tensor and reduce_scatter_tensor included. A backend that lacks a collective raises its
// own error when the first plan that needs it runs.
const Lowering& lowering_of_backend(std::string_view backend, std::string_view device_type);

// Returns the lowering for plans of a single rank, which has no process group: kGloo for "cpu", else kNccl.
const Lowering& lowering_of_device(std::string_view device_type);

// Returns the default GEMM model for plans with this lowering: "h100" if transfers use device memory, else "cpu".
GemmModel default_gemm_model(const Lowering& lowering);

}  // namespace shardwright
