#include "attention/block_products.h"

#include <algorithm>

namespace shardwright {
namespace {

// The places at which a block must end: those of the chunks and of the documents, ascending.
struct Cut {
  int64_t place = 0;
  int64_t document = 0;  // the one that begins here, or goes on
};

std::vector<Cut> cuts_of(const Attention& attention) {
  const int64_t total = attention.length();
  std::vector<Cut> cuts{{0, 0}};
  int64_t place = 0;
  for (size_t d = 0; d < attention.mask.documents.size(); ++d) {
    if (attention.mask.documents[d] == 0) continue;
    cuts.push_back({place, static_cast<int64_t>(d)});
    place += attention.mask.documents[d];
  }
  if (attention.chunks > 0 && total > 0) {
    const int64_t rows = (total + attention.chunks - 1) / attention.chunks;
    for (int64_t begin = rows; begin < total; begin += rows) cuts.push_back({begin, -1});
  }
  std::stable_sort(cuts.begin(), cuts.end(), [](const Cut& a, const Cut& b) { return a.place < b.place; });
  // A cut of a chunk lies in the document before it, unless one begins at the same place.
  for (size_t c = 1; c < cuts.size(); ++c) {
    if (cuts[c].document < 0) cuts[c].document = cuts[c - 1].document;
  }
  return cuts;
}

}  // namespace

BlockProducts::BlockProducts(const Attention& attention) : mask_(attention.mask), by_rank_(attention.parts.size()) {
  const std::vector<Cut> cuts = cuts_of(attention);
  // Wider windows see no more, and the sums of band() would overflow.
  if (mask_.window) mask_.window = std::min(*mask_.window, std::max<int64_t>(attention.length(), 1));
  for (size_t owner = 0; owner < attention.parts.size(); ++owner) {
    int64_t row = 0;
    for (const Interval& run : attention.parts[owner]) {
      auto cut = std::upper_bound(cuts.begin(), cuts.end(), run.begin,
                                  [](int64_t place, const Cut& c) { return place < c.place; });
      for (int64_t begin = run.begin; begin < run.end;) {
        while (cut != cuts.end() && cut->place <= begin) ++cut;
        const int64_t end = cut == cuts.end() ? run.end : std::min(run.end, cut->place);
        blocks_.push_back({{begin, end}, static_cast<int64_t>(owner), row, std::prev(cut)->document});
        row += end - begin;
        begin = end;
      }
    }
  }
  std::sort(blocks_.begin(), blocks_.end(),
            [](const SequenceBlock& a, const SequenceBlock& b) { return a.places.begin < b.places.begin; });
  note_owners();
}

void BlockProducts::note_owners() {
  for (int b = 0; b < num_blocks(); ++b) by_rank_[blocks_[b].owner].push_back(b);
  for (std::vector<int>& mine : by_rank_) {
    std::sort(mine.begin(), mine.end(), [&](int a, int b) { return blocks_[a].row < blocks_[b].row; });
  }
}

BlockProducts BlockProducts::joined(int64_t count) const {
  std::vector<int64_t> rows(by_rank_.size(), 0);
  for (const SequenceBlock& block : blocks_) rows[block.owner] += block.rows();
  std::vector<int64_t> rows_before(by_rank_.size(), 0);
  for (size_t r = 0; r < rows.size(); ++r) {
    if (static_cast<int64_t>(r) % count != 0) rows_before[r] = rows_before[r - 1] + rows[r - 1];
  }
  BlockProducts together = *this;
  together.by_rank_.assign(by_rank_.size() / count, {});
  for (SequenceBlock& block : together.blocks_) {
    block.row += rows_before[block.owner];
    block.owner /= count;
  }
  together.note_owners();
  return together;
}

Band BlockProducts::band(int queries, int keys) const {
  const SequenceBlock& q = blocks_[queries];
  const SequenceBlock& k = blocks_[keys];
  if (q.document != k.document) return {1, 0};
  // Query i is at place q + i, key j at place k + j.
  const int64_t shift = k.places.begin - q.places.begin;
  Band band;
  if (mask_.window) band = {shift - *mask_.window + 1, shift + *mask_.window - 1};
  if (mask_.is_causal) band.least = std::max(band.least, shift);
  return band;
}

BlockShape BlockProducts::shape(int queries, int keys) const {
  return shape_of(band(queries, keys), blocks_[queries].rows(), blocks_[keys].rows());
}

std::vector<bool> BlockProducts::met_by_queries(int queries) const {
  std::vector<bool> met;
  for (int keys = 0; keys < num_blocks(); ++keys) met.push_back(meet(queries, keys));
  return met;
}

std::vector<bool> BlockProducts::meeting_keys(int keys) const {
  std::vector<bool> meeting;
  for (int queries = 0; queries < num_blocks(); ++queries) meeting.push_back(meet(queries, keys));
  return meeting;
}

std::vector<int> BlockProducts::keys_of(int queries) const {
  std::vector<int> found;
  for (int keys = 0; keys < num_blocks(); ++keys) {
    if (meet(queries, keys)) found.push_back(keys);
  }
  return found;
}

std::vector<int> BlockProducts::keys_needed(int64_t owner, int64_t by) const {
  std::vector<int> found;
  for (const int keys : by_rank_[owner]) {
    const auto sees = [&](int queries) { return meet(queries, keys); };
    if (std::any_of(by_rank_[by].begin(), by_rank_[by].end(), sees)) found.push_back(keys);
  }
  return found;
}

BlockCounts count_blocks(const BlockProducts& products, int64_t position) {
  BlockCounts counts;
  for (const int queries : products.of_rank(position)) {
    for (const int keys : products.keys_of(queries)) {
      const BlockShape shape = products.shape(queries, keys);
      counts.full += shape == BlockShape::kFull ? 1 : 0;
      counts.triangles += shape == BlockShape::kTriangle ? 1 : 0;
      counts.others += shape == BlockShape::kOther ? 1 : 0;
      counts.pairs +=
          visible_pairs(products.band(queries, keys), products.block(queries).rows(), products.block(keys).rows());
    }
  }
  return counts;
}

}  // namespace shardwright
