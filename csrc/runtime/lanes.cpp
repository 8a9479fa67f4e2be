#include "runtime/lanes.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <unordered_map>

namespace shardwright {

void Lane::issue(const std::shared_ptr<Run>& run, const std::function<void()>& advance) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  drain();
  advance();
  if (!run->all_started()) pending_.push_back(run);
}

void Lane::issue_on(c10::ArrayRef<RankGroupPtr> groups, const std::shared_ptr<Run>& run,
                    const std::function<void()>& advance) {
  c10::SmallVector<Lane*, 4> lanes;
  for (const RankGroupPtr& group : groups) lanes.push_back(&lane_of(*group));
  std::sort(lanes.begin(), lanes.end());  // locks are taken in one order, so that threads cannot deadlock
  lanes.erase(std::unique(lanes.begin(), lanes.end()), lanes.end());
  c10::SmallVector<std::unique_lock<std::recursive_mutex>, 4> locks;
  for (Lane* lane : lanes) locks.emplace_back(lane->mutex_);
  for (Lane* lane : lanes) lane->drain();
  advance();
  if (run->all_started()) return;
  for (Lane* lane : lanes) lane->pending_.push_back(run);
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

constexpr int kMaxLanes = 128;  // device indices are of 8 bits

std::array<Lane, kMaxLanes>& lanes() {
  static auto* instance = new std::array<Lane, kMaxLanes>;  // never destroyed: threads may still run at exit
  return *instance;
}

}  // namespace

Lane& lane_of(const at::Device& device) { return lanes().at(device.index()); }

// A group that is made where another one was before gets its lane, on which nothing is pending any more.
Lane& lane_of(const RankGroup& group) {
  static std::mutex mutex;
  static auto* lanes = new std::unordered_map<const RankGroup*, std::unique_ptr<Lane>>;  // outlives threads
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Lane>& lane = (*lanes)[&group];
  if (!lane) lane = std::make_unique<Lane>();
  return *lane;
}

}  // namespace shardwright
