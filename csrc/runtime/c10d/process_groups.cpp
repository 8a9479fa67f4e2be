#include "runtime/c10d/process_groups.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "runtime/c10d/c10d_transport.h"

namespace shardwright {

// Entries of destroyed groups are removed when a new group is added.
RankGroupPtr group_named(const std::string& name) {
  static std::mutex mutex;
  static auto* known = new std::map<c10d::ProcessGroup*, RankGroupPtr>;  // never destroyed: threads may outlive it
  const c10::intrusive_ptr<c10d::ProcessGroup> group = c10d::resolve_process_group(name);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = known->find(group.get());
  if (found != known->end() && !found->second->is_gone()) return found->second;
  std::erase_if(*known, [](const auto& entry) {
    if (!entry.second->is_gone()) return false;
    entry.second->drop_transports();  // cached programs may refer to the group for a long time
    return true;
  });
  const auto rank_group =
      std::make_shared<RankGroup>(group->getGroupName(), group->getRank(), group->getSize(),
                                  RankGroup::WeakOwner(c10::intrusive_ptr<c10::intrusive_ptr_target>(group)),
                                  std::make_unique<C10dTransport>(group.get()));
  known->emplace(group.get(), rank_group);
  return rank_group;
}

std::chrono::milliseconds timeout_of(const std::string& name, c10::Device device) {
  return c10d::resolve_process_group(name)->getBackend(device.type())->getBackendOptions()->timeout;
}

}  // namespace shardwright
