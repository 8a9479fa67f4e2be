// The index arithmetic of experts.h in ATen's operators: nothing waits for the device, and no size depends on values,
// so all of it can be captured in a graph. It runs on any device; tests compare it with experts.h on the CPU.
//
// Indices are int64, codes int32. An expert id that is out of range is an error of ATen's, on CUDA one of the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "runtime/experts.h"

namespace shardwright {

// A placement's tables on a device. To be made before a capture.
struct DevicePlacement {
  DevicePlacement(const ExpertPlacement& placement, c10::Device device);

  bool has_copies;
  int num_ranks;
  at::Tensor code_of;    // [experts + 1, ranks, or 1 without copies]: codes by expert id + 1 and rank, or 0
  at::Tensor target_of;  // [replicas + 1]: the rank by code; num_ranks for code 0
};

// As choose_replicas where nodes are not known. `expert_ids`: [tokens, per token], int64.
at::Tensor choose_replicas_on_device(const DevicePlacement& placement, const at::Tensor& expert_ids, int rank);

struct DeviceRoutes {
  at::Tensor send_rows;  // [ranks * rows_per_rank]
  at::Tensor returns;    // [tokens, columns]
  at::Tensor dropped;    // how many codes have no row, because their rank's are full; [], int64
};

// As route_rows with exactly `rows_per_rank` rows for every rank; later tokens find them full.
DeviceRoutes route_rows_on_device(const DevicePlacement& placement, const at::Tensor& codes, int64_t rows_per_rank);

struct DeviceExpansion {
  at::Tensor pairs;    // [num_places], -1 behind the last
  at::Tensor places;   // [rows, per row]
  at::Tensor counts;   // [num_local]
  at::Tensor dropped;  // []
};

// As expand_rows, with at most `capacity` rows for each expert. `num_places` must be enough for what is left.
DeviceExpansion expand_rows_on_device(const at::Tensor& codes, int64_t first_replica, int64_t num_local,
                                      const std::optional<at::Tensor>& origins, int64_t capacity, int64_t num_places);

}  // namespace shardwright
