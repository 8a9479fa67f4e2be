#include "schedule/chunks.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "schedule/lanes.h"
#include "support/error.h"

namespace shardwright {
namespace {

// A candidate for chunks: the gather of a weight for consecutive uses, or the reduction of its gradient.
struct Candidate {
  int chunked = 0;            // index of the chunked weight
  int use = 0;                // first use
  int last = 0;               // last use
  bool is_reduction = false;  // true: `use` and `last` are the use that completes the gradient
  auto operator<=>(const Candidate&) const = default;
};

// Chooses the gathers and reductions to run in chunks, as described in the header.
class Chunking {
 public:
  Chunking(const std::vector<Weight>& weights, const std::vector<Use>& uses,
           const std::vector<ChunkedWeight>& chunked_weights, const ChunkingOptions& options)
      : weights_(weights), uses_(uses), chunked_weights_(chunked_weights), options_(options) {
    for (int f = 0; f < static_cast<int>(chunked_weights_.size()); ++f) {
      const ChunkedWeight& chunked = chunked_weights_[f];
      const auto num_weights = static_cast<int64_t>(weights_.size());
      check_user(0 <= chunked.weight && chunked.weight < num_weights, "weight of chunked_weights[", f, "] must be ",
                 IndexInRange{num_weights, "weights"}, ", got ", chunked.weight);
      check_user(chunked.num_chunks >= 1, "num_chunks of chunked_weights[", f, "] must be at least 1, got ",
                 chunked.num_chunks);
      check_user(chunked.chunk_bytes >= 0, "chunk_bytes of chunked_weights[", f, "] must be at least 0, got ",
                 chunked.chunk_bytes);
      check_user(chunked.transfer_ps >= 0, "transfer_ps of chunked_weights[", f, "] must be at least 0, got ",
                 chunked.transfer_ps);
      for (int i = 0; i < static_cast<int>(uses_.size()); ++i) {
        const int last = last_of_run(chunked.weight, i);
        if (last >= 0 && may_gather(chunked, i, last)) candidates_.push_back({f, i, last, false});
        const std::vector<int>& complete = uses_[i].gradients;
        if (takes_time(chunked.reduction) && std::count(complete.begin(), complete.end(), chunked.weight) > 0) {
          candidates_.push_back({f, i, i, true});
        }
      }
    }
  }

  // Returns the schedule in which the chosen candidates run in chunks.
  StepSchedule run() const {
    std::set<Candidate> chosen;
    const std::optional<StepSchedule> without_chunks = try_plan_with(chosen);
    StepSchedule best = without_chunks ? *without_chunks : plan_all_gathers_in_chunks(chosen);
    if (!has_times(best)) return best;
    for (const auto& [wait_ps, candidate] : candidates_by_wait(best)) {
      if (chosen.contains(candidate)) continue;
      std::set<Candidate> with = chosen;
      with.insert(candidate);
      const std::optional<StepSchedule> tried = try_plan_with(with);
      if (!tried || !has_times(*tried) || !holds_each_weight_once(*tried)) continue;
      const int64_t saved_ps = predict(best).total_ps - predict(*tried).total_ps;
      if (saved_ps <= 0 || saved_ps * 100 < wait_ps * kLeastChunkingPercent) continue;
      best = *tried;
      chosen = std::move(with);
    }
    return best;
  }

 private:
  // Returns true if the reduction has products with known durations.
  static bool takes_time(const ChunkedReduction& reduction) {
    return std::any_of(reduction.products.begin(), reduction.products.end(),
                       [](const ReducingProduct& p) { return p.transfer_ps > 0; });
  }

  // Returns the last use of a run: consecutive uses of a weight in one pass. Returns -1 if no run begins with `use`, or
  // if the run has several uses and one of them also needs another weight with bytes.
  int last_of_run(int weight, int use) const {
    const auto is_in_run = [&](int i) { return needs(i, weight) && uses_[i].pass == uses_[use].pass; };
    if (!is_in_run(use) || is_in_run(use - 1)) return -1;
    int last = use;
    while (is_in_run(last + 1)) ++last;
    for (int i = use; last > use && i <= last; ++i) {
      for (const int other : uses_[i].weights) {
        if (other != weight && weights_[other].use_bytes > 0) return -1;
      }
    }
    return last;
  }

  // Returns true if the weight may be gathered in chunks for the uses first, ..., last of one pass. The pass must be a
  // forward, or with `in_backwards` a forward or a backward. The use before `first` and the use after `last` must not
  // need the weight; with `in_backwards`, this holds only for recomputations.
  bool may_gather(const ChunkedWeight& chunked, int first, int last) const {
    const Pass pass = uses_[first].pass;
    if (pass != Pass::kForward && (pass != Pass::kBackward || !chunked.in_backwards)) return false;
    const auto is_gathered_for = [&](int other) {
      return needs(other, chunked.weight) && (!chunked.in_backwards || uses_[other].pass == Pass::kRecompute);
    };
    return !is_gathered_for(first - 1) && !is_gathered_for(last + 1);
  }

  // Returns true if the use exists and needs the weight.
  bool needs(int use, int weight) const {
    return 0 <= use && use < static_cast<int>(uses_.size()) &&
           std::count(uses_[use].weights.begin(), uses_[use].weights.end(), weight) > 0;
  }

  // Returns the schedule with exactly the chosen candidates in chunks: chunked weights replace weights in their uses,
  // and held_bytes includes the memory of their chunks. Throws UserError if the budget is too small.
  StepSchedule plan_with(const std::set<Candidate>& chosen) const {
    std::vector<Weight> weights = weights_;
    std::vector<Use> uses = uses_;
    ScheduleOptions options = options_.schedule;
    int64_t chunk_bytes = 0;
    int64_t added_bytes = 0;  // most bytes by which a gradient is larger if it is reduced in chunks
    for (int f = 0; f < static_cast<int>(chunked_weights_.size()); ++f) {
      const ChunkedWeight& chunked = chunked_weights_[f];
      const auto chunked_index = static_cast<int>(weights.size());
      bool is_used = false;
      for (const Candidate& candidate : chosen) {
        if (candidate.chunked != f) continue;
        if (candidate.is_reduction) {
          uses[candidate.last].in_chunks.push_back(chunked.weight);
          weights[chunked.weight].in_chunks = chunked.reduction;
          added_bytes =
              std::max(added_bytes, chunked.reduction.gradient_bytes - weights_[chunked.weight].gradient_bytes);
          continue;
        }
        is_used = true;
        for (int i = candidate.use; i <= candidate.last; ++i) {
          std::replace(uses[i].weights.begin(), uses[i].weights.end(), chunked.weight, chunked_index);
        }
      }
      if (!is_used) continue;
      weights.push_back({weights_[chunked.weight].name + " in chunks", 0, chunked.use_bytes, 0, 0, chunked.gather_ps, 0,
                         chunked.weight, chunked.transfer_ps, chunked.transfer_ps / chunked.num_chunks});
      chunk_bytes = std::max(chunk_bytes, chunked.chunk_bytes);
    }
    options.held_bytes += chunk_bytes;
    if (options.budget_bytes && options_.may_add_chunks) *options.budget_bytes += chunk_bytes + added_bytes;
    return options_.chooses_prefetch ? fastest_schedule(weights, uses, options)
                                     : make_schedule(std::move(weights), std::move(uses), options);
  }

  // Returns plan_with(chosen), or nullopt if that throws UserError. If there are no candidates at all, throws the
  // error.
  std::optional<StepSchedule> try_plan_with(const std::set<Candidate>& chosen) const {
    try {
      return plan_with(chosen);
    } catch (const UserError&) {
      if (chosen.empty() && candidates_.empty()) throw;
      return std::nullopt;
    }
  }

  // Returns the schedule with all possible gathers in chunks, and adds them to `chosen`. Throws the error of the plan
  // without chunks if this schedule does not fit into the budget either, or holds a weight both with and without chunks
  // at the same use.
  StepSchedule plan_all_gathers_in_chunks(std::set<Candidate>& chosen) const {
    for (const Candidate& candidate : candidates_) {
      if (!candidate.is_reduction) chosen.insert(candidate);  // a reduction takes as much memory in chunks
    }
    const std::optional<StepSchedule> with_chunks = try_plan_with(chosen);
    return with_chunks && holds_each_weight_once(*with_chunks)
               ? *with_chunks
               : plan_with({});  // throws the error of the plan without chunks
  }

  // Returns the candidates for which compute waits in this schedule, each preceded by its wait in picoseconds: the
  // longest wait first, at most kMostUsesTried.
  std::vector<std::pair<int64_t, Candidate>> candidates_by_wait(const StepSchedule& s) const {
    const StepLanes lanes = predict(s);
    std::vector<std::pair<int64_t, Candidate>> waits;
    for (const Candidate& candidate : candidates_) {
      const int64_t wait_ps =
          candidate.is_reduction ? wait_after(s, lanes, candidate) : wait_before(s, lanes, candidate);
      if (wait_ps > 0) waits.emplace_back(wait_ps, candidate);
    }
    std::stable_sort(waits.begin(), waits.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    if (waits.size() > kMostUsesTried) waits.resize(kMostUsesTried);
    return waits;
  }

  // Returns the time that compute waits for a candidate's gather: at most the duration of the gather, so that delays by
  // earlier transfers do not count. Returns 0 if the schedule does not have the gather.
  int64_t wait_before(const StepSchedule& s, const StepLanes& lanes, const Candidate& candidate) const {
    const auto is_gather_of_candidate = [&](const Gather& g) {
      return g.needed == candidate.use && g.weight == chunked_weights_[candidate.chunked].weight;
    };
    if (std::none_of(s.gathers.begin(), s.gathers.end(), is_gather_of_candidate)) return 0;
    const int64_t before_ps = candidate.use == 0 ? 0 : lanes.uses[candidate.use - 1].end_ps;
    return std::min(lanes.uses[candidate.use].begin_ps - before_ps,
                    weights_[chunked_weights_[candidate.chunked].weight].gather_ps);
  }

  // Returns the time that compute waits for a candidate's reduction, at most the duration of the reduction. Returns 0
  // if the schedule does not have the reduction.
  int64_t wait_after(const StepSchedule& s, const StepLanes& lanes, const Candidate& candidate) const {
    for (size_t r = 0; r < s.reductions.size(); ++r) {
      if (s.reductions[r].start != candidate.last ||
          s.reductions[r].weight != chunked_weights_[candidate.chunked].weight)
        continue;
      const int64_t wait_ps = lanes.reductions[r].end_ps - lanes.uses[s.reductions[r].finish].end_ps;
      return std::min(wait_ps, weights_[s.reductions[r].weight].reduce_ps);
    }
    return 0;
  }

  // Returns true if at no use both a chunked weight and its original are resident.
  bool holds_each_weight_once(const StepSchedule& s) const {
    for (const WeightBuffer& chunked : s.buffers) {
      const int weight = s.weights[chunked.weight].original;
      if (weight < 0) continue;
      const auto overlaps = [&](const WeightBuffer& b) {
        return b.weight == weight && b.first <= chunked.last && chunked.first <= b.last;
      };
      if (std::any_of(s.buffers.begin(), s.buffers.end(), overlaps)) return false;
    }
    return true;
  }

  const std::vector<Weight>& weights_;
  const std::vector<Use>& uses_;
  const std::vector<ChunkedWeight>& chunked_weights_;
  const ChunkingOptions& options_;
  std::vector<Candidate> candidates_;  // all gathers and reductions that may run in chunks
};

}  // namespace

StepSchedule schedule_with_chunks(const std::vector<Weight>& weights, const std::vector<Use>& uses,
                                  const std::vector<ChunkedWeight>& chunked_weights, const ChunkingOptions& options) {
  return Chunking(weights, uses, chunked_weights, options).run();
}

}  // namespace shardwright
