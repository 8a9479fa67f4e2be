// The order in which what blocks contribute is merged: along a binary tree over the numbers of all blocks.
//
// A node of level l joins 2^l consecutive blocks; its two sides are nodes of level l - 1. Blocks that contribute
// nothing are left out. So the tree follows from places and the mask alone, and a merge takes place as soon as both of
// its sides are there, whatever the order in which they come. Where they come in order, at most about log2 of the
// number of blocks wait to be merged.
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace shardwright {

struct TreeNode {
  int level = 0;
  int index = 0;  // on its level: the node joins the blocks from index * 2^level on
  auto operator<=>(const TreeNode&) const = default;
};

template <typename Item>
class MergeTree {
 public:
  // Says of each block whether it contributes.
  explicit MergeTree(const std::vector<bool>& contributes) : before_{0} {
    for (const bool one : contributes) before_.push_back(before_.back() + (one ? 1 : 0));
  }

  // Adds the item of a node. `merge(left, right)` makes `left` what both are together. Returns the item of all blocks
  // if it is complete now.
  template <typename Merge>
  std::optional<Item> add(TreeNode node, Item item, const Merge& merge) {
    for (; below(node) < before_.back(); node = {node.level + 1, node.index / 2}) {
      const TreeNode sibling{node.level, node.index ^ 1};
      if (below(sibling) == 0) continue;
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

  // Parts that wait for their other side.
  const std::map<TreeNode, Item>& waiting() const { return waiting_; }

 private:
  // The number of blocks below a node that contribute.
  int below(TreeNode node) const {
    const int64_t last = static_cast<int64_t>(before_.size()) - 1;
    const int64_t begin = std::min(static_cast<int64_t>(node.index) << node.level, last);
    const int64_t end = std::min((static_cast<int64_t>(node.index) + 1) << node.level, last);
    return before_[end] - before_[begin];
  }

  std::vector<int> before_;  // by block: how many before it contribute
  std::map<TreeNode, Item> waiting_;
};

}  // namespace shardwright
