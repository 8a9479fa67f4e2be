// Walks over the elements of regions.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "layout/region.h"

namespace shardwright {

// Calls visit with the global index of every element of a region, in local order.
inline void for_each_index(const Region& region, const std::function<void(const std::vector<int64_t>&)>& visit,
                           std::vector<int64_t> index = {}) {
  if (index.size() == region.size()) return visit(index);
  const size_t d = index.size();
  index.push_back(0);
  for (const Interval& interval : region[d]) {
    for (int64_t i = interval.begin; i < interval.end; ++i) {
      index[d] = i;
      for_each_index(region, visit, index);
    }
  }
}

}  // namespace shardwright
