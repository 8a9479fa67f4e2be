#include "batch/batch_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace shardwright {
namespace {

struct LayoutHash {
  size_t operator()(const Layout* layout) const { return layout->hash(); }
};
struct LayoutEqual {
  bool operator()(const Layout* a, const Layout* b) const { return *a == *b; }
};

// Numbers of layouts that place the same elements at the same positions, and have one dtype.
class LayoutNumbers {
 public:
  int of(const Layout& layout) {
    return numbers_.try_emplace(&layout, static_cast<int>(numbers_.size())).first->second;
  }

 private:
  std::unordered_map<const Layout*, int, LayoutHash, LayoutEqual> numbers_;
};

std::vector<int64_t> words_of(const IndexMap& map) {
  std::vector<int64_t> words;
  for (const MapAxis& axis : map.axes()) {
    words.insert(words.end(), {axis.src_dim, axis.dst_dim, axis.src_begin, axis.dst_begin, axis.length});
  }
  return words;
}

}  // namespace

BatchPlan::BatchPlan(Batch batch) : batch_(std::move(batch)) {
  batch_.check();
  ranks_ = batch_.ranks();
  find_kinds();
  schedule();
}

BatchPlan::Kind BatchPlan::make_kind(int item, const Crossing& crossing) const {
  Kind kind{item, crossing, {}, 0};
  for (const Rank rank : crossing.ranks()) {
    const int64_t elements = crossing.received_elements(rank) + crossing.sent_elements(rank);
    if (elements == 0) continue;
    const auto number = std::lower_bound(ranks_.begin(), ranks_.end(), rank) - ranks_.begin();
    const int64_t parcels = crossing.parcels_received_at_most(rank) + crossing.parcels_sent_at_most(rank);
    kind.loads.push_back({static_cast<int>(number), elements, parcels});
  }
  std::stable_sort(kind.loads.begin(), kind.loads.end(),
                   [](const ItemLoad& a, const ItemLoad& b) { return a.elements > b.elements; });
  return kind;
}

// The items with equal layouts and maps take up to kMaxTurns turns, each of which is a kind of its own.
void BatchPlan::find_kinds() {
  struct Family {
    std::vector<int> kinds;  // by turn; -1 if not made yet
    int64_t replicas_each = 1;
    int64_t num_items = 0;
  };
  LayoutNumbers layouts;
  std::map<std::vector<int64_t>, int> maps;
  std::map<std::tuple<int, int, int>, Family> families;
  for (size_t i = 0; i < batch_.items.size(); ++i) {
    const BatchItem& item = batch_.items[i];
    const Layout& src = batch_.sources[item.source];
    const Layout& dst = batch_.destinations[item.destination];
    const int map = maps.try_emplace(words_of(item.map), static_cast<int>(maps.size())).first->second;
    const auto [found, is_new] = families.try_emplace({layouts.of(src), layouts.of(dst), map});
    Family& family = found->second;
    const auto crossing = [&](Sharing sharing, int64_t first_turn) {
      return Crossing(Grid(src, item.map.src_windows()), Grid(dst, item.map.dst_windows()), dst.dtype().size_bytes(),
                      sharing, first_turn);
    };
    if (is_new) {
      const Crossing by_bytes = crossing(Sharing::kBytes, 0);
      const int64_t replicas = by_bytes.src().replicas();
      const bool shares_bytes = by_bytes.longest_stretch() * dst.dtype().size_bytes() >= kLeastShareBytes;
      const int64_t turns = shares_bytes ? 1 : std::min(replicas, kMaxTurns);
      family.kinds.assign(turns, -1);
      family.replicas_each = replicas / turns;
      if (shares_bytes || replicas == 1) {
        family.kinds[0] = static_cast<int>(kinds_.size());
        kinds_.push_back(make_kind(static_cast<int>(i), by_bytes));
      }
    }
    const auto turn = family.num_items++ % static_cast<int64_t>(family.kinds.size());
    int& kind = family.kinds[turn];
    if (kind < 0) {
      kind = static_cast<int>(kinds_.size());
      kinds_.push_back(make_kind(static_cast<int>(i), crossing(Sharing::kMessages, turn * family.replicas_each)));
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
