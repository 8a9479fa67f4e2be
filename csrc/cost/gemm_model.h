// How long a matrix product takes: the table behind the choice of chunks, the same on every rank.
//
// A product is cut into tiles, and processors take one each at a time: a product of few tiles leaves processors idle
// in its last wave, or in its only one. That is what chunks cost. Libraries then take smaller tiles, which reuse less
// of what they load: each halving of a tile, up to kMaxHalvings, costs kHalvingPercent more time per element. Whole
// waves and what is left over may differ in that.
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
  int64_t contention_percent = 0;  // by how much a product takes longer while data travels

  bool operator==(const GemmModel&) const = default;

  // "h100" (SXM; the H200 has the same processors), "a100", "cpu". Orders of magnitude, not measurements. Throws
  // UserError naming these.
  static GemmModel named(const std::string& name);
  static std::vector<std::string> names();

  // Throws UserError on figures below 0, and below 1 where they divide.
  void check() const;

  // Of m x k times k x n, `count` times. Operands of 8 bits go twice as fast, of 32 half and of 64 a quarter as fast.
  int64_t picoseconds(int64_t m, int64_t n, int64_t k, int64_t count, int64_t item_bytes) const;

  // How often whole tiles fill the processors, the last time perhaps not all of them; at least 1.
  int64_t waves(int64_t m, int64_t n, int64_t count) const;

  // The same without so many of its processors, of which one is left at least.
  GemmModel leaving(int64_t processors) const;
};

}  // namespace shardwright
