// Random layouts on pairs of meshes, and the elements of their ranks, computed without the library's geometry.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "layout/layout.h"
#include "layout/rank.h"
#include "naive.h"

namespace shardwright::test {

// A layout without partials, and the elements of each tensor dim that each rank holds, in local order.
struct Placed {
  Layout layout;
  std::map<Rank, std::vector<std::vector<int64_t>>> held;
};

// `order` lists mesh dims; those that cut one tensor dim do so in this order.
inline Placed placed(const MeshPtr& mesh, const std::vector<int64_t>& ranks, const std::vector<int64_t>& shape,
                     const std::vector<Placement>& placements, const std::vector<int>& order,
                     DType dtype = DType::kFloat32) {
  ShardOrder shard_order;
  for (const int d : order) {
    if (placements[d].is_shard_like()) shard_order[placements[d].dim].push_back(d);
  }
  Placed made{Layout(mesh, shape, dtype, placements, shard_order, StridedMeaning::kLiteral), {}};
  for (int64_t p = 0; p < mesh->size(); ++p) {
    std::vector<std::vector<int64_t>>& lists = made.held[Rank{ranks[p]}];
    for (const int64_t n : shape) lists.push_back(naive::iota(n));
    for (const int d : order) {
      if (!placements[d].is_shard_like()) continue;
      std::vector<int64_t>& list = lists[placements[d].dim];
      list = naive::strided_chunk(list, placements[d].rule.split_factor(), mesh->dim_size(d), mesh->coordinate(p, d));
    }
  }
  return made;
}

class RandomPlacements {
 public:
  explicit RandomPlacements(unsigned seed) : random_(seed) {}

  int64_t pick(int64_t least, int64_t most) { return std::uniform_int_distribution<int64_t>(least, most)(random_); }
  std::mt19937& random() { return random_; }

  std::vector<int64_t> shape(int64_t most) {
    std::vector<int64_t> shape;
    for (int64_t t = 0, ndim = pick(0, 3); t < ndim; ++t) shape.push_back(pick(0, 11) == 0 ? 0 : pick(1, most));
    return shape;
  }

  // Returns a layout on 1 to 8 of the ranks 0 to `world` - 1.
  Placed on_any_mesh(const std::vector<int64_t>& shape, int64_t world, DType dtype = DType::kFloat32) {
    std::vector<int64_t> sizes;
    int64_t size = 1;
    for (int64_t d = 0, dims = pick(1, 3); d < dims; ++d) {
      sizes.push_back(pick(1, std::min<int64_t>(4, std::min<int64_t>(8, world) / size)));
      size *= sizes.back();
    }
    std::vector<int64_t> ranks = naive::iota(world);
    if (pick(0, 2) > 0) std::shuffle(ranks.begin(), ranks.end(), random_);
    const int64_t first = pick(0, world - size);
    ranks = {ranks.begin() + first, ranks.begin() + first + size};
    std::vector<std::string> names;
    for (size_t d = 0; d < sizes.size(); ++d) names.push_back(std::string(1, static_cast<char>('a' + d)));
    return on(std::make_shared<Mesh>(names, sizes, ranks), ranks, shape, dtype);
  }

  Placed on(const MeshPtr& mesh, const std::vector<int64_t>& ranks, const std::vector<int64_t>& shape,
            DType dtype = DType::kFloat32) {
    std::vector<Placement> placements;
    std::vector<int> order;
    for (int d = 0; d < mesh->ndim(); ++d) {
      const int64_t dim = shape.empty() ? -1 : pick(-1, static_cast<int64_t>(shape.size()) - 1);
      placements.push_back(dim < 0           ? Placement::replicate()
                           : pick(0, 3) == 0 ? Placement::strided_shard(dim, pick(2, 3))
                                             : Placement::shard(dim));
      order.push_back(d);
    }
    std::shuffle(order.begin(), order.end(), random_);
    return placed(mesh, ranks, shape, placements, order, dtype);
  }

 private:
  std::mt19937 random_;
};

// Returns the elements of a product of lists as one number each, the last tensor dim fastest.
inline std::vector<int64_t> elements_of(const std::vector<std::vector<int64_t>>& lists,
                                        const std::vector<int64_t>& shape) {
  std::vector<int64_t> elements{0};
  for (size_t t = 0; t < shape.size(); ++t) {
    std::vector<int64_t> finer;
    for (const int64_t element : elements) {
      for (const int64_t index : lists[t]) finer.push_back(element * shape[t] + index);
    }
    elements = std::move(finer);
  }
  return elements;
}

inline std::vector<int64_t> elements_of(const Placed& placed, Rank rank) {
  const auto found = placed.held.find(rank);
  return found == placed.held.end() ? std::vector<int64_t>{} : elements_of(found->second, placed.layout.shape());
}

// Returns the elements in both lists, in the order of the first.
inline std::vector<int64_t> in_common(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  const std::set<int64_t> of_b(b.begin(), b.end());
  std::vector<int64_t> both;
  for (const int64_t element : a) {
    if (of_b.contains(element)) both.push_back(element);
  }
  return both;
}

}  // namespace shardwright::test
