#include "exchange/part_transfers.h"

#include <algorithm>
#include <utility>

#include "exchange/exchange.h"
#include "layout/selection.h"

namespace shardwright {

std::vector<int64_t> key_up_to_shift(const PieceList& pieces) {
  std::vector<int64_t> key;
  for (const auto& [block, count, shift] : pieces.blocks()) {
    key.insert(key.end(), {static_cast<int64_t>(block.size()), count, shift.a, shift.b});
    for (const Piece& piece : block) {
      key.push_back(piece.length);
      key.push_back(piece.a_position - pieces.front().a_position);
      key.push_back(piece.b_position - pieces.front().b_position);
    }
  }
  return key;
}

Extent Transfer::in_round(int64_t round) const {
  if (rounds_ == nullptr || whole_.count == 0) return whole_;
  Extent extent = (*rounds_)[round];
  extent.first_held += whole_.first_held;
  extent.first_needed += whole_.first_needed;
  return extent;
}

bool Transfer::is_contiguous_in_some_round() const {
  if (rounds_ == nullptr) return whole_.is_contiguous_held || whole_.is_contiguous_needed;
  return std::any_of(rounds_->begin(), rounds_->end(),
                     [](const Extent& extent) { return extent.is_contiguous_held || extent.is_contiguous_needed; });
}

Transfer PartTransfers::between(int64_t from, int64_t to, std::optional<Interval> range) {
  const PartsOfRank& held = move_.held.of_rank(from);
  const PartsOfRank& needed = move_.needed.of_rank(to);
  const Extent whole = common_extent(held, needed);
  return divided_into_rounds(held, needed, whole, range.value_or(Interval{0, whole.count}));
}

Transfer PartTransfers::of_parts(const PartsOfRank& held, const PartsOfRank& needed, std::span<const SharedRuns> runs) {
  const Extent whole = common_extent(held, needed, runs);
  return divided_into_rounds(held, needed, whole, {0, whole.count});
}

Extent PartTransfers::common_extent(const PartsOfRank& held, const PartsOfRank& needed) {
  runs_.resize(held.size());
  for (size_t t = held.size(); t-- > 0;) {
    runs_[t] = shared_runs(*held[t], *needed[t]);
    if (runs_[t].length == 0) return {};
  }
  return common_extent(held, needed, runs_);
}

// Visits dims from the innermost outwards. The common elements are contiguous in a part if they are one run on every
// dim with more than one common index, and the dim's stride in the part is the number of common elements of the inner
// dims.
Extent PartTransfers::common_extent(const PartsOfRank& held, const PartsOfRank& needed,
                                    std::span<const SharedRuns> runs) {
  Extent extent{1, 0, 0, true, true};
  int64_t held_stride = 1;
  int64_t needed_stride = 1;
  for (size_t t = held.size(); t-- > 0;) {
    if (runs[t].length == 0) return {};
    extent.first_held += runs[t].a_position * held_stride;
    extent.first_needed += runs[t].b_position * needed_stride;
    if (runs[t].length > 1) {
      extent.is_contiguous_held = extent.is_contiguous_held && runs[t].runs == 1 && held_stride == extent.count;
      extent.is_contiguous_needed = extent.is_contiguous_needed && runs[t].runs == 1 && needed_stride == extent.count;
    }
    extent.count *= runs[t].length;
    held_stride *= held[t]->length;
    needed_stride *= needed[t]->length;
  }
  return extent;
}

// Caches the extents of the rounds. The key has the range, the lengths of the parts and the relative places of their
// common runs, which determine the extents relative to `whole`.
Transfer PartTransfers::divided_into_rounds(const PartsOfRank& held, const PartsOfRank& needed, const Extent& whole,
                                            Interval range) {
  if (whole.count == 0 || (move_.rounds == 1 && range.extent() == whole.count)) return {whole, nullptr};
  std::vector<int64_t> key{range.begin, range.end};
  key.reserve(2 + 4 * held.size());
  for (size_t t = 0; t < held.size(); ++t) {
    key.push_back(held[t]->length);
    key.push_back(needed[t]->length);
    if (!held[t]->has_gaps && !needed[t]->has_gaps) {
      key.push_back(shared_runs(*held[t], *needed[t]).length);
      continue;
    }
    const std::vector<int64_t> pieces = key_up_to_shift(intersect(held[t]->list, needed[t]->list));
    key.push_back(-static_cast<int64_t>(pieces.size()));
    key.insert(key.end(), pieces.begin(), pieces.end());
  }
  const auto [found, is_new] = round_extents_.try_emplace(std::move(key));
  Extent all_rounds = whole;
  all_rounds.count = range.extent();
  if (!is_new) return {all_rounds, &found->second};
  Region held_region;
  Region needed_region;
  for (const KnownParts::Part* part : held) held_region.push_back(part->list);
  for (const KnownParts::Part* part : needed) needed_region.push_back(part->list);
  const Selection intersection(held_region, needed_region);
  for (int64_t round = 0; round < move_.rounds; ++round) {
    const Interval part = in_round(range, round, move_.rounds);
    const Selection elements = intersection.slice(part.begin, part.end);
    Extent extent{elements.count()};
    if (extent.count > 0) {
      const int64_t in_held = elements.contiguous_in_sender();
      const int64_t in_needed = elements.contiguous_in_receiver();
      extent.is_contiguous_held = in_held >= 0;
      extent.is_contiguous_needed = in_needed >= 0;
      extent.first_held = in_held - whole.first_held;
      extent.first_needed = in_needed - whole.first_needed;
    }
    found->second.push_back(extent);
  }
  return {all_rounds, &found->second};
}

}  // namespace shardwright
