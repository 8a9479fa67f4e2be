#include "runtime/open_groups.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <array>

namespace shardwright {
namespace {

// The mangled name of a protected, thread-local member of c10d::ProcessGroupNCCL, which counts the groups that PyTorch
// has opened with ncclGroupStart. It is looked up by name, because the class's header needs NCCL's header. ("nccl2" of
// torch 2.15 opens no group before a batch ends.)
constexpr const char* kOpenGroupCounterSymbol = "_ZN4c10d16ProcessGroupNCCL23ncclActiveGroupCounter_E";

// Returns the number of groups that PyTorch has open on this thread; 0 if this torch has no NCCL.
int64_t num_open_nccl_groups() {
  thread_local const auto* const open = static_cast<const uint64_t*>(dlsym(RTLD_DEFAULT, kOpenGroupCounterSymbol));
  return open == nullptr ? 0 : static_cast<int64_t>(*open);
}

// Returns the registered queries, by type of device; null if none.
std::array<OpenGroupsQuery, c10::COMPILE_TIME_MAX_DEVICE_TYPES>& queries() {
  static std::array<OpenGroupsQuery, c10::COMPILE_TIME_MAX_DEVICE_TYPES> all{};
  return all;
}

const bool kRegistered = register_open_groups_query(c10::DeviceType::CUDA, num_open_nccl_groups);

}  // namespace

void check_no_open_group(c10::Device device) {
  const OpenGroupsQuery query = queries().at(static_cast<size_t>(device.type()));
  TORCH_CHECK(query == nullptr || query() == 0,
              "shardwright: this thread has an open NCCL group, for example a block of ",
              "torch.distributed._coalescing_manager. NCCL starts the transfers of an open group only when the group ",
              "ends. Call shardwright outside of the block");
}

bool register_open_groups_query(c10::DeviceType device, OpenGroupsQuery query) {
  queries().at(static_cast<size_t>(device)) = query;
  return true;
}

}  // namespace shardwright
