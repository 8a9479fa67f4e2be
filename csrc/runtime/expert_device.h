// The functions of experts.h, computed by ATen's operators. The host never waits for the device, and no tensor's size
// depends on values, so a graph can capture these functions. They run on any device; tests compare them with experts.h
// on CPU.
//
// Indices are int64, codes int32. An expert id that is out of range raises ATen's error, on CUDA a device-side
// assertion.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "runtime/experts.h"

namespace shardwright {

// The tables of a placement (experts.h) on a device. Make them before a capture, and keep them as long as the captured
// graph.
struct DevicePlacement {
  DevicePlacement(const ExpertPlacement& placement, c10::Device device);

  bool has_copies;
  int num_ranks;
  // [experts + 1, ranks], or [experts + 1, 1] if every expert is on one rank: element (id + 1, rank) is the code of the
  // expert's replica on the rank, or 0 if there is none. Row 0 is for the id -1.
  at::Tensor code_of;
  at::Tensor target_of;  // [replicas + 1]: the rank of each code; num_ranks for code 0
};

// Like choose_replicas without nodes. `expert_ids`: [tokens, per token], int64. `rank`: this rank in the group. Returns
// codes of the same shape.
at::Tensor choose_replicas_on_device(const DevicePlacement& placement, const at::Tensor& expert_ids, int rank);

// Like RowRoutes, but with rows_per_rank rows for each rank. Unused rows and entries are -1.
struct DeviceRoutes {
  at::Tensor send_rows;      // [ranks * rows_per_rank]
  at::Tensor rows_of_token;  // [tokens, min(per token, ranks)]
  at::Tensor dropped;        // [], int64: number of codes without a row, because the rows of their rank are full
};

// Like route_rows, with exactly `rows_per_rank` rows for every rank. `codes`: [tokens, per token], int32. Once the rows
// of a rank are full, later tokens get no row there.
DeviceRoutes route_rows_on_device(const DevicePlacement& placement, const at::Tensor& codes, int64_t rows_per_rank);

// Like Expansion, but with a fixed number of pairs.
struct DeviceExpansion {
  at::Tensor pairs;    // [max_pairs], -1 after the last pair
  at::Tensor copies;   // [rows, codes per row]: index into `pairs`, or -1
  at::Tensor counts;   // [num_local]: number of copies that are kept for each local expert
  at::Tensor dropped;  // []: number of copies beyond the capacity
};

// Like expand_rows, but keeps only the first `capacity` copies for each expert. `codes`: [rows, codes per row], int32;
// `origins`: [rows], int64. `max_pairs` must be at least the number of copies that are kept.
DeviceExpansion expand_rows_on_device(const at::Tensor& codes, int64_t first_replica, int64_t num_local,
                                      const std::optional<at::Tensor>& origins, int64_t capacity, int64_t max_pairs);

}  // namespace shardwright
