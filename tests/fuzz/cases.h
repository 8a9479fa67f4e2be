// Meshes, tensors, layouts and options chosen by an input.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "input.h"
#include "moves/plan.h"
#include "search/options.h"

namespace shardwright::fuzz {

struct Size {
  int max_mesh_dims = 4;
  int64_t max_dim_size = 5;
  int64_t max_ranks = 48;
  int64_t max_elements = 4096;
  bool shuffles_ranks = true;
  bool has_strided_cuts = true;
  bool has_two_meshes = true;
};

constexpr Size kSmall{};
// Only one mesh, because crossings examine every rank. No strided cuts and no rules that torch lacks, because their
// unequal parts on many ranks take minutes to plan.
constexpr Size kLarge{4, int64_t{1} << 20, int64_t{1} << 20, int64_t{1} << 34, false, false, false};

// A request to the planner, on one mesh or on two. Throws UserError if a layout is refused.
struct Question {
  Layout src;
  Layout dst;
  PlanOptions options;

  std::string to_string() const;
};

Question question(Input& in, const Size& size);

// Returns another layout of the same tensor on the same mesh. Throws UserError if it is refused.
Layout layout_like(Input& in, const Layout& layout);

// Returns at least one mesh dim; some may have size 1.
MeshDimSet mesh_dims(Input& in, const Mesh& mesh);

}  // namespace shardwright::fuzz
