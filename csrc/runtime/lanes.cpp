#include "runtime/lanes.h"

#include <array>

namespace shardwright {

void Lane::issue(const std::shared_ptr<Run>& run, const std::function<void()>& advance) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  drain();
  advance();
  if (!run->all_started()) pending_.push_back(run);
}

void Lane::drain() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  while (!pending_.empty()) {
    const std::shared_ptr<Run> run = pending_.front().lock();
    pending_.pop_front();
    if (run) run->start_all();
  }
}

void Lane::note_asynchronous(const std::shared_ptr<Run>& run, const at::Tensor& output) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::erase_if(asynchronous_, [](const AsynchronousRun& noted) {
    const std::shared_ptr<Run> known = noted.run.lock();
    if (!known || known->is_waited_for()) return true;
    if (noted.output.use_count() > 0) return false;
    known->abandon();  // c10d never frees a Work that nobody waits for
    return true;
  });
  asynchronous_.push_back({run, c10::weak_intrusive_ptr<c10::TensorImpl>(output.getIntrusivePtr())});
}

void Lane::wait_for_asynchronous_runs() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (asynchronous_.empty()) return;
  const std::shared_ptr<Run> last = asynchronous_.back().run.lock();
  if (last && !last->is_waited_for()) last->order_before_current();
}

namespace {

// One lane per device.
constexpr int kMaxLanes = 1 + 128;  // device indices are of 8 bits

std::array<Lane, kMaxLanes>& lanes() {
  static auto* instance = new std::array<Lane, kMaxLanes>;  // never destroyed: threads may still run at exit
  return *instance;
}

}  // namespace

Lane& lane_of(const at::Device& device) { return lanes().at(device.is_cpu() ? 0 : 1 + device.index()); }

void drain_lanes() {
  for (Lane& lane : lanes()) lane.drain();
}

}  // namespace shardwright
