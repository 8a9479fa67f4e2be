#include "attention/block_products.h"

#include <algorithm>

namespace shardwright {
namespace {

// A token before which a block must end, because a chunk or a document begins there.
struct Cut {
  int64_t token = 0;
  int64_t document = 0;  // the document that begins or continues here
};

// Returns the cuts of a sequence of `total` tokens, ascending. Several cuts may be at one token.
std::vector<Cut> cuts_of(const Attention& attention, int64_t total) {
  std::vector<Cut> cuts{{0, 0}};
  int64_t token = 0;
  for (size_t d = 0; d < attention.mask.documents.size(); ++d) {
    if (attention.mask.documents[d] == 0) continue;
    cuts.push_back({token, static_cast<int64_t>(d)});
    token += attention.mask.documents[d];
  }
  if (attention.chunks > 0 && total > 0) {
    const int64_t rows = (total + attention.chunks - 1) / attention.chunks;
    for (int64_t begin = rows; begin < total; begin += rows) cuts.push_back({begin, -1});
  }
  std::stable_sort(cuts.begin(), cuts.end(), [](const Cut& a, const Cut& b) { return a.token < b.token; });
  // A chunk's cut is in the document of the cut before it, unless a document begins at the same token.
  for (size_t c = 1; c < cuts.size(); ++c) {
    if (cuts[c].document < 0) cuts[c].document = cuts[c - 1].document;
  }
  return cuts;
}

// Returns the blocks of all ranks, by ascending tokens: each run of each part, cut at the cuts.
std::vector<SequenceBlock> blocks_of(const std::vector<IntervalList>& parts, const std::vector<Cut>& cuts) {
  std::vector<SequenceBlock> blocks;
  for (size_t owner = 0; owner < parts.size(); ++owner) {
    int64_t row = 0;
    for (const Interval& run : parts[owner]) {
      auto cut = std::upper_bound(cuts.begin(), cuts.end(), run.begin,
                                  [](int64_t token, const Cut& c) { return token < c.token; });
      for (int64_t begin = run.begin; begin < run.end;) {
        while (cut != cuts.end() && cut->token <= begin) ++cut;
        const int64_t end = cut == cuts.end() ? run.end : std::min(run.end, cut->token);
        blocks.push_back({{begin, end}, static_cast<int64_t>(owner), row, std::prev(cut)->document});
        row += end - begin;
        begin = end;
      }
    }
  }
  std::sort(blocks.begin(), blocks.end(),
            [](const SequenceBlock& a, const SequenceBlock& b) { return a.tokens.begin < b.tokens.begin; });
  return blocks;
}

SequenceBlocks query_blocks(const Attention& attention) {
  const std::vector<Cut> cuts = cuts_of(attention, attention.length());
  return {blocks_of(attention.parts, cuts), static_cast<int64_t>(attention.parts.size())};
}

SequenceBlocks key_blocks(const Attention& attention) {
  const std::vector<Cut> cuts = cuts_of(attention, attention.key_length());
  const std::vector<IntervalList>& parts = attention.parts_of_keys();
  const auto num_ranks = static_cast<int64_t>(parts.size());
  if (!attention.keys_are_whole) return {blocks_of(parts, cuts), num_ranks};
  return SequenceBlocks::whole(blocks_of({parts.front()}, cuts), num_ranks);
}

}  // namespace

SequenceBlocks::SequenceBlocks(std::vector<SequenceBlock> blocks, int64_t num_ranks)
    : blocks_(std::move(blocks)), by_rank_(num_ranks) {
  for (int b = 0; b < size(); ++b) by_rank_[blocks_[b].owner].push_back(b);
  for (std::vector<int>& indices : by_rank_) {
    std::sort(indices.begin(), indices.end(), [&](int a, int b) { return blocks_[a].row < blocks_[b].row; });
  }
}

SequenceBlocks SequenceBlocks::whole(std::vector<SequenceBlock> blocks, int64_t num_ranks) {
  SequenceBlocks all(std::move(blocks), num_ranks);
  all.by_rank_.assign(num_ranks, all.by_rank_.front());
  return all;
}

SequenceBlocks SequenceBlocks::joined(int64_t count) const {
  std::vector<int64_t> rows(by_rank_.size(), 0);
  for (const SequenceBlock& block : blocks_) rows[block.owner] += block.rows();
  std::vector<int64_t> rows_before(by_rank_.size(), 0);
  for (size_t r = 0; r < rows.size(); ++r) {
    if (static_cast<int64_t>(r) % count != 0) rows_before[r] = rows_before[r - 1] + rows[r - 1];
  }
  std::vector<SequenceBlock> joined_blocks = blocks_;
  for (SequenceBlock& block : joined_blocks) {
    block.row += rows_before[block.owner];
    block.owner /= count;
  }
  return {std::move(joined_blocks), static_cast<int64_t>(by_rank_.size()) / count};
}

BlockProducts::BlockProducts(const Attention& attention)
    : mask_(attention.mask),
      keys_are_whole_(attention.keys_are_whole),
      queries_(query_blocks(attention)),
      keys_(key_blocks(attention)) {
  // A window longer than both sequences hides nothing, but the sums in band() would overflow.
  const int64_t longest = std::max<int64_t>({attention.length(), attention.key_length(), 1});
  if (mask_.window) mask_.window = std::min(*mask_.window, longest);
}

BlockProducts BlockProducts::joined(int64_t count) const {
  BlockProducts joined_products = *this;
  joined_products.queries_ = queries_.joined(count);
  joined_products.keys_ = keys_.joined(count);
  return joined_products;
}

Band BlockProducts::band(int queries, int keys) const {
  const SequenceBlock& q = queries_[queries];
  const SequenceBlock& k = keys_[keys];
  if (q.document != k.document) return {1, 0};  // an empty band
  // Query i is token q + i, key j is token k + j.
  const int64_t shift = k.tokens.begin - q.tokens.begin;
  Band band;
  if (mask_.window) band = {shift - *mask_.window + 1, shift + *mask_.window - 1};
  if (mask_.is_causal) band.least = std::max(band.least, shift);
  return band;
}

BlockShape BlockProducts::shape(int queries, int keys) const {
  return shape_of(band(queries, keys), queries_[queries].rows(), keys_[keys].rows());
}

std::vector<bool> BlockProducts::key_overlaps(int queries) const {
  std::vector<bool> overlaps;
  for (int keys = 0; keys < keys_.size(); ++keys) overlaps.push_back(overlap(queries, keys));
  return overlaps;
}

std::vector<bool> BlockProducts::query_overlaps(int keys) const {
  std::vector<bool> overlaps;
  for (int queries = 0; queries < queries_.size(); ++queries) overlaps.push_back(overlap(queries, keys));
  return overlaps;
}

std::vector<int> BlockProducts::keys_of(int queries) const {
  std::vector<int> key_blocks;
  for (int keys = 0; keys < keys_.size(); ++keys) {
    if (overlap(queries, keys)) key_blocks.push_back(keys);
  }
  return key_blocks;
}

std::vector<int> BlockProducts::keys_needed(int64_t owner, int64_t by) const {
  std::vector<int> needed_keys;
  if (keys_are_whole_) return needed_keys;
  const std::vector<int>& queries_of_rank = queries_.of_rank(by);
  for (const int keys : keys_.of_rank(owner)) {
    const auto sees = [&](int queries) { return overlap(queries, keys); };
    if (std::any_of(queries_of_rank.begin(), queries_of_rank.end(), sees)) needed_keys.push_back(keys);
  }
  return needed_keys;
}

BlockCounts count_blocks(const BlockProducts& products, int64_t position) {
  BlockCounts counts;
  for (const int queries : products.queries().of_rank(position)) {
    for (const int keys : products.keys_of(queries)) {
      const BlockShape shape = products.shape(queries, keys);
      counts.full += shape == BlockShape::kFull ? 1 : 0;
      counts.triangles += shape == BlockShape::kTriangle ? 1 : 0;
      counts.others += shape == BlockShape::kOther ? 1 : 0;
      counts.pairs +=
          visible_pairs(products.band(queries, keys), products.queries()[queries].rows(), products.keys()[keys].rows());
    }
  }
  return counts;
}

}  // namespace shardwright
