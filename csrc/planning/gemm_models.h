// The time that products take on a type of device, by the process-wide tables.
#pragma once

#include <optional>
#include <string>

#include "planning/context.h"

namespace shardwright {

// Returns what was measured on such a device with this dtype, or else with another: figures are for operands of 16
// bits, and scaled. Nothing if no products were measured there.
std::optional<GemmModel> measured_gemm_model(const PlanningTables& tables, const std::string& device_type,
                                             const DType& dtype);

// Returns the same, or else the default for the device.
GemmModel gemm_model_on(const PlanningTables& tables, const std::string& device_type, const DType& dtype);

}  // namespace shardwright
