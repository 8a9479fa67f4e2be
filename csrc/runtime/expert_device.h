// The index arithmetic of experts.h in ATen's operators. The host never waits for the device and no size depends on
// values, so a graph can capture all of it. It runs on any device; tests compare it with experts.h on CPU.
//
// Indices are int64, codes int32. An expert id that is out of range is an error of ATen, on CUDA a device-side
// assertion.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "runtime/experts.h"

namespace shardwright {

// The tables of a placement (experts.h) on a device. Make them before a capture, and keep them as long as the graph
// that reads them.
struct DevicePlacement {
  DevicePlacement(const ExpertPlacement& placement, c10::Device device);

  bool has_copies;
  int num_ranks;
  at::Tensor code_of;    // [experts + 1, ranks (1 without copies)]: the code for expert id + 1 on a rank, or 0
  at::Tensor target_of;  // [replicas + 1]: the rank for each code; num_ranks for code 0
};

// Like choose_replicas without nodes. `expert_ids`: [tokens, per token], int64.
at::Tensor choose_replicas_on_device(const DevicePlacement& placement, const at::Tensor& expert_ids, int rank);

// RowRoutes with a fixed number of rows for each rank; entries without a row are -1.
struct DeviceRoutes {
  at::Tensor send_rows;  // [ranks * rows_per_rank]
  at::Tensor returns;    // [tokens, columns]
  at::Tensor dropped;    // [], int64: number of codes without a row, because the rows of their rank are full
};

// Like route_rows, with exactly `rows_per_rank` rows for every rank. Once the rows of a rank are full, later tokens get
// no row there.
DeviceRoutes route_rows_on_device(const DevicePlacement& placement, const at::Tensor& codes, int64_t rows_per_rank);

// Expansion with a fixed number of pairs.
struct DeviceExpansion {
  at::Tensor pairs;    // [max_pairs], -1 after the last one
  at::Tensor copies;   // [rows, codes per row]: index into `pairs`, or -1
  at::Tensor counts;   // [num_local]: number of copies for each local expert
  at::Tensor dropped;  // []: number of copies beyond the capacity
};

// Like expand_rows, with at most `capacity` copies for each expert. `max_pairs` must be at least the number of copies
// that remain.
DeviceExpansion expand_rows_on_device(const at::Tensor& codes, int64_t first_replica, int64_t num_local,
                                      const std::optional<at::Tensor>& origins, int64_t capacity, int64_t max_pairs);

}  // namespace shardwright
