#include "schedule/lanes.h"

#include <algorithm>
#include <string>

#include "support/error.h"
#include "support/text.h"

namespace shardwright {

bool has_times(const StepSchedule& s) {
  const auto takes_time = [&](const Gather& g) { return s.weights[g.weight].gather_ps > 0; };
  const auto is_small = [&](const Gather& g) { return s.weights[g.weight].use_bytes == 0; };
  return !s.uses.empty() && std::all_of(s.uses.begin(), s.uses.end(), [](const Use& u) { return u.compute_ps > 0; }) &&
         std::all_of(s.gathers.begin(), s.gathers.end(), [&](const Gather& g) { return takes_time(g) || is_small(g); });
}

StepLanes predict(const StepSchedule& s) {
  StepLanes lanes;
  lanes.uses.resize(s.uses.size());
  lanes.gathers.resize(s.gathers.size());
  lanes.reductions.resize(s.reductions.size());
  int64_t now = 0;   // on the lane of compute
  int64_t free = 0;  // from when on the lane of transfers is free
  const auto transfer = [&](LaneSpan& span, int64_t length_ps) {
    span.begin_ps = std::max(free, now);
    free = span.end_ps = span.begin_ps + length_ps;
    lanes.transfer_ps += length_ps;
  };
  std::vector<int64_t> there(s.weights.size(), 0);  // by weight: when its latest gather ends
  size_t gather = 0;
  size_t reduction = 0;
  std::vector<size_t> under_way;  // reductions
  for (int i = 0; i < static_cast<int>(s.uses.size()); ++i) {
    for (; gather < s.gathers.size() && s.gathers[gather].start == i; ++gather) {
      const int w = s.gathers[gather].weight;
      transfer(lanes.gathers[gather], s.weights[w].gather_ps);
      there[w] = lanes.gathers[gather].end_ps;
    }
    for (const int w : s.uses[i].weights) now = std::max(now, there[w]);
    lanes.uses[i] = {now, now + s.uses[i].compute_ps};
    lanes.compute_ps += s.uses[i].compute_ps;
    for (const int w : s.uses[i].weights) {
      if (s.weights[w].chunks_ps == 0) continue;
      LaneSpan chunks;
      transfer(chunks, s.weights[w].chunks_ps);
      lanes.uses[i].end_ps = std::max(lanes.uses[i].end_ps, chunks.end_ps) + s.weights[w].first_chunk_ps;
    }
    now = lanes.uses[i].end_ps;
    for (; reduction < s.reductions.size() && s.reductions[reduction].start == i; ++reduction) {
      transfer(lanes.reductions[reduction], s.weights[s.reductions[reduction].weight].reduce_ps);
      under_way.push_back(reduction);
    }
    std::erase_if(under_way, [&](size_t r) {
      if (s.reductions[r].finish > i) return false;
      now = std::max(now, lanes.reductions[r].end_ps);
      return true;
    });
  }
  check_invariant(gather == s.gathers.size() && reduction == s.reductions.size() && under_way.empty(),
                  "a schedule has transfers that are not in the order of its uses");
  lanes.total_ps = now;
  return lanes;
}

std::string lanes_text(const StepSchedule& s, int width) {
  const StepLanes lanes = predict(s);
  std::string compute(width, ' ');
  std::string transfers(width, ' ');
  const auto mark = [&](std::string& row, const LaneSpan& span, int number) {
    if (lanes.total_ps == 0 || span.end_ps == span.begin_ps) return;
    const auto column = [&](int64_t ps) {
      return static_cast<int>(static_cast<double>(ps) / static_cast<double>(lanes.total_ps) * width);
    };
    const int first = std::min(column(span.begin_ps), width - 1);
    const int last = std::clamp(column(span.end_ps), first + 1, width);
    std::fill(row.begin() + first, row.begin() + last, static_cast<char>('0' + number % 10));
  };
  for (size_t i = 0; i < s.uses.size(); ++i) mark(compute, lanes.uses[i], static_cast<int>(i));
  for (size_t g = 0; g < s.gathers.size(); ++g) mark(transfers, lanes.gathers[g], s.gathers[g].weight);
  for (size_t r = 0; r < s.reductions.size(); ++r) mark(transfers, lanes.reductions[r], s.reductions[r].weight);
  return concat("predicted ", microseconds_text(lanes.total_ps), ": compute ", microseconds_text(lanes.compute_ps),
                ", transfers ", microseconds_text(lanes.transfer_ps), " of which ",
                microseconds_text(lanes.exposed_ps()), " are exposed\n  compute, by use      |", compute,
                "|\n  transfers, by weight |", transfers, "|\n");
}

}  // namespace shardwright
