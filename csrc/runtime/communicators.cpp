#include "runtime/communicators.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <map>
#include <mutex>
#include <utility>

#include "runtime/side_stream.h"

namespace shardwright {
namespace {

// Below the dispatcher: whoever watches collectives is shown those of redistributes alone.
void run_tiny_collective(const comm::GroupPtr& group, c10::Device device) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard below_modes(
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  std::vector<at::Tensor> tensors{at::zeros({1}, at::TensorOptions(at::kFloat).device(device))};
  c10d::AllreduceOptions options;
  options.asyncOp = false;
  const comm::WorkPtr work = group->getBackend(device.type())->allreduce(tensors, options);
  if (work) work->wait();
}

}  // namespace

void make_communicators(c10::ArrayRef<comm::GroupPtr> groups, c10::Device device) {
  if (device.is_cpu() || is_capturing(device)) return;
  static std::mutex mutex;
  static auto* made = new std::map<std::pair<c10d::ProcessGroup*, c10::DeviceIndex>, comm::WeakGroupPtr>;
  for (const comm::GroupPtr& group : groups) {
    if (group->getSize() == 1) continue;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      std::erase_if(*made, [](const auto& entry) { return entry.second.expired(); });
      const bool is_new = made->try_emplace({group.get(), device.index()}, comm::WeakGroupPtr(group)).second;
      if (!is_new) continue;
    }
    run_tiny_collective(group, device);
  }
}

}  // namespace shardwright
