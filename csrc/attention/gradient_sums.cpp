#include "attention/gradient_sums.h"

#include <algorithm>

#include "support/error.h"

namespace shardwright {
namespace {

constexpr int kTopLevel = 30;  // level of a node that joins all blocks

// Returns the lower 32 bits of both numbers interleaved: a = 0b11, b = 0b00 give 0b1010.
uint64_t interleaved(uint64_t a, uint64_t b) {
  uint64_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= ((a >> i & 1) << (2 * i + 1)) | ((b >> i & 1) << (2 * i));
  return bits;
}

// Returns the depth of each gradient of a block: {dq}, or {dk, dv}.
std::vector<int64_t> depths_of(const Attention& attention, HeadKind kind) {
  if (kind == HeadKind::kQueries) return {attention.depth};
  return {attention.depth, attention.value_depth};
}

// Returns the blocks of queries or of keys.
const SequenceBlocks& blocks_of(const AttentionWriter& writer, HeadKind kind) {
  return kind == HeadKind::kQueries ? writer.products.queries() : writer.products.keys();
}

// The gradients of a block, {dq} or {dk, dv}, as tensors that are stored one after the other. Sizes and offsets are in
// elements.
struct BlockTensors {
  BlockTensors(const AttentionWriter& writer, HeadKind kind, int block, int64_t heads) {
    const int64_t rows = blocks_of(writer, kind)[block].rows();
    for (const int64_t depth : depths_of(writer.attention, kind)) {
      tensors.push_back({kMissingBuffer, count, writer.attention.batch, heads, rows, depth});
      count += tensors.back().count();
    }
  }

  // Returns the memory of the gradients if the first of them begins at element `offset` of a buffer.
  BlockGradients in_buffer(BufferId buffer, int64_t offset) const {
    BlockGradients gradients;
    for (HeadsTensor tensor : tensors) {
      tensor.buffer = buffer;
      tensor.offset += offset;
      gradients.push_back(tensor.at(0, 0));
    }
    return gradients;
  }

  std::vector<HeadsTensor> tensors;  // with offsets relative to the first tensor
  int64_t count = 0;                 // elements of all tensors
};

// Returns the tree nodes whose sums rank `by` sends for a block of keys, each with its first contributing block of
// queries. For sums by token, these are the largest nodes of which rank `by` holds all contributing blocks of queries.
// For sums by rank, returns one node without a meaning, and -1.
//
//   Blocks 0 to 3 contribute and `by` holds 0, 1 and 2: returns node {1, 0}, which joins 0 and 1, with 0; and node
//   {0, 2}, which is block 2, with 2. If `by` holds all four: returns {kTopLevel, 0} with 0.
std::map<TreeNode, int> nodes_of(const AttentionWriter& writer, int keys, int64_t by) {
  if (!sums_by_token(writer.attention)) return {{TreeNode{}, -1}};
  const std::vector<bool> overlaps = writer.products.query_overlaps(keys);
  MergeTree<int> tree(overlaps);
  std::map<TreeNode, int> nodes;
  for (const int queries : writer.products.queries().of_rank(by)) {
    if (!overlaps[queries]) continue;
    const std::optional<int> all = tree.add({0, queries}, queries, [](int&, int) {});
    // The rank holds all queries that overlap these keys.
    if (all) return {{TreeNode{kTopLevel, 0}, *all}};
  }
  return tree.waiting();
}

}  // namespace

GradientSums::GradientSums(AttentionWriter& writer, HeadKind kind, int64_t heads)
    : writer_(writer), kind_(kind), heads_(heads) {}

GradientSums::Block& GradientSums::state_of(int block) {
  auto found = blocks_.find(block);
  if (found == blocks_.end()) {
    std::vector<bool> contributes;
    if (sums_by_token(writer_.attention)) {
      contributes =
          kind_ == HeadKind::kQueries ? writer_.products.key_overlaps(block) : writer_.products.query_overlaps(block);
    }
    found = blocks_.emplace(block, Block(contributes)).first;
  }
  return found->second;
}

void GradientSums::set_total(int block, BlockGradients total) { state_of(block).total = std::move(total); }

void GradientSums::set_memory(const ReturnedSums::Sum& sum) {
  if (sums_by_token(writer_.attention)) {
    state_of(sum.keys).open_sums[sum.first] = sum.at;
  } else {
    set_total(sum.keys, sum.at);
  }
}

BlockGradients GradientSums::sum_for(int block, int other) {
  Block& state = state_of(block);
  if (!sums_by_token(writer_.attention)) return *state.total;
  const auto found = state.open_sums.find(other);
  if (found != state.open_sums.end()) return found->second;
  const BlockTensors tensors(writer_, kind_, block, heads_);
  const BufferId buffer = writer_.builder.new_buffer(tensors.count, writer_.attention.sum_dtype());
  if (tensors.count > 0) writer_.builder.emit(FillZero{writer_.builder.whole(buffer)});
  return state.open_sums[other] = tensors.in_buffer(buffer, 0);
}

void GradientSums::finish_product(int block, int other) {
  if (!sums_by_token(writer_.attention)) return;
  Block& state = state_of(block);
  const BlockGradients sum = state.open_sums.at(other);
  state.open_sums.erase(other);
  add(block, {0, other}, sum);
}

void GradientSums::add_received(const ReturnedSums::Sum& sum) {
  if (sums_by_token(writer_.attention)) {
    add(sum.keys, sum.node, sum.at);
  } else {
    accumulate(sum.keys, sum.at, *state_of(sum.keys).total);
  }
}

void GradientSums::add(int block, TreeNode node, const BlockGradients& sum) {
  Block& state = state_of(block);
  const auto merge = [&](const BlockGradients& left, const BlockGradients& right) { accumulate(block, right, left); };
  const std::optional<BlockGradients> complete = state.tree.add(node, sum, merge);
  if (complete && state.total) accumulate(block, *complete, *state.total);
}

void GradientSums::accumulate(int block, const BlockGradients& from, const BlockGradients& to) {
  const int64_t rows = blocks_of(writer_, kind_)[block].rows();
  const std::vector<int64_t> depths = depths_of(writer_.attention, kind_);
  for (size_t i = 0; i < from.size(); ++i) {
    const AttendSizes sizes{writer_.attention.batch, heads_, heads_, rows, 0, depths[i], 0};
    writer_.builder.emit(Accumulate{sizes, from[i], to[i]});
  }
}

ReturnedSums returned_sums(AttentionWriter& writer, int64_t owner, int64_t by, int64_t heads) {
  ReturnedSums returned;
  int64_t count = 0;
  const auto tensors = [&](int keys) { return BlockTensors(writer, HeadKind::kKeys, keys, heads); };
  for (const int keys : writer.products.keys_needed(owner, by)) {
    for (const auto& [node, first] : nodes_of(writer, keys, by)) {
      returned.sums.push_back({keys, node, first, {}});
      count += tensors(keys).count;
    }
  }
  if (count == 0) return {};
  returned.buffer = writer.builder.new_buffer(count, writer.attention.sum_dtype());
  int64_t offset = 0;
  for (ReturnedSums::Sum& sum : returned.sums) {
    const BlockTensors of_sum = tensors(sum.keys);
    sum.at = of_sum.in_buffer(returned.buffer, offset);
    offset += of_sum.count;
  }
  return returned;
}

std::vector<std::pair<int, int>> pairs_in_order(const AttentionWriter& writer, const std::vector<int>& queries,
                                                const std::vector<int>& keys) {
  std::vector<std::pair<int, int>> pairs;
  for (const int q : queries) {
    for (const int k : keys) {
      if (writer.products.overlap(q, k)) pairs.emplace_back(q, k);
    }
  }
  if (!sums_by_token(writer.attention)) return pairs;
  const auto along_curve = [](const std::pair<int, int>& pair) { return interleaved(pair.first, pair.second); };
  std::sort(pairs.begin(), pairs.end(), [&](const auto& a, const auto& b) { return along_curve(a) < along_curve(b); });
  return pairs;
}

void attend_backward(AttentionWriter& writer, const HeadShare& share, int queries, int keys, const BackwardRows& rows,
                     GradientSums& of_queries, GradientSums& of_keys) {
  const Attention& a = writer.attention;
  const BlockGradients dq = of_queries.sum_for(queries, keys);
  const BlockGradients dkv = of_keys.sum_for(keys, queries);
  for (const HeadGroup& group : share.groups) {
    const auto of_q = [&](auto heads) {
      heads.offset += group.q_head * heads.head_stride;
      return heads;
    };
    const auto of_kv = [&](Heads heads) {
      heads.offset += group.kv_head * heads.head_stride;
      return heads;
    };
    const AttendSizes sizes{a.batch,
                            group.q_heads,
                            group.kv_heads,
                            writer.products.queries()[queries].rows(),
                            writer.products.keys()[keys].rows(),
                            a.depth,
                            a.value_depth};
    std::optional<PairMask> mask = rows.mask;
    if (mask) mask->offset += group.q_head * mask->head_stride;
    writer.builder.emit(AttendBackward{sizes, writer.products.band(queries, keys), a.scale, of_q(rows.q), of_kv(rows.k),
                                       of_kv(rows.v), of_q(rows.out), of_q(rows.dout), of_q(rows.lse), of_q(dq[0]),
                                       of_kv(dkv[0]), of_kv(dkv[1]), mask});
  }
  of_queries.finish_product(queries, keys);
  of_keys.finish_product(keys, queries);
}

}  // namespace shardwright
