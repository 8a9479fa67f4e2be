// Bounds that no way from one layout to another can go below, in bytes and elements.
#pragma once

#include <cstdint>

#include "exchange/load.h"

namespace shardwright {

// A cell is the intersection of a part of the source with a part of the destination. It has |c| elements. The holders
// of the source's part have them, and the cell's n needers must get them: the ranks of the destination's part that do
// not hold the cell.
//
// With pending reductions, each element has k contributions. In the best case the set C of ranks that hold them is as
// small as possible and overlaps the destination's set D of ranks as much as possible, so |C u D| - 1 transfers per
// element are necessary. If `dst` is partial, a rank may hold any share of the value, so D has only one of the ranks
// that differ in nothing but partial mesh dims. In this case the bound for the busiest rank is the mean, and neither
// direct_is_exact nor forwarded_is_exact is true.
struct ExchangeBound {
  // A rank must receive the elements that it needs and does not hold.
  int64_t received_bytes_max = 0;
  int64_t received_bytes_sum = 0;

  // The bytes that the rank that sends most must send, for three kinds of algorithms; any <= forwarded <= direct.
  //   direct     only holders send. Where no rank holds two parts, the bound is the largest, over parts, of what all
  //              needers want, divided by the number of holders. Where elements lie on several coordinates it is the
  //              least load of the busiest holder; see exchange/indexed_bound.h, also for when it is a mean and
  //              direct_is_exact is false.
  //   forwarded  needers may pass on what they got. For each cell, holders send at least |c| elements, and holders or
  //              needers send |c| (n - 1) more; the bound is the least load of the busiest rank in this work. With more
  //              than kMaxCells cells it is the bound for `any`, and forwarded_is_exact is false.
  //   any        every rank may pass on anything. The bound is the larger of the mean and of what must leave the
  //              holders of a part, divided by their number.
  Ratio direct_sent;     // elements
  Ratio forwarded_sent;  // elements
  bool direct_is_exact = true;
  bool forwarded_is_exact = true;
  int64_t direct_sent_bytes_max = 0;
  int64_t forwarded_sent_bytes_max = 0;
  int64_t any_sent_bytes_max = 0;

  // The bytes that must enter some node, because some of its ranks needs it and none holds it. 0 if there are partials,
  // if the number of ranks per node is not known, or if it is larger than kMaxNode.
  int64_t node_bytes_max = 0;
  int64_t node_bytes_per_rank = 0;  // divided by the number of the node's ranks that are in either mesh

  // The bytes that must leave some node, because only its ranks hold it and a rank of another node needs it, divided
  // like the former. 0 also with more than kMaxCells cells.
  int64_t leaving_bytes_per_rank = 0;

  static constexpr int64_t kMaxCells = 4096;
  static constexpr int64_t kMaxNode = 256;
};

}  // namespace shardwright
