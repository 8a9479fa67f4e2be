#include "products/blocks.h"

#include <algorithm>

namespace shardwright {

std::vector<Chunk> ring_chunks(int64_t partners, const Schedule& schedule) {
  std::vector<Chunk> chunks;
  for (const std::vector<int64_t>& distances : schedule.distances) chunks.push_back({distances, 0, 1});
  if (!chunks.empty() || partners == 1) return chunks;
  if (schedule.chunks >= partners) {
    const int64_t shares = schedule.chunks / partners;
    for (int64_t d = 1; d < partners; ++d) {
      for (int64_t s = 0; s < shares; ++s) chunks.push_back({{d}, s, shares});
    }
    return chunks;
  }
  const int64_t others = partners - 1;
  const int64_t groups = std::max<int64_t>(schedule.chunks - 1, 1);
  for (int64_t g = 0; g < groups; ++g) {
    Chunk chunk;
    for (int64_t d = 1 + others * g / groups; d <= others * (g + 1) / groups; ++d) chunk.distances.push_back(d);
    chunks.push_back(std::move(chunk));
  }
  return chunks;
}

std::vector<Chunk> collective_chunks(int64_t partners, int64_t chunks) {
  std::vector<int64_t> all;
  for (int64_t d = 1; d < partners; ++d) all.push_back(d);
  std::vector<Chunk> chunk_list;
  for (int64_t c = 0; c < chunks && partners > 1; ++c) chunk_list.push_back({all, c, chunks});
  return chunk_list;
}

std::optional<Selection> share_of(const Selection& selection, size_t dim, const Chunk& chunk) {
  if (selection.count() == 0) return std::nullopt;
  if (selection.shape().empty()) return selection;
  Selection share = selection.share(dim, chunk.share, chunk.shares);
  if (share.count() == 0) return std::nullopt;
  return share;
}

size_t dim_to_share(const Layout& layout, const std::vector<size_t>& dims, int64_t shares) {
  const auto length_of = [&](size_t d) {
    int64_t length = layout.shape()[d];
    for (const Cut& cut : layout.cuts(static_cast<int>(d))) length /= layout.mesh().dim_size(cut.mesh_dim);
    return length;
  };
  size_t best = dims.front();
  for (const size_t d : dims) {
    if (length_of(d) >= shares) return d;
    if (length_of(d) > length_of(best)) best = d;
  }
  return best;
}

bool are_equal_or_disjoint(const std::vector<Selection::Part>& parts, const std::vector<size_t>& dims) {
  for (size_t i = 0; i < parts.size(); ++i) {
    for (size_t j = i + 1; j < parts.size(); ++j) {
      bool is_equal = true;
      bool is_disjoint = false;
      for (const size_t d : dims) {
        const int64_t a = parts[i].in_receiver[d];
        const int64_t b = parts[j].in_receiver[d];
        is_equal = is_equal && a == b && parts[i].sizes[d] == parts[j].sizes[d];
        is_disjoint = is_disjoint || a + parts[i].sizes[d] <= b || b + parts[j].sizes[d] <= a;
      }
      if (!is_equal && !is_disjoint) return false;
    }
  }
  return true;
}

}  // namespace shardwright
