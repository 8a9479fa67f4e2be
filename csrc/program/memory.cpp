#include "program/memory.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "moves/segments.h"
#include "program/program.h"
#include "program/stages.h"
#include "program/step_memory.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Returns the number of elements that a rank holds; 0 if it is not on the layout's mesh. `parts` are the layout's.
int64_t elements_of(const Layout& layout, KnownParts& parts, Rank rank) {
  const std::optional<Position> position = layout.mesh().position_of(rank);
  return position ? parts.num_elements(*position) : 0;
}

// Returns up to `max_ranks` evenly spaced ranks, including the first: of 10 ranks and with max_ranks = 4, the ranks
// 0, 2, 5 and 7.
ExaminedRanks evenly_spaced(std::vector<Rank> ranks, int64_t max_ranks) {
  const auto count = static_cast<int64_t>(ranks.size());
  if (count <= max_ranks) return {std::move(ranks), true};
  std::vector<Rank> sample;
  for (int64_t i = 0; i < max_ranks; ++i) sample.push_back(ranks[i * count / max_ranks]);
  return {std::move(sample), false};
}

// Returns true if the rank is on one of the meshes of the step.
bool takes_part(const Step& step, Rank rank) {
  return step.before.mesh().position_of(rank) || step.after.mesh().position_of(rank);
}

}  // namespace

ProgramMemory::ProgramMemory(const Plan& plan) : plan_(plan), sketch_(std::make_unique<Sketch>()) {
  if (plan.segments.count > 1) {
    plans_ = plans_of_segments(plan);
    for (const Plan& segment : plans_) segments_.push_back(std::make_unique<ProgramMemory>(segment));
    return;
  }
  for (const Step& step : plan.steps) {
    before_.emplace_back(step.before);
    after_.emplace_back(step.after);
    steps_.push_back(is_cross_or_rearrange(step.op) ? memory_of_crossing(step, plan) : memory_of_move(step, plan));
  }
}

ProgramMemory::~ProgramMemory() = default;

int ProgramMemory::sketch_step(Sketch& sketch, size_t step, Rank rank, int current) {
  const Step& plan_step = plan_.steps[step];
  const int next = sketch.new_buffer(elements_of(plan_step.after, after_[step], rank));
  if (takes_part(plan_step, rank)) steps_[step]->sketch_rank(sketch, rank, current, next);
  return next;
}

std::vector<int64_t> ProgramMemory::peak_bytes_by_step(Rank rank) {
  std::vector<int64_t> peaks;
  if (segments_.empty()) {
    Sketch sketch;
    const int result = sketch_all(sketch, rank);
    peaks = sketch.peaks(result);
  } else {
    peaks = peaks_in_segments(rank);
  }
  for (int64_t& peak : peaks) peak *= plan_.src.dtype().size_bytes();
  return peaks;
}

int ProgramMemory::sketch_all(Sketch& sketch, Rank rank) {
  int current = kInputBuffer;
  for (size_t i = 0; i < steps_.size(); ++i) {
    sketch.begin_step();
    current = sketch_step(sketch, i, rank, current);
  }
  return current;
}

// Examines only as many uniform segments as can be in flight at once, because more need no more memory.
std::vector<int64_t> ProgramMemory::peaks_in_segments(Rank rank) {
  const auto num_steps = static_cast<int64_t>(plan_.steps.size());
  const bool are_uniform = segments_.size() == 1;
  const int64_t count = are_uniform ? std::min(plan_.segments.count, num_steps + 2) : plan_.segments.count;
  std::vector<SketchedSegment> sketched;
  for (const std::unique_ptr<ProgramMemory>& segment : segments_) {
    SketchedSegment& sketched_segment = sketched.emplace_back();
    sketched_segment.num_input_elements = elements_of(segment->plan_.src, segment->before_.front(), rank);
    sketched_segment.result = segment->sketch_all(sketched_segment.sketch, rank);
  }
  const std::vector<int64_t> needed = plan_.dst.local_shape_of_rank(rank);
  const int64_t num_needed = std::accumulate(needed.begin(), needed.end(), int64_t{1}, std::multiplies<>());
  return peaks_in_stages(sketched, count, num_steps, num_needed);
}

// A step's peak depends on the next step only if the step has several rounds. Then the result may be released before
// the last round, if the next step does not use it; so the next step is sketched too.
int64_t ProgramMemory::peak_of_step(size_t step, Rank rank) {
  Sketch& sketch = *sketch_;
  sketch.clear();
  int current = kInputBuffer;
  sketch.begin_step();
  if (step > 0) {
    current = sketch.new_buffer(elements_of(plan_.steps[step].before, before_[step], rank));
    sketch.hold_from_start(current);
  }
  current = sketch_step(sketch, step, rank, current);
  if (plan_.steps[step].rounds > 1 && step + 1 < steps_.size()) {
    sketch.begin_step();
    current = sketch_step(sketch, step + 1, rank, current);
  }
  return sketch.peaks(current)[0] * plan_.src.dtype().size_bytes();
}

// Chooses the ranks to examine. For crossings, and for steps whose peak depends on a following crossing, ranks are not
// divided into classes: up to `max_ranks` evenly spaced ranks are examined.
ExaminedRanks ProgramMemory::ranks_to_examine(size_t step, int64_t max_ranks) const {
  const bool looks_ahead = plan_.steps[step].rounds > 1 && step + 1 < steps_.size();
  const bool crosses = is_cross_or_rearrange(plan_.steps[step].op);
  if (crosses || (looks_ahead && is_cross_or_rearrange(plan_.steps[step + 1].op))) {
    return evenly_spaced(ranks_of(plan_), max_ranks);
  }
  const Mesh& mesh = plan_.steps[step].before.mesh();
  RankClasses classes(mesh);
  steps_[step]->split_classes(classes);
  if (looks_ahead) steps_[step + 1]->split_classes(classes);
  const RankSample sample = classes.sample(max_ranks);
  return {mesh.ranks_at(sample.positions), sample.is_complete};
}

ProgramMemory::MaxPeaks ProgramMemory::max_peak_bytes_by_step(int64_t max_ranks) {
  MaxPeaks maxima;
  if (!segments_.empty()) {
    const auto [ranks, are_complete] = evenly_spaced(ranks_of(plan_), max_ranks);
    maxima = {std::vector<int64_t>(plan_.steps.size(), 0), are_complete};
    for (const Rank rank : ranks) {
      const std::vector<int64_t> peaks = peak_bytes_by_step(rank);
      for (size_t i = 0; i < peaks.size(); ++i) maxima.bytes[i] = std::max(maxima.bytes[i], peaks[i]);
    }
    return maxima;
  }
  for (size_t i = 0; i < steps_.size(); ++i) {
    const ExaminedRanks examined = ranks_to_examine(i, max_ranks);
    std::vector<Traffic> examined_traffic;
    int64_t peak = 0;
    for (const Rank rank : examined.ranks) {
      if (const std::optional<Traffic> traffic = steps_[i]->traffic_determining_peak(rank)) {
        if (std::find(examined_traffic.begin(), examined_traffic.end(), *traffic) != examined_traffic.end()) continue;
        examined_traffic.push_back(*traffic);
      }
      if (steps_[i]->is_like_earlier_rank(rank)) continue;
      peak = std::max(peak, peak_of_step(i, rank));
    }
    maxima.bytes.push_back(peak);
    // In these steps more traffic needs at least as much memory. The one exception is position 0, whose own part may
    // need more; it is always examined. So the maximum is exact if an examined rank has the upper bound of the traffic.
    const std::optional<Traffic> bound = examined_traffic.empty() ? std::nullopt : steps_[i]->traffic_upper_bound();
    const bool reaches_bound =
        bound && std::any_of(examined_traffic.begin(), examined_traffic.end(), [&](const Traffic& traffic) {
          return traffic.received_bytes == bound->received_bytes && traffic.sent_bytes == bound->sent_bytes;
        });
    maxima.is_exact = maxima.is_exact && (examined.are_complete || reaches_bound);
  }
  return maxima;
}

}  // namespace shardwright
