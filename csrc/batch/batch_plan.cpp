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
  for (const BatchReduction& reduction : reductions_) batch_.sources[reduction.source] = reduction.after;
  ranks_ = batch_.ranks();
  find_kinds();
  schedule();
}

BatchPlan::Kind BatchPlan::make_kind(int item, ExchangePtr exchange) const {
  Kind kind{item, std::move(exchange), {}, 0};
  for (const Rank rank : kind.exchange->ranks()) {
    const int64_t elements =
        kind.exchange->num_elements(rank, Direction::kReceive) + kind.exchange->num_elements(rank, Direction::kSend);
    if (elements == 0) continue;
    const auto rank_index = std::lower_bound(ranks_.begin(), ranks_.end(), rank) - ranks_.begin();
    const int64_t messages = kind.exchange->messages_at_most(rank, Direction::kReceive) +
                             kind.exchange->messages_at_most(rank, Direction::kSend);
    kind.loads.push_back({static_cast<int>(rank_index), elements, messages});
  }
  std::stable_sort(kind.loads.begin(), kind.loads.end(),
                   [](const ItemLoad& a, const ItemLoad& b) { return a.elements > b.elements; });
  return kind;
}

namespace {

// Chooses the sender groups (item_family.h) of items such that all groups send about equally many bytes: each item gets
// the group with the fewest bytes so far; of several such groups, the first one from `first` on. With two groups and
// first = 0, items of 8, 4, 2 and 4 bytes get the groups 0, 1, 1 and 1. Sources on one mesh that replicate the same
// mesh dims are balanced together, because a sender group is the same replica for all of these sources.
class SenderBalance {
 public:
  explicit SenderBalance(int64_t first) : first_(first) {}

  // Returns the sender group with the fewest bytes so far, of `sender_groups` groups, and adds `bytes` to it. Returns 0
  // and adds nothing if there is one group.
  int64_t choose(const Layout& src, int64_t sender_groups, int64_t bytes) {
    if (sender_groups == 1) return 0;
    std::vector<int64_t>& sent_bytes = sent_bytes_[{index_of(src.mesh()), src.replicated_dims().bits(), sender_groups}];
    sent_bytes.resize(sender_groups, 0);
    int64_t least = first_ % sender_groups;
    for (int64_t i = 1; i < sender_groups; ++i) {
      const int64_t sender_group = (first_ + i) % sender_groups;
      if (sent_bytes[sender_group] < sent_bytes[least]) least = sender_group;
    }
    sent_bytes[least] += bytes;
    return least;
  }

 private:
  // Returns the index of a mesh. Equal meshes have one index.
  int64_t index_of(const Mesh& mesh) {
    const auto known = std::find_if(meshes_.begin(), meshes_.end(),
                                    [&](const Mesh* other) { return other == &mesh || *other == mesh; });
    const int64_t index = known - meshes_.begin();
    if (known == meshes_.end()) meshes_.push_back(&mesh);
    return index;
  }

  int64_t first_;
  std::vector<const Mesh*> meshes_;
  // Bytes so far, by sender group. Keys: number of the mesh, replicated mesh dims, number of sender groups.
  std::map<std::tuple<int64_t, uint32_t, int64_t>, std::vector<int64_t>> sent_bytes_;
};

}  // namespace

// Items with equal layouts and maps are a family. It has one kind for each sender group that its items choose.
void BatchPlan::find_kinds() {
  struct Family {
    std::optional<ItemFamily> exchanges;
    std::vector<int> kinds;  // by sender group; -1 if not made yet
  };
  LayoutNumbers layouts;
  std::map<std::vector<int64_t>, int> maps;
  std::map<std::tuple<int, int, int>, Family> families;
  SenderBalance sender_groups(batch_.first_sender_group);
  for (size_t i = 0; i < batch_.items.size(); ++i) {
    const BatchItem& item = batch_.items[i];
    const Layout& src = batch_.sources[item.source];
    const Layout& dst = batch_.destinations[item.destination];
    const int map = maps.try_emplace(item.map.encoding(), static_cast<int>(maps.size())).first->second;
    const auto [found, is_new] = families.try_emplace({layouts.of(src), layouts.of(dst), map});
    Family& family = found->second;
    if (is_new) {
      family.exchanges.emplace(src, dst, item.map);
      family.kinds.assign(family.exchanges->sender_groups(), -1);
    }
    const int64_t bytes = item.map.num_elements() * wire_dtype(static_cast<int>(i)).size_bytes();
    const int64_t sender_group = sender_groups.choose(src, std::ssize(family.kinds), bytes);
    int& kind = family.kinds[sender_group];
    if (kind < 0) {
      kind = static_cast<int>(kinds_.size());
      kinds_.push_back(make_kind(static_cast<int>(i), family.exchanges->exchange(sender_group)));
    }
    kind_of_item_.push_back(kind);
    ++kinds_[kind].num_items;
  }
}

// Items with larger elements come first, as the scheduler requires; otherwise items keep the order of the batch.
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
