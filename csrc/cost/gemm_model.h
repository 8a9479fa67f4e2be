// Predicts the time of a matrix product. The choice of chunks depends on it, so all ranks must use the same model.
//
// A product is cut into tiles, and each processor computes one tile at a time. The last wave of tiles leaves processors
// idle, which is the cost of cutting a product into chunks. Libraries then use smaller tiles, which reuse fewer of the
// loaded values: each halving of a tile, up to kMaxHalvings, costs kHalvingPercent more time per element. The last wave
// may use smaller tiles than the full waves before it.
//
// Example: 5 tiles of 100 us each on 4 processors.
//   full wave     4 tiles on 4 processors                                            100 us
//   last wave     1 full tile on one processor                                       100 us
//                 2 half tiles on two processors, 100 / 2 x 115%                     57.5 us
//                 4 quarter tiles on four processors, 100 / 4 x 130%                 32.5 us
//   The product takes 100 + 32.5 us.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardwright {

constexpr int kMaxHalvings = 3;          // a tile is halved at most this often
constexpr int64_t kHalvingPercent = 15;  // extra time per element of each halving
// Maximum contention_percent with copy engines. Medians on two H200s were 3 and 3.5 (benchmarks/gpu_overlap.py).
constexpr int64_t kCopyEngineContentionPercent = 3;

// The rates of a device for matrix products.
struct GemmModel {
  std::string name;
  int64_t num_processors = 1;  // SMs of a GPU; 1 for all cores of a CPU
  int64_t tile_rows = 1;
  int64_t tile_columns = 1;
  int64_t flops_per_us = 1;        // of one processor, for 16-bit operands
  int64_t launch_ps = 0;           // per product
  int64_t memory_ps_per_kib = 0;   // to read the operands and write the result
  int64_t contention_percent = 0;  // extra time of a product while transfers run, in percent
  int64_t chunk_ps = 0;            // on hosts: extra time of a chunk's transfer while products run
  // On devices: the processors that a transfer needs for full speed; 0 if copy engines carry it out. The default is the
  // number of NCCL's channels between the GPUs of a node, which was not measured.
  int64_t transfer_processors = 16;

  bool operator==(const GemmModel&) const = default;

  // The built-in models: "h100" (SXM; the H200 has the same processors), "a100" and "cpu". They are orders of
  // magnitude, not measurements. Throws UserError on other names.
  static GemmModel named(const std::string& name);
  static std::vector<std::string> names();  // of the built-in models

  // Throws UserError if num_processors, a tile size or flops_per_us is below 1, or if another number is negative. Also
  // throws UserError if a number is above Topology::kMaxValue.
  void check() const;

  // Returns the time of one launch that computes `count` products of m x k by k x n, whose elements have `item_bytes`
  // each. Returns 0 if m, n or `count` is 0. Compared with 16-bit operands, 8-bit operands run twice as fast, 32-bit
  // operands half as fast and 64-bit operands a quarter as fast.
  int64_t picoseconds(int64_t m, int64_t n, int64_t k, int64_t count, int64_t item_bytes) const;

  // Returns the number of waves of full-size tiles in which `count` m x n results are computed, at least 1. The last
  // wave may be partial.
  int64_t waves(int64_t m, int64_t n, int64_t count) const;

  // Returns the model with this many processors fewer, but at least one.
  GemmModel with_fewer_processors(int64_t processors) const;

  // Returns the model for transfers that copy engines carry out. The contention is at most
  // kCopyEngineContentionPercent.
  GemmModel with_copy_engines() const;
};

}  // namespace shardwright
