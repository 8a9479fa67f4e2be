// A map from elements of a source tensor to elements of a destination tensor: index arithmetic, dim by dim.
//
// A map is a list of *axes*. An axis matches a range of a source dim with a range of the same length of a destination
// dim. An axis with only a source dim fixes that dim at one index; an axis with only a destination dim fixes the
// destination dim. Every dim of either tensor is on exactly one axis. So a map moves a box of the source into a box of
// the destination, possibly with permuted dims. In each example the source has shape (4, 6):
//
//   the full tensor                  0 -> 0, 1 -> 1
//   transposed, to (6, 4)            0 -> 1, 1 -> 0
//   rows 4 to 7 of a fused (12, 6)   0[0:4] -> 0[4:8], 1 -> 1
//   rows 1 and 2, split off          0[1:3] -> 0[0:2], 1 -> 1
//   index 3 of a stack (8, 4, 6)     at 0[3], 0 -> 1, 1 -> 2
//   row 2 alone, as a vector (6,)    0[2], 1 -> 0
//
// Several items of a batch may read one source, and several may write one destination: fusing, splitting, stacking and
// unstacking are lists of such maps.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "exchange/grid.h"

namespace shardwright {

// An axis of a map: [src_begin, src_begin + length) of dim src_dim matches [dst_begin, dst_begin + length) of dst_dim.
struct MapAxis {
  static constexpr int kNoDim = Window::kNoDim;

  int src_dim = kNoDim;
  int dst_dim = kNoDim;
  int64_t src_begin = 0;  // 0 with kNoDim
  int64_t dst_begin = 0;
  int64_t length = 1;  // 1 on axes with only one dim
  bool operator==(const MapAxis&) const = default;
};

class IndexMap {
 public:
  explicit IndexMap(std::vector<MapAxis> axes) : axes_(std::move(axes)) {}
  // Returns the map of the full tensor onto itself.
  static IndexMap identity(const std::vector<int64_t>& shape);

  const std::vector<MapAxis>& axes() const { return axes_; }
  // Return the source side and the destination side of each axis, as a range of a tensor dim.
  std::vector<Window> src_windows() const;
  std::vector<Window> dst_windows() const;
  int64_t num_elements() const;  // number of elements that the map moves
  // Returns five numbers for each axis: the members of MapAxis in order. Maps are equal if their encodings are.
  std::vector<int64_t> encoding() const;

  // Throws UserError that begins with `argument`, the name of the map, unless every dim of both shapes is on exactly
  // one axis, every axis has a dim, ranges lie within their dims, and axes with one dim have length 1 and begin 0 on
  // the side without a dim.
  void check(const std::vector<int64_t>& src_shape, const std::vector<int64_t>& dst_shape,
             const std::string& argument) const;

  // Returns text such as "0[0:4] -> 0[4:8], 1[0:6] -> 1[0:6]".
  std::string to_string() const;
  bool operator==(const IndexMap&) const = default;

 private:
  std::vector<MapAxis> axes_;
};

}  // namespace shardwright
