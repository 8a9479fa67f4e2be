// The elements of a rearrangement by who holds and who needs them, and the least that its busiest rank must send.
//
// A *class* is the elements of an axis that are on the same slots on both sides; a *cell* is one class of each axis.
// All elements of a cell have the same holders and the same needers, so there are as few cells as slots overlap in
// different ways, however many elements there are.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "exchange/axes.h"
#include "exchange/load.h"
#include "layout/rank.h"

namespace shardwright {

// Some of the ranks in a list, by their numbers in it.
class RankSet {
 public:
  explicit RankSet(size_t ranks, bool has_all = false)
      : words_((ranks + 63) / 64, has_all ? ~uint64_t{0} : uint64_t{0}) {}

  void add(size_t i) { words_[i / 64] |= uint64_t{1} << (i % 64); }
  void add(const RankSet& other);
  void keep(const RankSet& other);
  void remove(const RankSet& other);
  int64_t size() const;
  std::vector<size_t> numbers() const;  // ascending
  auto operator<=>(const RankSet&) const = default;

 private:
  std::vector<uint64_t> words_;
};

class Cells {
 public:
  static constexpr int64_t kMaxCells = 4096;

  // Returns nullopt if there are more than kMaxCells, or if listing them takes too long. `ranks` are those of both
  // meshes.
  static std::optional<Cells> of(const AxisGrid& src, const AxisGrid& dst, const std::vector<Rank>& ranks);

  struct Class {
    IntervalList elements;  // ascending
    RankSet before;         // that have it on their slot of the source
    RankSet after;
  };
  struct Cell {
    std::vector<size_t> classes;  // by axis
    int64_t elements = 0;
    RankSet holders;
    RankSet needers;  // which do not hold it; at least one
  };
  const std::vector<Class>& classes(size_t axis) const { return classes_[axis]; }
  const std::vector<Cell>& all() const { return cells_; }

  // The least that the busiest rank sends, in elements: if only holders send; if needers pass on what they got; and of
  // what holders must send once. See ExchangeBound.
  Ratio direct_load() const;
  Ratio forwarded_load() const;
  Ratio leaving_load() const;

  // By cell: holders, and how many elements each sends to all needers together. None sends more than `most`, which must
  // be at least direct_load(), and up to one element more for each cell if ranks have the same slots on both sides.
  std::vector<std::vector<std::pair<size_t, int64_t>>> shared_directly(int64_t most) const;

 private:
  struct Work;

  Cells(const AxisGrid& src, const AxisGrid& dst, const std::vector<Rank>& ranks);
  bool find_classes(const AxisGrid& src, const AxisGrid& dst, const std::vector<Rank>& ranks, size_t axis);
  bool find_cells();
  Work direct_work() const;

  size_t num_ranks_;
  // Ranks that have equal slots on both sides are holders and needers of the same cells, so they are a team.
  std::vector<std::vector<size_t>> teams_;
  std::vector<size_t> team_of_;              // by rank
  std::vector<std::vector<Class>> classes_;  // by axis
  std::vector<Cell> cells_;
};

}  // namespace shardwright
