// The dtypes of products of scaled operands.
#pragma once

#include "layout/dtype.h"

namespace shardwright {

// True if operands of this dtype are multiplied with scales. Two operands of float8_e5m2 are not multiplied.
inline bool takes_scales(DType operand) { return operand == DType::kFloat8E4M3FN || operand == DType::kFloat8E5M2; }

inline bool is_scaled_result(DType result) { return result == DType::kBFloat16 || result == DType::kFloat32; }

}  // namespace shardwright
