// Models that predict the time of matrix products on a type of device ("cuda", "cpu"), from the process-wide tables.
#pragma once

#include <optional>
#include <string>

#include "planning/context.h"

namespace shardwright {

// Returns the model that was measured on this type of device with this dtype, or else with the first measured of
// bfloat16, float16, float32 and float64. A model describes 16-bit operands and is scaled to other dtypes when it is
// used. Returns nullopt if there is no such model.
std::optional<GemmModel> measured_gemm_model(const PlanningTables& tables, const std::string& device_type,
                                             const DType& dtype);

// Returns the measured model, or else the default for the type of device.
GemmModel gemm_model_on(const PlanningTables& tables, const std::string& device_type, const DType& dtype);

}  // namespace shardwright
