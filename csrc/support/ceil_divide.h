// Division that rounds up.
#pragma once

#include <cstdint>

namespace shardwright {

// n must be 0 or more, and k above 0.
constexpr int64_t ceil_divide(int64_t n, int64_t k) { return (n + k - 1) / k; }

}  // namespace shardwright
