// The dtypes of products of scaled operands.
#pragma once

#include "layout/dtype.h"

namespace shardwright {

// Returns true if operands of this dtype have scales. At most one operand of a product may be float8_e5m2.
inline bool takes_scales(DType operand) { return operand == DType::kFloat8E4M3FN || operand == DType::kFloat8E5M2; }

// Returns true if the product of operands with scales may have this dtype.
inline bool is_scaled_result(DType result) { return result == DType::kBFloat16 || result == DType::kFloat32; }

}  // namespace shardwright
