#include "batch/batch_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "batch/layout_numbers.h"

namespace shardwright {

BatchPlan::BatchPlan(Batch batch) : batch_(std::move(batch)) {
  batch_.check();
  reductions_ = reductions_of(batch_);
  for (const BatchReduction& one : reductions_) batch_.sources[one.source] = one.after;
  ranks_ = batch_.ranks();
  find_kinds();
  schedule();
}

BatchPlan::Kind BatchPlan::make_kind(int item, ItemMovePtr move) const {
  Kind kind{item, std::move(move), {}, 0};
  for (const Rank rank : kind.move->ranks()) {
    const int64_t elements = kind.move->received_elements(rank) + kind.move->sent_elements(rank);
    if (elements == 0) continue;
    const auto number = std::lower_bound(ranks_.begin(), ranks_.end(), rank) - ranks_.begin();
    const int64_t parcels = kind.move->parcels_received_at_most(rank) + kind.move->parcels_sent_at_most(rank);
    kind.loads.push_back({static_cast<int>(number), elements, parcels});
  }
  std::stable_sort(kind.loads.begin(), kind.loads.end(),
                   [](const ItemLoad& a, const ItemLoad& b) { return a.elements > b.elements; });
  return kind;
}

// The items with equal layouts and maps take turns, each of which is a kind of its own.
void BatchPlan::find_kinds() {
  struct Family {
    std::optional<ItemFamily> moves;
    std::vector<int> kinds;  // by turn; -1 if not made yet
    int64_t num_items = 0;
  };
  LayoutNumbers layouts;
  std::map<std::vector<int64_t>, int> maps;
  std::map<std::tuple<int, int, int>, Family> families;
  for (size_t i = 0; i < batch_.items.size(); ++i) {
    const BatchItem& item = batch_.items[i];
    const Layout& src = batch_.sources[item.source];
    const Layout& dst = batch_.destinations[item.destination];
    const int map = maps.try_emplace(item.map.words(), static_cast<int>(maps.size())).first->second;
    const auto [found, is_new] = families.try_emplace({layouts.of(src), layouts.of(dst), map});
    Family& family = found->second;
    if (is_new) {
      family.moves.emplace(src, dst, item.map);
      family.kinds.assign(family.moves->turns(), -1);
    }
    const auto turn = family.num_items++ % static_cast<int64_t>(family.kinds.size());
    int& kind = family.kinds[turn];
    if (kind < 0) {
      kind = static_cast<int>(kinds_.size());
      kinds_.push_back(make_kind(static_cast<int>(i), family.moves->move(turn)));
    }
    kind_of_item_.push_back(kind);
    ++kinds_[kind].num_items;
  }
}

void BatchPlan::schedule() {
  const auto size = [&](int item) { return wire_dtype(item).size_bytes(); };
  order_.resize(batch_.items.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return size(a) > size(b); });
  Scheduler scheduler(static_cast<int64_t>(ranks_.size()), batch_.bucket_bytes);
  pieces_.resize(batch_.items.size());
  for (const int item : order_) pieces_[item] = scheduler.add(item, kinds_[kind_of_item_[item]].loads, size(item));
  num_rounds_ = scheduler.num_rounds();
  bucket_bytes_ = std::min(batch_.bucket_bytes, scheduler.largest_round_bytes());
  buckets_ = std::min<int64_t>(batch_.buckets, num_rounds_);
}

}  // namespace shardwright
