#include "cost/backend.h"

namespace shardwright {

const Lowering& lowering_of_backend(std::string_view backend, std::string_view device_type) {
  const bool is_gloo = backend == "gloo" || (backend == "fake" && device_type == "cpu");
  return is_gloo ? Lowering::kGloo : Lowering::kNccl;
}

const Lowering& lowering_of_device(std::string_view device_type) {
  return device_type == "cpu" ? Lowering::kGloo : Lowering::kNccl;
}

GemmModel default_gemm_model(const Lowering& lowering) {
  return GemmModel::named(lowering.is_on_device ? "h100" : "cpu");
}

}  // namespace shardwright
