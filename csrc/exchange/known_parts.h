// Caches of values that depend only on a rank's coordinates on a few mesh dims. Each is computed once for all ranks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "layout/layout.h"

namespace shardwright {

// A cache whose keys are the coordinates on some mesh dims. It begins as a hash map. Once the map has kMaxHashed
// values, a table is used instead, if all combinations of coordinates fit into one. The table begins empty, so values
// of the map may be computed a second time. The map is kept, so references to its values stay valid.
template <typename Value>
class ByCoordinates {
 public:
  ByCoordinates(const Mesh& mesh, MeshDimSet mesh_dims) {
    for (const int d : mesh_dims.to_vector()) {
      mesh_dims_.push_back({mesh.stride(d), mesh.dim_size(d)});
      num_combinations_ *= mesh.dim_size(d);
    }
  }

  // Returns true if all combinations of coordinates fit into the table.
  bool fits_table() const { return num_combinations_ <= kMaxInTable; }

  // Returns the value at the coordinates of a position. `make()` computes it if it is not cached. References stay
  // valid.
  template <typename Make>
  const Value& at(int64_t position, const Make& make) {
    int64_t index = 0;
    for (const auto& [stride, size] : mesh_dims_) index = index * size + position / stride % size;
    if (table_.empty() && fits_table() && hashed_.size() >= kMaxHashed) table_.resize(num_combinations_);
    std::optional<Value>& value = table_.empty() ? hashed_[index] : table_[index];
    if (!value) value = make();
    return *value;
  }

 private:
  static constexpr int64_t kMaxInTable = 4096;  // maximum number of combinations for a table
  static constexpr size_t kMaxHashed = 8;       // up to so many values a table costs more than it saves

  struct MeshDim {
    int64_t stride;
    int64_t size;
  };
  int64_t num_combinations_ = 1;  // of coordinates
  std::vector<MeshDim> mesh_dims_;
  std::vector<std::optional<Value>> table_;
  std::unordered_map<int64_t, std::optional<Value>> hashed_;
};

// Caches the indices of each tensor dim that a rank of a layout holds. The layout must outlive the object.
class KnownParts {
 public:
  struct Part {
    explicit Part(IntervalList indices)
        : list(std::move(indices)), length(shardwright::length(list)), span(span_of(list)), has_gaps(list.size() > 1) {}

    IntervalList list;  // the indices, in local order
    int64_t length;     // number of indices
    Interval span;      // the smallest interval that contains all indices
    bool has_gaps;      // the list has several intervals
  };
  using PartsOfRank = std::vector<const Part*>;  // by tensor dim

  explicit KnownParts(const Layout& layout) : layout_(layout), parts_of_rank_(layout.ndim()) {
    for (int t = 0; t < layout.ndim(); ++t) parts_.emplace_back(layout.mesh(), dims_of(layout.cuts(t)));
  }

  // Returns the part of a tensor dim that the rank at a position holds.
  const Part& at(int tensor_dim, int64_t position) {
    return parts_[tensor_dim].at(position, [&] { return Part(layout_.part(tensor_dim, position)); });
  }

  // Returns the parts of all tensor dims that the rank at a position holds. Valid until the next call.
  const PartsOfRank& of_rank(int64_t position) {
    if (position == position_) return parts_of_rank_;
    position_ = position;
    for (int t = 0; t < layout_.ndim(); ++t) parts_of_rank_[t] = &at(t, position);
    return parts_of_rank_;
  }

  // Returns the size of the local tensor of the rank at a position.
  int64_t num_elements(int64_t position) {
    int64_t total = 1;
    for (int t = 0; t < layout_.ndim(); ++t) total *= at(t, position).length;
    return total;
  }

 private:
  const Layout& layout_;
  std::vector<ByCoordinates<Part>> parts_;
  int64_t position_ = -1;  // the rank of parts_of_rank_
  PartsOfRank parts_of_rank_;
};

// Returns a summary of the indices that are in both parts.
inline SharedRuns shared_runs(const KnownParts::Part& a, const KnownParts::Part& b) {
  const int64_t begin = std::max(a.span.begin, b.span.begin);
  const int64_t end = std::min(a.span.end, b.span.end);
  if (begin >= end) return {};
  if (a.has_gaps || b.has_gaps) return shared_runs(a.list, b.list);
  return {end - begin, 1, begin - a.span.begin, begin - b.span.begin};
}

}  // namespace shardwright
