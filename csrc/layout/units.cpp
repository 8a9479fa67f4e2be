#include "layout/units.h"

#include "layout/positions.h"
#include "support/error.h"

namespace shardwright {

void check_blocks_are_whole(const Layout& layout, int tensor_dim, int64_t unit) {
  const int64_t n = layout.shape()[tensor_dim];
  const Mesh& mesh = layout.mesh();
  for (const int64_t position : positions_along(mesh, dims_of(layout.cuts(tensor_dim)).to_vector())) {
    for (const Interval& interval : layout.part(tensor_dim, position)) {
      const bool is_whole = interval.begin % unit == 0 && (interval.end % unit == 0 || interval.end == n);
      check_user(is_whole, "unit: parts of dim ", tensor_dim, " must begin and end at multiples of ", unit, ", got [",
                 interval.begin, ", ", interval.end, ") on rank ", mesh.rank_at(Position{position}), " of ", layout,
                 "; set this unit in every placement that shards the dim");
    }
  }
}

}  // namespace shardwright
