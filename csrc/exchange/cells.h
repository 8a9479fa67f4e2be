// Groups the elements of a rearrangement by their candidate senders and receivers, and computes the least load of the
// busiest sender.
//
// A *class* is the set of elements of an axis that are on the same axis shards on both sides. A *cell* is one class of
// each axis. All elements of a cell have the same candidate senders and the same receivers. So the number of cells is
// the number of different overlaps of shards, whatever the number of elements.
//
// Example: rank 0 holds 8 elements, rank 1 holds elements 0 to 3, and ranks 2 and 3 need halves, as S(0).
//
//   class [0, 4)    one cell: ranks 0 and 1 hold it, and rank 2 needs it
//   class [4, 8)    one cell: rank 0 holds it, and rank 3 needs it
//
// direct_load() is 4: rank 1 serves rank 2, and rank 0 serves rank 3.
//
// Axes, axis shards and candidate senders are defined in exchange/axes.h.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "exchange/axes.h"
#include "exchange/index_set.h"
#include "exchange/load.h"
#include "layout/rank.h"

namespace shardwright {

// All cells that some rank needs and does not hold.
class Cells {
 public:
  static constexpr int64_t kMaxCells = 4096;

  // Finds all cells. Returns nullopt if there are more than kMaxCells or if listing them takes too long. `ranks` are
  // the ranks of both meshes. In the result, ranks are indices in this list.
  static std::optional<Cells> of(const AxisGrid& src, const AxisGrid& dst, const std::vector<Rank>& ranks);

  // A class: elements of one axis.
  struct Class {
    IntervalList elements;  // ascending
    IndexSet before;        // ranks with these elements on their shard of the source
    IndexSet after;         // ranks with these elements on their shard of the destination
  };
  struct Cell {
    std::vector<size_t> classes;  // by axis: index in classes(axis)
    int64_t elements = 0;
    IndexSet senders;    // ranks that hold the cell
    IndexSet receivers;  // ranks that need the cell and do not hold it; at least one
  };
  const std::vector<Class>& classes(size_t axis) const { return classes_[axis]; }
  const std::vector<Cell>& all() const { return cells_; }  // only cells that have receivers

  // Return the least number of elements that the busiest sender must send (exchange/exchange_bound.h).
  Ratio direct_load() const;     // if only candidate senders send
  Ratio forwarded_load() const;  // if receivers also send received data
  Ratio leaving_load() const;    // if candidate senders send each cell only once, and other ranks do the rest

  // Returns, by cell, the index of each sender and the number of elements that it sends to all receivers together. No
  // rank sends more than `most` elements, plus up to one element for each cell if ranks have the same shards on both
  // sides. `most` must be at least direct_load().
  std::vector<std::vector<std::pair<size_t, int64_t>>> direct_shares(int64_t most) const;

 private:
  struct Work;

  Cells(const AxisGrid& src, const AxisGrid& dst, const std::vector<Rank>& ranks);
  // Appends the classes of an axis to classes_. Returns false if there are too many, or if finding them takes too long.
  bool find_classes(const AxisGrid& src, const AxisGrid& dst, const std::vector<Rank>& ranks, size_t axis);
  // Fills cells_ from all classes. Returns false if there are too many cells, or if they have too many ranks.
  bool find_cells();
  // Returns one job for each cell: a copy for each receiver, which any of the candidate senders may send.
  Work direct_work() const;

  size_t num_ranks_;
  // A team is the ranks that have equal shards on both sides: they are candidate senders and receivers of the same
  // cells.
  std::vector<std::vector<size_t>> teams_;
  std::vector<size_t> team_of_;              // by rank: index in teams_
  std::vector<std::vector<Class>> classes_;  // by axis
  std::vector<Cell> cells_;
};

}  // namespace shardwright
