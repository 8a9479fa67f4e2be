#include "cost/backend.h"

#include "support/names.h"

namespace shardwright {

Backend parse_backend(const std::string& name) { return parse_name("backend", name, Backend::kGloo, backend_name); }

const char* backend_name(Backend backend) { return backend == Backend::kNccl ? "nccl" : "gloo"; }

}  // namespace shardwright
