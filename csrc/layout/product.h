// Lists of the elements of a matrix.
#pragma once

#include <cstdint>
#include <optional>

#include "layout/region.h"

namespace shardwright {

// Returns the elements that lie in some rows and some columns of a matrix with `size` columns, as indices of all its
// elements, row by row: rows {0, 2} and columns {1, 2} of 3 x 4 elements are [1, 3) and [9, 11). What repeats in one of
// the lists repeats in the product, where it ascends. Returns nullopt if the product would keep more than `most`
// intervals.
std::optional<IntervalList> product_of(const IntervalList& rows, const IntervalList& columns, int64_t size,
                                       int64_t most);

}  // namespace shardwright
