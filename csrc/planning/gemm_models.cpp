#include "planning/gemm_models.h"

#include "cost/backend.h"

namespace shardwright {

std::optional<GemmModel> measured_gemm_model(const PlanningTables& tables, const std::string& device_type,
                                             const DType& dtype) {
  // The dtype itself, then the dtypes whose models are scaled, first choice first.
  const DType candidates[] = {dtype, DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat64};
  for (const DType& model_dtype : candidates) {
    const auto found = tables.gemm_models.find({device_type, model_dtype.name()});
    if (found != tables.gemm_models.end()) return found->second;
  }
  return std::nullopt;
}

GemmModel gemm_model_on(const PlanningTables& tables, const std::string& device_type, const DType& dtype) {
  const std::optional<GemmModel> measured = measured_gemm_model(tables, device_type, dtype);
  return measured ? *measured : default_gemm_model(lowering_of_device(device_type));
}

}  // namespace shardwright
