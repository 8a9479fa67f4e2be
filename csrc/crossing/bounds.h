// What no way from a layout on one mesh to a layout on another can go below.
#pragma once

#include <cstdint>

#include "crossing/load.h"
#include "layout/layout.h"

namespace shardwright {

// Cells are the intersections of a part of the source with a part of the destination: |c| elements, which the holders
// of the one have and the n needers, who are the ranks of the other that do not hold the cell, must get.
//
// With pending reductions k contributions to each element are somewhere, and the ranks C that make them are as few and
// as much among the destination's D as can be: |C u D| - 1 transfers are needed per element. A rank of `dst` that is
// partial may hold any share of the value, so one of those that differ in partial mesh dims alone is enough. No rank is
// known to get or send more than the mean then.
struct CrossingBound {
  // A rank must receive what it needs and does not hold.
  int64_t received_bytes_max = 0;
  int64_t received_bytes_sum = 0;

  // By the rank that sends most. `direct`: where only holders send. The holders of a part are those of no other, so it
  // is what the needers of some part want, over its holders. `forwarded`: where needers pass on what they got, so that
  // of each cell |c| at least are sent by holders, and |c| (n - 1) by them or needers: the least worst load of that
  // work. `any`: where every rank may pass on anything: the larger of the mean and of what must leave the holders of a
  // part. `any` is no more than `forwarded`, which is no more than `direct`. Where there are more than kMaxCells cells,
  // `forwarded` is that of `any`, and `forwarded_is_exact` is false.
  Ratio direct_sent;     // elements
  Ratio forwarded_sent;  // elements
  bool forwarded_is_exact = true;
  int64_t direct_sent_bytes_max = 0;
  int64_t forwarded_sent_bytes_max = 0;
  int64_t any_sent_bytes_max = 0;

  // Into some node of so many consecutive ranks: what some rank of it needs and none holds. 0 with partials, and where
  // nodes are not known or larger than kMaxNode.
  int64_t node_bytes_max = 0;
  int64_t node_bytes_per_rank = 0;  // over the ranks of the node that are in either mesh

  static constexpr int64_t kMaxCells = 4096;
  static constexpr int64_t kMaxNode = 256;
};

// `ranks_per_node` 0: all ranks are on one node.
CrossingBound crossing_bound(const Layout& src, const Layout& dst, int64_t ranks_per_node = 0);

}  // namespace shardwright
