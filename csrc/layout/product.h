// Products of two interval lists: the elements in some rows and columns of a matrix.
#pragma once

#include <cstdint>
#include <optional>

#include "layout/region.h"

namespace shardwright {

// Returns the row-major indices of the elements in these rows and columns of a matrix with `num_columns` columns.
// Example: rows {0, 2} and columns {1, 2} of a 3 x 4 matrix are [1, 3) and [9, 11). Where the product ascends,
// repetitions in the lists stay stored once. Returns nullopt if the product would store more than `max_stored`
// intervals.
std::optional<IntervalList> product_of(const IntervalList& rows, const IntervalList& columns, int64_t num_columns,
                                       int64_t max_stored);

}  // namespace shardwright
