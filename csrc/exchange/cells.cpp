#include "exchange/cells.h"

#include <algorithm>
#include <map>

#include "exchange/samples.h"

namespace shardwright {
namespace {

// Maximum sum of the sizes of the rank sets of all cells.
constexpr int64_t kMaxMembers = int64_t{1} << 17;

}  // namespace

// Builds the input of min_max_load (exchange/load.h) from jobs and the sets of ranks that may do them. Its workers are
// the ranks, and its teams are the teams of the cells. Every set must consist of complete teams.
struct Cells::Work {
  explicit Work(const Cells& cells) : cells(cells) {
    for (const std::vector<size_t>& team : cells.teams_) {
      shared.team_sizes.push_back(static_cast<int64_t>(team.size()));
    }
  }

  // Adds a job that all ranks of these sets may do.
  void add(int64_t amount, const std::vector<const IndexSet*>& sets) {
    if (amount == 0) return;
    SharedWork::Job job{amount, {}};
    for (const IndexSet* set : sets) {
      const auto [pool, is_new] = pools.try_emplace(*set, static_cast<int>(pools.size()));
      job.pools.push_back(pool->second);
      if (!is_new) continue;
      std::vector<int>& teams = shared.pools.emplace_back();
      for (const size_t rank : set->indices()) {
        const size_t team = cells.team_of_[rank];
        if (cells.teams_[team].front() == rank) teams.push_back(static_cast<int>(team));
      }
    }
    shared.jobs.push_back(std::move(job));
  }

  const Cells& cells;
  SharedWork shared;
  std::map<IndexSet, int> pools;  // index in shared.pools of each known set
};

// Makes the teams. Classes and cells are found later.
Cells::Cells(const AxisGrid& src, const AxisGrid& dst, const std::vector<Rank>& ranks) : num_ranks_(ranks.size()) {
  using Shards = std::vector<int64_t>;
  std::map<std::pair<Shards, Shards>, size_t> known;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto shards = [&](const AxisGrid& grid) {
      const std::optional<Position> position = grid.mesh->position_of(ranks[i]);
      return position ? grid.shards[*position] : Shards();
    };
    const auto [team, is_new] = known.try_emplace({shards(src), shards(dst)}, teams_.size());
    if (is_new) teams_.emplace_back();
    teams_[team->second].push_back(i);
    team_of_.push_back(team->second);
  }
}

std::optional<Cells> Cells::of(const AxisGrid& src, const AxisGrid& dst, const std::vector<Rank>& ranks) {
  Cells cells(src, dst, ranks);
  for (size_t axis = 0; axis < src.axes.size(); ++axis) {
    if (!cells.find_classes(src, dst, ranks, axis)) return std::nullopt;
  }
  if (!cells.find_cells()) return std::nullopt;
  return cells;
}

// Divides an axis into ranges of indices that are on the same shards, within samples (exchange/samples.h), and collects
// the ranges with equal shards in one class. Lists of the source come first in `lists`, then lists of the destination.
bool Cells::find_classes(const AxisGrid& src, const AxisGrid& dst, const std::vector<Rank>& ranks, size_t axis) {
  const std::vector<IntervalList>& before = src.axes[axis].lists;
  const std::vector<IntervalList>& after = dst.axes[axis].lists;
  const Samples samples({&before, &after});
  std::vector<const IntervalList*> lists;
  int64_t runs = 0;
  for (const std::vector<IntervalList>* side : {&before, &after}) {
    for (const IntervalList& list : *side) {
      lists.push_back(&list);
      runs += samples.max_intervals_in(list);
      if (runs > CutRule::kMaxRuns) return false;
    }
  }
  std::map<std::vector<int64_t>, std::vector<Interval>> intervals;  // by the lists that contain them
  for (SampleRange& sample_range : sample_ranges(samples, lists)) {
    intervals[std::move(sample_range.lists)].push_back(sample_range.interval);
    if (static_cast<int64_t>(intervals.size()) > kMaxCells) return false;
  }
  std::vector<IndexSet> ranks_of_list(lists.size(), IndexSet::none_of(ranks.size()));
  const auto add_ranks = [&](const AxisGrid& grid, int64_t first) {
    for (size_t i = 0; i < ranks.size(); ++i) {
      const std::optional<Position> position = grid.mesh->position_of(ranks[i]);
      if (position) ranks_of_list[first + grid.shards[*position][axis]].insert(i);
    }
  };
  const auto num_before = static_cast<int64_t>(before.size());
  add_ranks(src, 0);
  add_ranks(dst, num_before);
  std::vector<Class>& classes = classes_.emplace_back();
  for (const auto& [containing, ranges] : intervals) {
    classes.push_back({samples.repeated(ranges), IndexSet::none_of(ranks.size()), IndexSet::none_of(ranks.size())});
    for (const int64_t list : containing) {
      (list < num_before ? classes.back().before : classes.back().after).unite(ranks_of_list[list]);
    }
  }
  return true;
}

// Tries every combination of classes. A rank holds a cell if it holds the cell's class of each axis.
bool Cells::find_cells() {
  int64_t combinations = 1;
  for (const std::vector<Class>& of_axis : classes_) {
    combinations *= static_cast<int64_t>(of_axis.size());
    if (combinations > kMaxCells) return false;
  }
  int64_t members = 0;
  for (int64_t combination = 0; combination < combinations; ++combination) {
    Cell cell{{}, 1, IndexSet::all_of(num_ranks_), IndexSet::all_of(num_ranks_)};
    int64_t digits = combination;  // one digit per axis: the index of its class
    for (const std::vector<Class>& of_axis : classes_) {
      const auto classes = static_cast<int64_t>(of_axis.size());
      cell.classes.push_back(static_cast<size_t>(digits % classes));
      digits /= classes;
      const Class& axis_class = of_axis[cell.classes.back()];
      cell.elements *= length(axis_class.elements);
      cell.senders.intersect(axis_class.before);
      cell.receivers.intersect(axis_class.after);
    }
    cell.receivers.subtract(cell.senders);
    if (cell.elements == 0 || cell.receivers.size() == 0) continue;
    members += cell.senders.size() + cell.receivers.size();
    if (members > kMaxMembers) return false;
    cells_.push_back(std::move(cell));
  }
  return true;
}

Cells::Work Cells::direct_work() const {
  Work work(*this);
  for (const Cell& cell : cells_) work.add(cell.elements * cell.receivers.size(), {&cell.senders});
  return work;
}

Ratio Cells::direct_load() const { return min_max_load(direct_work().shared); }

Ratio Cells::forwarded_load() const {
  Work work(*this);
  for (const Cell& cell : cells_) {
    work.add(cell.elements, {&cell.senders});
    work.add(cell.elements * (cell.receivers.size() - 1), {&cell.senders, &cell.receivers});
  }
  return min_max_load(work.shared);
}

Ratio Cells::leaving_load() const {
  Work work(*this);
  for (const Cell& cell : cells_) work.add(cell.elements, {&cell.senders});
  return min_max_load(work.shared);
}

// Divides the share of a team evenly among its ranks. Ranks that send less so far get the elements that remain.
std::vector<std::vector<std::pair<size_t, int64_t>>> Cells::direct_shares(int64_t most) const {
  const std::vector<std::vector<TeamShare>> shares = shared_at(direct_work().shared, most);
  std::vector<int64_t> sent(num_ranks_, 0);
  std::vector<std::vector<std::pair<size_t, int64_t>>> by_cell;
  for (const std::vector<TeamShare>& of_cell : shares) {
    std::map<size_t, int64_t> by_rank;
    for (const auto& [team, amount] : of_cell) {
      std::vector<size_t> ranks = teams_[team];
      std::stable_sort(ranks.begin(), ranks.end(), [&](size_t a, size_t b) { return sent[a] < sent[b]; });
      const auto count = static_cast<int64_t>(ranks.size());
      for (int64_t i = 0; i < count; ++i) {
        const int64_t share = amount / count + (i < amount % count ? 1 : 0);
        sent[ranks[i]] += share;
        if (share > 0) by_rank[ranks[i]] += share;
      }
    }
    by_cell.emplace_back(by_rank.begin(), by_rank.end());
  }
  return by_cell;
}

}  // namespace shardwright
