#include "moves/cut_lists.h"

#include <algorithm>
#include <utility>

#include "moves/spans.h"

namespace shardwright {

// Known lists are found by their digits, or without digits by their canonical form (moves/spans.h).
int CutLists::number_of(int tensor_dim, const std::vector<Cut>& cuts) {
  const int64_t n = layout_.shape()[tensor_dim];
  std::vector<CutList>& lists = lists_[tensor_dim];
  CutList list{cuts, dims_of(cuts), n, false, digits_of(layout_.mesh(), n, cuts)};
  list.has_equal_parts = list.digits || cuts_evenly(layout_.mesh(), n, cuts);
  const auto next = static_cast<int>(lists.size());
  if (list.digits) {
    for (int i = 0; i < next; ++i) {
      if (lists[i].dims == list.dims && lists[i].digits == list.digits) return i;
    }
    for (const Digit& digit : *list.digits) list.length /= digit.radix;
  } else {
    list.cuts = canonical(layout_.mesh(), n, std::move(list.cuts));
    std::vector<int64_t> encoding;
    for (const Cut& c : list.cuts) {
      encoding.push_back(c.mesh_dim);
      c.rule.append_encoding(encoding);
    }
    const auto [found, is_new] = numbers_[tensor_dim].emplace(std::move(encoding), next);
    if (!is_new) return found->second;
    list.first_is_largest =
        std::all_of(list.cuts.begin(), list.cuts.end(), [](const Cut& c) { return c.rule.descends(); });
    corners_.add(n, list.cuts);
    const int64_t largest = list.first_is_largest ? 0 : largest_position(layout_.mesh(), n, list.cuts);
    list.length = length(part_at(layout_.mesh(), n, list.cuts, largest));
  }
  lists.push_back(std::move(list));
  return next;
}

}  // namespace shardwright
