#include "schedule/arena.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

namespace shardwright {
namespace {

// Returns true if both buffers exist during some event.
bool share_an_event(const Lifetime& a, const Lifetime& b) { return a.first <= b.last && b.first <= a.last; }

// Returns the offset of the smallest gap between `taken`, pairs of begin and end in ascending order, that holds `size`
// bytes. The gap after the last pair has no end.
int64_t smallest_gap(const std::vector<std::pair<int64_t, int64_t>>& taken, int64_t size) {
  int64_t offset = -1;
  int64_t smallest = std::numeric_limits<int64_t>::max();
  int64_t end = 0;
  for (const auto& [begin, next_end] : taken) {
    const int64_t gap = begin - end;
    if (gap >= size && gap < smallest) {
      offset = end;
      smallest = gap;
    }
    end = std::max(end, next_end);
  }
  return offset >= 0 ? offset : end;
}

// Places buffers one by one in this order, each in the smallest gap that holds it. `sizes` are the aligned bytes of the
// buffers. Does not set live_bytes.
ArenaLayout best_fit(const std::vector<Lifetime>& buffers, const std::vector<int64_t>& sizes,
                     const std::vector<size_t>& order) {
  ArenaLayout layout;
  layout.offsets.resize(buffers.size());
  std::vector<size_t> placed;
  for (const size_t b : order) {
    std::vector<std::pair<int64_t, int64_t>> taken;
    for (const size_t other : placed) {
      if (!share_an_event(buffers[b], buffers[other])) continue;
      taken.emplace_back(layout.offsets[other], layout.offsets[other] + sizes[other]);
    }
    std::sort(taken.begin(), taken.end());
    layout.offsets[b] = smallest_gap(taken, sizes[b]);
    layout.size_bytes = std::max(layout.size_bytes, layout.offsets[b] + sizes[b]);
    placed.push_back(b);
  }
  return layout;
}

// Returns the maximum number of bytes that exist during one event.
int64_t live_bytes(const std::vector<Lifetime>& buffers, const std::vector<int64_t>& sizes) {
  std::map<int64_t, int64_t> changes;
  for (size_t b = 0; b < buffers.size(); ++b) {
    changes[buffers[b].first] += sizes[b];
    changes[buffers[b].last + 1] -= sizes[b];
  }
  int64_t live = 0;
  int64_t most = 0;
  for (const auto& [event, change] : changes) most = std::max(most, live += change);
  return most;
}

}  // namespace

ArenaLayout lay_out(const std::vector<Lifetime>& buffers, int64_t alignment_bytes) {
  std::vector<int64_t> sizes;
  for (const Lifetime& buffer : buffers) sizes.push_back(aligned(buffer.size_bytes, alignment_bytes));
  const auto events = [&](size_t b) { return buffers[b].last - buffers[b].first + 1; };
  const auto by_size = [&](size_t b) { return -static_cast<double>(sizes[b]); };
  const auto by_events = [&](size_t b) { return -static_cast<double>(events(b)); };
  const auto by_area = [&](size_t b) { return -static_cast<double>(sizes[b]) * static_cast<double>(events(b)); };
  const auto by_begin = [&](size_t b) { return static_cast<double>(buffers[b].first); };

  ArenaLayout best;
  best.size_bytes = std::numeric_limits<int64_t>::max();
  // Places the buffers by ascending key, and keeps the layout if its arena is the smallest so far.
  const auto attempt = [&](const auto& key) {
    std::vector<size_t> order(buffers.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return std::make_pair(key(a), buffers[a].first) < std::make_pair(key(b), buffers[b].first);
    });
    ArenaLayout layout = best_fit(buffers, sizes, order);
    if (layout.size_bytes < best.size_bytes) best = std::move(layout);
  };
  attempt(by_begin);
  attempt(by_size);
  attempt(by_area);
  attempt(by_events);
  best.live_bytes = live_bytes(buffers, sizes);
  return best;
}

}  // namespace shardwright
