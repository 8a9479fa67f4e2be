#include "layout/units.h"

#include "layout/positions.h"
#include "support/error.h"

namespace shardwright {

void check_blocks_are_whole(const Layout& layout, int tensor_dim, int64_t unit) {
  const int64_t n = layout.shape()[tensor_dim];
  const Mesh& mesh = layout.mesh();
  for (const int64_t position : positions_along(mesh, dims_of(layout.cuts(tensor_dim)).to_vector())) {
    for (const Interval& one : layout.part(tensor_dim, position)) {
      const bool is_whole = one.begin % unit == 0 && (one.end % unit == 0 || one.end == n);
      check_user(is_whole, "unit: ", layout, " gives rank ", mesh.rank_at(Position{position}), " elements ", one.begin,
                 " to ", one.end, " of dim ", tensor_dim, ", within a unit of ", unit,
                 "; allowed are layouts in which earlier cuts of the dim are at multiples of the unit too");
    }
  }
}

}  // namespace shardwright
