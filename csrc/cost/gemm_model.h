// Predicts how long a matrix product takes. The choice of chunks depends on it, so all ranks must use the same model.
//
// A product is cut into tiles, and each processor computes one tile at a time. A product of few tiles leaves processors
// idle in its last wave, or in its only one. That is the cost of cutting a product into chunks. Libraries then use
// smaller tiles, which reuse less of what they load: each halving of a tile, up to kMaxHalvings, costs kHalvingPercent
// more time per element. The last wave may use smaller tiles than the full waves before it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardwright {

constexpr int kMaxHalvings = 3;
constexpr int64_t kHalvingPercent = 15;

struct GemmModel {
  std::string name;
  int64_t num_processors = 1;  // SMs of a GPU; 1 for the cores of a CPU together
  int64_t tile_rows = 1;
  int64_t tile_columns = 1;
  int64_t flops_per_us = 1;        // of one processor, for operands of 16 bits
  int64_t launch_ps = 0;           // per product
  int64_t memory_ps_per_kib = 0;   // to read the operands and write the result
  int64_t contention_percent = 0;  // how much longer a product takes while data travels
  int64_t chunk_ps = 0;            // on hosts: how much later a chunk's transfer ends alongside products than alone

  bool operator==(const GemmModel&) const = default;

  // The built-in models: "h100" (SXM; the H200 has the same processors), "a100" and "cpu". They are orders of
  // magnitude, not measurements. Throws UserError on other names.
  static GemmModel named(const std::string& name);
  static std::vector<std::string> names();

  // Throws UserError if a figure is negative, or if one that is divided by is below 1.
  void check() const;

  // The time of `count` products of m x k by k x n. Compared with 16-bit operands, 8-bit operands run twice as fast,
  // 32-bit ones half and 64-bit ones a quarter as fast.
  int64_t picoseconds(int64_t m, int64_t n, int64_t k, int64_t count, int64_t item_bytes) const;

  // The number of waves of whole tiles, including a last one that may be partial; at least 1.
  int64_t waves(int64_t m, int64_t n, int64_t count) const;

  // The same model with this many processors fewer, but at least one.
  GemmModel leaving(int64_t processors) const;
};

}  // namespace shardwright
