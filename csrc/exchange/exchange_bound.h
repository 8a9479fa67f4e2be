// Lower bounds on the traffic of every plan between two layouts, in bytes and elements.
#pragma once

#include <cstdint>

#include "exchange/load.h"

namespace shardwright {

// A cell is the intersection of a part of the source with a part of the destination. It has |c| elements. Its candidate
// senders are the ranks with the source's part. Its n receivers are the ranks with the destination's part that do not
// hold the cell.
//
// With pending reductions, each element has several contributions. Let C be ranks that together hold all contributions
// to an element, one rank for each, and D the ranks that need the element. Transfers must connect all ranks of C and D,
// so the element takes at least |C u D| - 1 transfers; C is chosen so that this number is smallest. If `dst` is
// partial, a rank may hold any share of the value, so of ranks that differ only in partial mesh dims, D has one. With
// pending reductions, the bounds for the busiest rank are means over ranks, and direct_is_exact and forwarded_is_exact
// are false.
//
// Example: 12 elements that ranks 0 and 1 hold as S(0), and that ranks 2, 3 and 4 need as R. There are two cells of 6
// elements, each with one sender and three receivers.
//
//   received     12 by each of ranks 2, 3 and 4, 36 by all
//   direct       18: ranks 0 and 1 each send 6 elements to three ranks
//   forwarded    36 / 5, rounded up to 8: ranks 0 and 1 need only send 6 each; all five ranks can share the other 24
//   any          8: the mean of 36 over five ranks, which is more than the 6 elements that must leave rank 0
struct ExchangeBound {
  // A rank must receive the elements that it needs and does not hold.
  int64_t received_bytes_max = 0;  // of the rank that must receive the most
  int64_t received_bytes_sum = 0;  // of all ranks together

  // The bytes that the busiest sender must send, for three kinds of algorithms; any <= forwarded <= direct.
  //   direct     Only candidate senders send. If no rank holds two parts, the bound is the maximum, over parts, of the
  //              elements that all receivers need, divided by the number of candidate senders. If elements are stored
  //              on several coordinates, it is the least load of the busiest candidate sender; see
  //              exchange/indexed_bound.h, also for the cases in which it is a mean and direct_is_exact is false.
  //   forwarded  Receivers may pass on received data. For each cell, candidate senders send at least |c| elements, and
  //              candidate senders or receivers send |c| (n - 1) more. The bound is the least load of the busiest rank
  //              in this work. With more than kMaxCells cells it is the bound for `any`, and forwarded_is_exact is
  //              false.
  //   any        Every rank may pass on anything. The bound is the larger of the mean and the maximum, over parts, of
  //              the elements that must leave the part's candidate senders, divided by their number.
  Ratio direct_sent;     // elements
  Ratio forwarded_sent;  // elements
  bool direct_is_exact = true;
  bool forwarded_is_exact = true;
  int64_t direct_sent_bytes_max = 0;
  int64_t forwarded_sent_bytes_max = 0;
  int64_t any_sent_bytes_max = 0;

  // The bytes that must enter some node, because a rank of the node needs them and no rank of it holds them. 0 with
  // partials, or if the number of ranks per node is not known or larger than kMaxNode. exchange/indexed_bound.h has the
  // differences for rearrangements.
  int64_t node_bytes_max = 0;
  int64_t node_bytes_per_rank = 0;  // divided by the number of the node's ranks on either mesh

  // The bytes that must leave some node, because only its ranks hold them and a rank of another node needs them,
  // divided by the number of the node's ranks on either mesh. 0 with partials, if the number of ranks per node is not
  // known, or with more than kMaxCells cells.
  int64_t leaving_bytes_per_rank = 0;

  static constexpr int64_t kMaxCells = 4096;  // with more cells, some bounds are not exact or are 0 (see the fields)
  static constexpr int64_t kMaxNode = 256;    // with more ranks per node, bounds of nodes may be 0
};

}  // namespace shardwright
