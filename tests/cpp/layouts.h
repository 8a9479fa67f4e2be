// All layouts of a shape on a mesh, for exhaustive tests.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "layout/layout.h"

namespace shardwright::test {

// Returns true if the longest tests must skip nothing (`make test-cpp EXHAUSTIVE=1`).
inline bool is_exhaustive() { return std::getenv("SHARDWRIGHT_EXHAUSTIVE") != nullptr; }

inline MeshPtr mesh_of(const std::vector<int64_t>& sizes, std::vector<int64_t> ranks = {}) {
  std::vector<std::string> names;
  for (size_t d = 0; d < sizes.size(); ++d) names.push_back(std::string(1, static_cast<char>('a' + d)));
  return std::make_shared<Mesh>(names, sizes, std::move(ranks));
}

inline Layout layout_of(const MeshPtr& mesh, const std::vector<int64_t>& shape, const std::string& placements,
                        const ShardOrder& order = {}, const std::string& dtype = "float32") {
  return Layout(mesh, shape, DType::parse(dtype), parse_placements(placements), order);
}

// Returns every assignment of R, S(t) and the given partials to the mesh dims, with every order of cuts.
inline std::vector<Layout> all_layouts(const MeshPtr& mesh, const std::vector<int64_t>& shape,
                                       const std::vector<Placement>& partials) {
  std::vector<Placement> choices{Placement::replicate()};
  for (size_t t = 0; t < shape.size(); ++t) choices.push_back(Placement::shard(static_cast<int64_t>(t)));
  choices.insert(choices.end(), partials.begin(), partials.end());

  std::vector<std::vector<Placement>> assignments{{}};
  for (int d = 0; d < mesh->ndim(); ++d) {
    std::vector<std::vector<Placement>> longer;
    for (const auto& assignment : assignments) {
      for (const Placement& choice : choices) {
        longer.push_back(assignment);
        longer.back().push_back(choice);
      }
    }
    assignments = std::move(longer);
  }

  std::vector<Layout> layouts;
  for (const auto& assignment : assignments) {
    std::vector<ShardOrder> orders{{}};
    for (size_t t = 0; t < shape.size(); ++t) {
      std::vector<int> mesh_dims;
      for (int d = 0; d < mesh->ndim(); ++d) {
        if (assignment[d].is_shard_like() && assignment[d].dim == static_cast<int64_t>(t)) mesh_dims.push_back(d);
      }
      if (mesh_dims.empty()) continue;
      std::vector<ShardOrder> longer;
      do {
        for (ShardOrder order : orders) {
          order[static_cast<int64_t>(t)] = mesh_dims;
          longer.push_back(std::move(order));
        }
      } while (std::next_permutation(mesh_dims.begin(), mesh_dims.end()));
      orders = std::move(longer);
    }
    for (const ShardOrder& order : orders) {
      layouts.emplace_back(mesh, shape, DType::parse("float32"), assignment, order);
    }
  }
  return layouts;
}

}  // namespace shardwright::test
