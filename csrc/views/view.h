// Views: the layout of a tensor in another shape. Every rank keeps its elements in their order, so nothing moves.
//
//     (4, 6) on a=2,b=3 as [S(0), S(1)]       seen as (24)          [S(0), SS(0,2)]
//     (64) on tp=8 as [S(0)]                  seen as (4, 16)       [S(0), S(1)] on tp.0=4,tp.1=2
//     (5, 4) on a=2 as [S(0)]                 seen as (20)          [Blocks(0,4)]
//     (20) on a=10 as [S(0)]                  seen as (4, 5)        no layout: rank 2 holds the end of row 0 and the
//                                                                   beginning of row 1
//
// The dims of both shapes are divided into the smallest groups with equal numbers of elements, and each group is solved
// by itself. Even cuts are digits of an index (exchange/digits.h), and a view has the same digits with other bounds
// between dims. Other cuts are solved by comparing the elements that ranks hold (views/find_cuts.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "layout/layout.h"

namespace shardwright {

// The reason why a layout has no view of a shape.
struct NoView {
  std::string reason;    // a clause: "rank 2 holds the elements 4-6 of the 20 that become (4, 5), ..."
  MeshDimSet mesh_dims;  // mesh dims whose cuts prevent the view; only of the first group of dims that has no view
  std::optional<Layout> on_parts = std::nullopt;  // the view, if there is one that DTensor cannot express
};

// Returns the layout of shape `shape` that has the same elements at the same local positions on every rank, or the
// reason why there is none. It flattens the first `flattened` dims; 1 flattens none. Local tensors get the shape of its
// parts. Pending reductions stay. Its mesh is that of `layout`, or a mesh on which mesh dims that would cut two tensor
// dims are split (search/split.h).
//
// If several layouts give these parts, cuts that DTensor can express are preferred, and even cuts are in mesh order.
//
// Throws UserError if a size is negative, if the number of elements differs, or if `flattened` is out of range.
std::variant<Layout, NoView> view_of(const Layout& layout, const std::vector<int64_t>& shape, int flattened = 1);

// True if DTensor's placements on the same mesh can express the layout, and DTensor's operators support it: chunks in
// any order of cuts if parts are equal, else in mesh order; strided cuts in mesh order with equal parts; no flattened
// dims.
bool is_known_to_dtensor(const Layout& layout);

// Like view_of, but returns only views on the mesh of `layout` that DTensor can express. If there is another view, it
// is NoView::on_parts.
std::variant<Layout, NoView> dtensor_view_of(const Layout& layout, const std::vector<int64_t>& shape);

// Returns the shape with a -1 among its sizes replaced by the size that the layout's number of elements determines.
// Throws UserError if several sizes are -1, if another size is below 1, or if no size fits. Returns a shape without -1
// unchanged and unchecked.
std::vector<int64_t> inferred_shape(const Layout& layout, std::vector<int64_t> shape);

// Returns the layout of the tensor with its dims in another order: dim i of the result is dim dims[i]. Negative
// `dims` count from the end. Local tensors are permuted in the same way. Throws UserError if `dims` is not a
// permutation, or if it moves flattened dims.
Layout permuted(const Layout& layout, const std::vector<int64_t>& dims);

}  // namespace shardwright
