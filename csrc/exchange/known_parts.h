// Caches of values that depend only on a rank's coordinates on a few mesh dims. Each is computed once for all ranks.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "layout/layout.h"

namespace shardwright {

// Coordinates by mesh dim. Only the entries of the mesh's dims are set.
using Coordinates = std::array<int64_t, MeshDimSet::kMaxDims>;

// Writes the coordinates of a position to `coordinates`.
inline void coordinates_at(const Mesh& mesh, int64_t position, Coordinates& coordinates) {
  for (int d = mesh.ndim(); d-- > 0; position /= mesh.dim_size(d)) coordinates[d] = position % mesh.dim_size(d);
}

// A cache by the coordinates on some mesh dims. It begins as a hash map. From kMaxHashed values on it is a table, if
// all combinations of coordinates fit into one. References stay valid.
template <typename Value>
class ByCoordinates {
 public:
  ByCoordinates(const Mesh& mesh, MeshDimSet mesh_dims) {
    for (const int d : mesh_dims.to_vector()) {
      mesh_dims_.emplace_back(d, mesh.dim_size(d));
      num_combinations_ *= mesh.dim_size(d);
    }
  }

  // Returns true if all combinations of coordinates fit into the table.
  bool fits_table() const { return num_combinations_ <= kMaxInTable; }

  // Returns the value at these coordinates. On the first call `make()` computes it.
  template <typename Make>
  const Value& at(const Coordinates& coordinates, const Make& make) {
    int64_t index = 0;
    for (const auto& [d, size] : mesh_dims_) index = index * size + coordinates[d];
    if (table_.empty() && fits_table() && hashed_.size() >= kMaxHashed) table_.resize(num_combinations_);
    std::optional<Value>& value = table_.empty() ? hashed_[index] : table_[index];
    if (!value) value = make();
    return *value;
  }

 private:
  static constexpr int64_t kMaxInTable = 4096;  // maximum number of combinations for a table
  static constexpr size_t kMaxHashed = 8;       // up to so many values a table costs more than it saves

  int64_t num_combinations_ = 1;                    // of coordinates
  std::vector<std::pair<int, int64_t>> mesh_dims_;  // and their sizes
  std::vector<std::optional<Value>> table_;
  std::unordered_map<int64_t, std::optional<Value>> hashed_;
};

// Caches the indices of each tensor dim that a rank of a layout holds. The layout must outlive the object.
class KnownParts {
 public:
  struct Part {
    IntervalList list;   // the indices, in local order
    int64_t length = 0;  // number of indices
  };

  explicit KnownParts(const Layout& layout) : layout_(layout) {
    for (int t = 0; t < layout.ndim(); ++t) parts_.emplace_back(layout.mesh(), dims_of(layout.cuts(t)));
  }

  // Returns the part of a tensor dim that the rank at these coordinates holds.
  const Part& at(int tensor_dim, const Coordinates& coordinates) {
    return parts_[tensor_dim].at(coordinates, [&] {
      const int64_t n = layout_.shape()[tensor_dim];
      Part part;
      append(part.list, {0, n});
      for (const Cut& c : layout_.cuts(tensor_dim)) {
        part.list = c.rule.part(part.list, layout_.mesh().dim_size(c.mesh_dim), coordinates[c.mesh_dim]);
      }
      part.list = layout_.restricted(tensor_dim, std::move(part.list));
      part.length = shardwright::length(part.list);
      return part;
    });
  }

  // Returns the size of the local tensor of the rank at these coordinates.
  int64_t num_elements(const Coordinates& coordinates) {
    int64_t total = 1;
    for (int t = 0; t < layout_.ndim(); ++t) total *= at(t, coordinates).length;
    return total;
  }

 private:
  const Layout& layout_;
  std::vector<ByCoordinates<Part>> parts_;
};

}  // namespace shardwright
