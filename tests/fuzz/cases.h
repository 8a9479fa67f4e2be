// Meshes, tensors, layouts and options by the choices of an input.
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
// On one mesh, as crossings are looked at rank by rank. Without strided cuts and rules that torch does not have, whose
// unequal parts on many ranks take minutes to plan.
constexpr Size kLarge{4, int64_t{1} << 20, int64_t{1} << 20, int64_t{1} << 34, false, false, false};

// What is asked of the planner, on one mesh or on two. Throws UserError where a layout is refused.
struct Question {
  Layout src;
  Layout dst;
  PlanOptions options;

  std::string to_string() const;
};

Question question(Input& in, const Size& size);

// Another layout of the same tensor on the same mesh. Throws UserError where it is refused.
Layout layout_like(Input& in, const Layout& layout);

// Not empty; perhaps with mesh dims of size 1.
MeshDimSet mesh_dims(Input& in, const Mesh& mesh);

}  // namespace shardwright::fuzz
