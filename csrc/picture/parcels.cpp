#include "picture/parcels.h"

#include <algorithm>
#include <utility>

#include "moves/exchange.h"
#include "moves/traffic.h"

namespace shardwright {
namespace {

Region shared_part(const Region& a, const Region& b) {
  Region shared;
  for (size_t t = 0; t < a.size(); ++t) shared.push_back(shared_indices(a[t], b[t]));
  return shared;
}

// Appends the boxes that make up the elements [range) of `whole` in packed order; dims before `t` are already fixed. Of
// 3 x 4 elements, [2,9) is the end of the first row, the whole second row, and the beginning of the third.
void add_boxes(const Region& whole, size_t t, Interval range, Region box, std::vector<Region>& boxes) {
  if (range.begin >= range.end) return;
  if (t == whole.size()) return boxes.push_back(std::move(box));
  int64_t row = 1;
  for (size_t later = t + 1; later < whole.size(); ++later) row *= length(whole[later]);
  const auto within = [&](int64_t index, int64_t begin, int64_t end) {
    box[t] = subrange(whole[t], index, index + 1);
    add_boxes(whole, t + 1, {begin, end}, box, boxes);
  };
  const int64_t first = (range.begin + row - 1) / row;
  const int64_t last = range.end / row;
  if (first > last) return within(last, range.begin - last * row, range.end - last * row);
  if (range.begin < first * row) within(first - 1, range.begin - (first - 1) * row, row);
  if (first < last) {
    Region rows = box;
    rows[t] = subrange(whole[t], first, last);
    boxes.push_back(std::move(rows));
  }
  if (last * row < range.end) within(last, 0, range.end - last * row);
}

class Parcels {
 public:
  Parcels(const Step& step, const std::map<Rank, int64_t>& rows) : step_(step), rows_(rows) {}

  std::vector<Parcel> all() {
    for (const Rank rank : step_.before.mesh().ranks()) add_kept(rank);
    if (step_.op == StepOp::kCross) {
      const Crossing crossing = crossing_of(step_);
      for (const Rank from : crossing.ranks()) {
        for (const auto& [to, range] : crossing.sends(from)) add(from, to, range);
      }
    } else if (!is_local(step_.op) && !reduces(step_)) {
      add_transfers();
    }
    std::sort(parcels_.begin(), parcels_.end(),
              [](const Parcel& a, const Parcel& b) { return std::pair(a.from, a.to) < std::pair(b.from, b.to); });
    return std::move(parcels_);
  }

 private:
  Region held(Rank rank) const { return step_.before.region(*step_.before.mesh().position_of(rank)); }
  Region needed(Rank rank) const { return step_.after.region(*step_.after.mesh().position_of(rank)); }
  int64_t bytes(int64_t elements) const { return elements * step_.before.dtype().size_bytes(); }

  void add_kept(Rank rank) {
    if (!step_.after.mesh().position_of(rank)) return;
    Region kept = shared_part(held(rank), needed(rank));
    const int64_t elements = num_elements(kept);
    if (elements > 0) parcels_.push_back({rows_.at(rank), rows_.at(rank), bytes(elements), {std::move(kept)}});
  }

  void add(Rank from, Rank to, Interval range) {
    if (range.begin == range.end) return;
    Parcel parcel{rows_.at(from), rows_.at(to), bytes(range.end - range.begin), {}};
    const Region whole = shared_part(held(from), needed(to));
    add_boxes(whole, 0, range, whole, parcel.parts);
    parcels_.push_back(std::move(parcel));
  }

  void add_transfers() {
    const Mesh& mesh = step_.before.mesh();
    std::vector<bool> is_seen(mesh.size(), false);
    for (int64_t p = 0; p < mesh.size(); ++p) {
      if (is_seen[p]) continue;
      const Transfers transfers(step_, p);
      const std::vector<int64_t>& group = transfers.group();
      for (const int64_t member : group) is_seen[member] = true;
      for (size_t from = 0; from < group.size(); ++from) {
        for (size_t to = 0; to < group.size(); ++to) {
          if (from == to) continue;
          add(mesh.rank_at(Position{group[from]}), mesh.rank_at(Position{group[to]}), transfers.range(from, to));
        }
      }
    }
  }

  const Step& step_;
  const std::map<Rank, int64_t>& rows_;
  std::vector<Parcel> parcels_;
};

}  // namespace

bool reduces(const Step& step) { return step.op == StepOp::kReduceScatter || step.op == StepOp::kAllReduce; }

std::vector<Parcel> parcels_of(const Step& step, const std::map<Rank, int64_t>& rows) {
  return Parcels(step, rows).all();
}

}  // namespace shardwright
