#include "schedule/lanes.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "support/error.h"
#include "support/text.h"

namespace shardwright {

bool has_times(const StepSchedule& s) {
  const auto takes_time = [&](const Gather& g) {
    return s.weights[g.weight].gather_ps > 0 || s.weights[g.weight].fetch_ps > 0;
  };
  const auto has_no_bytes = [&](const Gather& g) { return s.weights[g.weight].use_bytes == 0; };
  return !s.uses.empty() && std::all_of(s.uses.begin(), s.uses.end(), [](const Use& u) { return u.compute_ps > 0; }) &&
         std::all_of(s.gathers.begin(), s.gathers.end(),
                     [&](const Gather& g) { return takes_time(g) || has_no_bytes(g); });
}

namespace {

// Simulates a step use by use. Each lane has the time at which it is free: now_ for compute, transfers_end_ for
// transfers, fetches_end_ for copies from the host, sends_end_ for copies to the host.
class Lanes {
 public:
  explicit Lanes(const StepSchedule& schedule) : s_(schedule), gathered_ps_(schedule.weights.size(), 0) {
    lanes_.uses.resize(s_.uses.size());
    lanes_.gathers.resize(s_.gathers.size());
    lanes_.reductions.resize(s_.reductions.size());
    lanes_.fetches.resize(s_.gathers.size());
    lanes_.sends.resize(s_.reductions.size());
    lanes_.activations.resize(s_.activation_gathers.size());
  }

  StepLanes run() {
    for (int i = 0; i < static_cast<int>(s_.uses.size()); ++i) {
      start_gathers(i);
      compute(i);
      reduce(i);
    }
    check_invariant(gather_ == s_.gathers.size() && reduction_ == s_.reductions.size() && in_flight_.empty(),
                    "a schedule has transfers that are not in the order of its uses");
    lanes_.total_ps = std::max(now_, sends_end_);
    return std::move(lanes_);
  }

 private:
  // Adds a transfer to its lane: after all earlier transfers, and not before `from_ps`.
  LaneSpan transfer(int64_t from_ps, int64_t length_ps) {
    LaneSpan span;
    span.begin_ps = std::max(transfers_end_, from_ps);
    transfers_end_ = span.end_ps = span.begin_ps + length_ps;
    lanes_.transfer_ps += length_ps;
    return span;
  }

  // Adds a copy to the lane of one direction, whose end so far is `lane_end_ps`. Returns an empty span for a copy of
  // length 0.
  LaneSpan copy(int64_t& lane_end_ps, int64_t length_ps) {
    if (length_ps == 0) return {now_, now_};
    const int64_t begin_ps = std::max(lane_end_ps, now_);
    lane_end_ps = begin_ps + length_ps;
    lanes_.copy_ps += length_ps;
    return {begin_ps, lane_end_ps};
  }

  // Starts the gathers of weights and activations that the schedule starts before use i.
  void start_gathers(int i) {
    for (; gather_ < s_.gathers.size() && s_.gathers[gather_].start == i; ++gather_) {
      const int w = s_.gathers[gather_].weight;
      LaneSpan& fetch = lanes_.fetches[gather_];
      fetch = copy(fetches_end_, s_.gathers[gather_].from_copy ? 0 : s_.weights[w].fetch_ps);
      lanes_.gathers[gather_] = transfer(fetch.end_ps, s_.weights[w].gather_ps);
      gathered_ps_[w] = lanes_.gathers[gather_].end_ps;
    }
    gather_activations(i, -1, now_);
  }

  // Starts, at `now_ps`, the gathers of activations that start in this use at the beginning of the turn of activation
  // `trigger` (-1: before the use).
  void gather_activations(int use, int trigger, int64_t now_ps) {
    for (size_t k = 0; k < s_.activation_gathers.size(); ++k) {
      const ActivationGather& g = s_.activation_gathers[k];
      if (g.start == use && g.trigger == trigger) {
        lanes_.activations[k] = transfer(now_ps, s_.options.activations[k].gather_ps);
      }
    }
  }

  // Returns the end of the compute of a use that begins at `begin_ps`. Compute is divided into one equal range for each
  // activation whose turn is in this use, and a range waits for its activation. Starts the gathers that these turns
  // trigger.
  int64_t end_of_compute(int use, int64_t begin_ps) {
    const std::vector<Activation>& activations = s_.options.activations;
    const int first = activation_;
    while (activation_ < static_cast<int>(activations.size()) && activations[activation_].first == use) ++activation_;
    const int64_t compute_ps = s_.uses[use].compute_ps;
    const int count = activation_ - first;
    if (count == 0) return begin_ps + compute_ps;
    int64_t end_ps = begin_ps;
    for (int j = 0; j < count; ++j) {
      gather_activations(use, first + j, end_ps);
      end_ps = std::max(end_ps, lanes_.activations[first + j].end_ps);
      end_ps += compute_ps * (j + 1) / count - compute_ps * j / count;
    }
    return end_ps;
  }

  // Runs a use once its weights are gathered, and the chunks that are gathered and reduced within it.
  void compute(int i) {
    const Use& use = s_.uses[i];
    for (const int w : use.weights) now_ = std::max(now_, gathered_ps_[w]);
    LaneSpan& span = lanes_.uses[i];
    span = {now_, end_of_compute(i, now_)};
    lanes_.compute_ps += use.compute_ps;
    // Half of a backward needs the chunks of weights, and the other half computes the chunks of gradients.
    const int64_t half_ps = use.pass == Pass::kBackward ? use.compute_ps / 2 : 0;
    for (const int w : s_.gathered_within(i)) {
      const LaneSpan chunks = transfer(now_, s_.weights[w].chunks_ps);
      lanes_.chunks.push_back({w, i, false, chunks});
      span.end_ps = std::max(span.end_ps, chunks.end_ps + half_ps) + s_.weights[w].first_chunk_ps;
    }
    for (const ReducedWithin& r : s_.reduced_within(i)) {
      const LaneSpan chunks = transfer(span.end_ps - half_ps, r.transfer_ps - r.last_chunk_ps);
      lanes_.chunks.push_back({r.weight, i, true, chunks});
      span.end_ps = std::max(span.end_ps, chunks.end_ps);
      const LaneSpan last = transfer(span.end_ps, r.last_chunk_ps);
      lanes_.chunks.push_back({r.weight, i, true, last});
      span.end_ps = last.end_ps;
    }
    now_ = span.end_ps;
  }

  // Starts the reductions that come right after use i, then waits for the reductions that must finish before the next
  // use.
  void reduce(int i) {
    for (; reduction_ < s_.reductions.size() && s_.reductions[reduction_].start == i; ++reduction_) {
      const Reduction& r = s_.reductions[reduction_];
      const Weight& w = s_.weights[r.weight];
      lanes_.reductions[reduction_] = transfer(now_, r.in_chunks ? w.in_chunks.rest_ps : w.reduce_ps);
      in_flight_.push_back(reduction_);
    }
    std::erase_if(in_flight_, [&](size_t r) {
      if (s_.reductions[r].finish > i) return false;
      now_ = std::max(now_, lanes_.reductions[r].end_ps);
      lanes_.sends[r] = copy(sends_end_, s_.weights[s_.reductions[r].weight].send_ps);
      return true;
    });
  }

  const StepSchedule& s_;
  StepLanes lanes_;
  int64_t now_ = 0;                   // current time on the lane of compute
  int64_t transfers_end_ = 0;         // end of the last transfer
  int64_t fetches_end_ = 0;           // end of the last copy from the host
  int64_t sends_end_ = 0;             // end of the last copy to the host
  std::vector<int64_t> gathered_ps_;  // by weight: end of its latest gather
  int activation_ = 0;                // index of the next activation
  size_t gather_ = 0;                 // index of the next gather
  size_t reduction_ = 0;              // index of the next reduction
  std::vector<size_t> in_flight_;     // indices of reductions that are not waited for yet
};

}  // namespace

StepLanes predict(const StepSchedule& schedule) { return Lanes(schedule).run(); }

std::string lanes_text(const StepSchedule& s, int width) {
  const StepLanes lanes = predict(s);
  std::string compute(width, ' ');
  std::string transfers(width, ' ');
  std::string fetches(width, ' ');
  std::string sends(width, ' ');
  // Fills the columns of a span with the last digit of `index`, or with * if it is negative.
  const auto mark = [&](std::string& row, const LaneSpan& span, int index) {
    if (lanes.total_ps == 0 || span.end_ps == span.begin_ps) return;
    const auto column = [&](int64_t ps) {
      return static_cast<int>(static_cast<double>(ps) / static_cast<double>(lanes.total_ps) * width);
    };
    const int first = std::min(column(span.begin_ps), width - 1);
    const int last = std::clamp(column(span.end_ps), first + 1, width);
    std::fill(row.begin() + first, row.begin() + last, static_cast<char>(index < 0 ? '*' : '0' + index % 10));
  };
  for (size_t i = 0; i < s.uses.size(); ++i) mark(compute, lanes.uses[i], static_cast<int>(i));
  for (size_t g = 0; g < s.gathers.size(); ++g) mark(transfers, lanes.gathers[g], s.gathers[g].weight);
  for (size_t r = 0; r < s.reductions.size(); ++r) mark(transfers, lanes.reductions[r], s.reductions[r].weight);
  for (const LaneSpan& span : lanes.activations) mark(transfers, span, -1);
  for (const ChunksSpan& c : lanes.chunks) {
    const int original = s.weights[c.weight].original;
    mark(transfers, c.span, original < 0 ? c.weight : original);
  }
  for (size_t g = 0; g < s.gathers.size(); ++g) mark(fetches, lanes.fetches[g], s.gathers[g].weight);
  for (size_t r = 0; r < s.reductions.size(); ++r) mark(sends, lanes.sends[r], s.reductions[r].weight);
  const std::string copies = concat(" and copies ", microseconds_text(lanes.copy_ps));
  const std::string rows = concat("  from the host        |", fetches, "|\n  to the host          |", sends, "|\n");
  const bool has_copies = lanes.copy_ps > 0;
  return concat("predicted ", microseconds_text(lanes.total_ps), ": compute ", microseconds_text(lanes.compute_ps),
                ", transfers ", microseconds_text(lanes.transfer_ps), has_copies ? copies : "", " of which ",
                microseconds_text(lanes.exposed_ps()), " are exposed\n  compute, by use      |", compute,
                "|\n  transfers, by weight |", transfers, "|\n", has_copies ? rows : "");
}

}  // namespace shardwright
