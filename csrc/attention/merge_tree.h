// The order in which contributions of blocks are merged: along a binary tree over the numbers of all blocks.
//
// A node of level l joins 2^l consecutive blocks; its two children are nodes of level l - 1. Blocks that contribute
// nothing are left out, so the tree depends on tokens and the mask alone. Two siblings are merged once both were added,
// in either order. If blocks are added in order, at most about log2(number of blocks) items wait to be merged.
//
// Example: blocks 0, 1 and 3 contribute. add(3) and add(0) wait; add(1) merges 0 with 1, and the result with 3.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace shardwright {

// A node of the tree over all blocks. {0, b} is block b.
struct TreeNode {
  int level = 0;
  int index = 0;  // within the level; the node joins the 2^level blocks from index * 2^level on
  auto operator<=>(const TreeNode&) const = default;
};

// `Item` is a handle of a contribution, such as the buffer that holds it.
template <typename Item>
class MergeTree {
 public:
  // `contributes` has one entry per block: true if the block contributes.
  explicit MergeTree(const std::vector<bool>& contributes) : before_{0} {
    for (const bool is_contributing : contributes) before_.push_back(before_.back() + (is_contributing ? 1 : 0));
  }

  // Adds the item of a node, and merges it with its sibling, the result with the next sibling, and so on, until a
  // sibling is missing. `merge(left, right)` must merge the item `right` into `left`, the item of the earlier blocks.
  // Returns the item of all blocks if it is now complete, else nullopt. The node must join a contributing block. No
  // contributing block may be added twice, alone or in a larger node.
  template <typename Merge>
  std::optional<Item> add(TreeNode node, Item item, const Merge& merge) {
    for (; num_contributing(node) < before_.back(); node = {node.level + 1, node.index / 2}) {
      const TreeNode sibling{node.level, node.index ^ 1};
      if (num_contributing(sibling) == 0) continue;
      const auto other = waiting_.find(sibling);
      if (other == waiting_.end()) {
        waiting_[node] = std::move(item);
        return std::nullopt;
      }
      Item left = std::move(node.index < sibling.index ? item : other->second);
      merge(left, node.index < sibling.index ? other->second : item);
      waiting_.erase(other);
      item = std::move(left);
    }
    return item;
  }

  // Returns the nodes that wait for their sibling, and their items.
  const std::map<TreeNode, Item>& waiting() const { return waiting_; }

 private:
  // Returns the number of contributing blocks that a node joins.
  int num_contributing(TreeNode node) const {
    const int64_t last = static_cast<int64_t>(before_.size()) - 1;
    const int64_t begin = std::min(static_cast<int64_t>(node.index) << node.level, last);
    const int64_t end = std::min((static_cast<int64_t>(node.index) + 1) << node.level, last);
    return before_[end] - before_[begin];
  }

  std::vector<int> before_;  // by block: the number of contributing blocks before it
  std::map<TreeNode, Item> waiting_;
};

}  // namespace shardwright
