// Views: the layout of a tensor whose shape is read otherwise, where every rank keeps the elements that it holds, in
// the order in which it holds them.
//
//     (4, 6) on a=2,b=3 as [S(0), S(1)]       seen as (24)          [S(0), SS(0,2)]
//     (64) on tp=8 as [S(0)]                  seen as (4, 16)       [S(0), S(1)] on tp.0=4,tp.1=2
//     (5, 4) on a=2 as [S(0)]                 seen as (20)          [Blocks(0,4)]
//     (20) on a=10 as [S(0)]                  seen as (4, 5)        no layout: rank 2 holds the end of row 0 and the
//                                                                   beginning of row 1
//
// Dims of both shapes fall into the smallest groups with as many elements; each group is solved by itself. Even cuts
// are digits of an index (exchange/digits.h), and a view writes the same digits with other bounds between dims. All
// others are solved by comparing what the ranks hold (views/fit.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "layout/layout.h"

namespace shardwright {

// Why no layout of the other shape has the same parts.
struct NoView {
  std::string reason;  // as a whole sentence's part: "rank 2 holds the elements 4-6 of the 20 that become (4, 5), ..."
  MeshDimSet mesh_dims;  // those that cut the dims in question: if none of them cut, the view moves nothing
  std::optional<Layout> on_parts = std::nullopt;  // the view of plain parts, where only DTensor cannot say it
};

// Returns the layout of shape `shape`, whose first `flattened` dims it sees as one, with the same elements at the same
// local positions on every rank, in local tensors of its own shape. Pending reductions stay. Its mesh is that of
// `layout`, or one on which mesh dims that would cut two tensor dims are split (search/split.h).
//
// Among the layouts with these parts, it is one whose cuts DTensor knows, if there is one; even ones come in mesh
// order.
//
// Throws UserError if the sizes are negative or do not have as many elements as the layout.
std::variant<Layout, NoView> view_of(const Layout& layout, const std::vector<int64_t>& shape, int flattened = 1);

// Returns whether DTensor's placements on the same mesh can say it, and its operators work with it: chunks in any order
// of cuts if parts are equal, in mesh order otherwise; strided ones in mesh order with equal parts; dims that are not
// seen as one.
bool is_known_to_dtensor(const Layout& layout);

// The same as view_of, but only views on the mesh of `layout` that DTensor can say.
std::variant<Layout, NoView> dtensor_view_of(const Layout& layout, const std::vector<int64_t>& shape);

// Replaces one -1 among the sizes by what is left. Throws UserError if there are several, or if nothing fits.
std::vector<int64_t> inferred_shape(const Layout& layout, std::vector<int64_t> shape);

// Returns the layout of the tensor with its dims in another order: dim i of the result is dim dims[i]. Local parts are
// permuted alike. Throws UserError if `dims` is no permutation, or if it moves dims that the layout flattens.
Layout permuted(const Layout& layout, const std::vector<int64_t>& dims);

}  // namespace shardwright
