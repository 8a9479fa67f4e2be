#include "batch/reductions.h"

#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "batch/item_family.h"
#include "batch/layout_numbers.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Returns the layouts to which `src` may be reduced: for each tensor dim, a layout in which the pending mesh dims of
// `src` cut that dim. `dst` is a destination of `src`, or null. If it has the mesh and shape of `src`, and all pending
// mesh dims of `src` cut it into chunks, the first returned layout has these cuts of `dst`. A scalar has one layout, in
// which the pending mesh dims replicate.
std::vector<Layout> candidates(const Layout& src, const Layout* dst) {
  const std::vector<int> pending = src.partial_dims().to_vector();
  const std::vector<Placement> none(src.mesh().ndim(), Placement::replicate());
  std::vector<Layout> layouts;
  if (dst != nullptr && dst->mesh() == src.mesh() && dst->shape() == src.shape()) {
    std::vector<std::vector<Cut>> cuts = src.cuts();
    size_t num_cutting = 0;  // pending mesh dims that cut the destination
    for (int t = 0; t < src.ndim(); ++t) {
      for (const Cut& cut : dst->cuts(t)) {
        if (!src.partial_dims().contains(cut.mesh_dim) || !cut.rule.is_chunks()) continue;
        cuts[t].push_back(cut);
        ++num_cutting;
      }
    }
    if (num_cutting == pending.size()) layouts.push_back(src.with(std::move(cuts), none));
  }
  for (int t = 0; t < src.ndim(); ++t) {
    std::vector<std::vector<Cut>> cuts = src.cuts();
    for (const int d : pending) cuts[t].push_back({d, 1});
    layouts.push_back(src.with(std::move(cuts), none));
  }
  if (src.ndim() == 0) layouts.push_back(src.with(src.cuts(), none));
  return layouts;
}

using ItemsOfSource = std::vector<const BatchItem*>;  // the items that copy from one source

// Returns the candidate that leaves the fewest elements to receive; of several, the one with the smallest largest part.
// `items` are all items that copy from `src`; there may be none.
Layout best_reduced(const Batch& batch, const Layout& src, const ItemsOfSource& items) {
  const Layout* dst = items.empty() ? nullptr : &batch.destinations[items.front()->destination];
  std::optional<Layout> best;
  std::pair<int64_t, int64_t> least;  // cost of `best`: elements received by all ranks, size of the largest part
  for (const Layout& reduced : candidates(src, dst)) {
    std::pair<int64_t, int64_t> cost{0, reduced.largest_part_elements()};
    for (const BatchItem* item : items) {
      cost.first += total_received_elements(reduced, batch.destinations[item->destination], item->map);
    }
    if (best && cost >= least) continue;
    best = reduced;
    least = cost;
  }
  return *best;
}

}  // namespace

std::vector<BatchReduction> reductions_of(const Batch& batch) {
  std::map<int, ItemsOfSource> items_of;  // by source
  for (size_t s = 0; s < batch.sources.size(); ++s) {
    if (!batch.sources[s].partial_dims().empty()) items_of[static_cast<int>(s)];
  }
  if (items_of.empty()) return {};
  for (const BatchItem& item : batch.items) {
    const auto found = items_of.find(item.source);
    if (found != items_of.end()) found->second.push_back(&item);
  }
  // Sources with equal layouts and equal items are reduced to the same layout.
  LayoutNumbers layouts;
  std::map<std::vector<std::vector<int64_t>>, Layout> known;
  std::vector<BatchReduction> reductions;
  for (const auto& [source, items] : items_of) {
    const Layout& src = batch.sources[source];
    std::vector<std::vector<int64_t>> key{{layouts.of(src)}};
    for (const BatchItem* item : items) {
      key.push_back(item->map.encoding());
      key.back().push_back(layouts.of(batch.destinations[item->destination]));
    }
    auto found = known.find(key);
    if (found == known.end()) found = known.emplace(std::move(key), best_reduced(batch, src, items)).first;
    reductions.push_back({source, src, found->second});
  }
  return reductions;
}

}  // namespace shardwright
