// Division that rounds up.
#pragma once

#include <cstdint>

namespace shardwright {

// Returns n / k, rounded up. Requires n >= 0, k > 0 and n + k - 1 within int64_t.
constexpr int64_t ceil_divide(int64_t n, int64_t k) { return (n + k - 1) / k; }

}  // namespace shardwright
