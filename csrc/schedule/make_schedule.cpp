// Plans a step: residency of weights, reductions, addresses. The steps of the algorithm are in schedule.h.
#include <algorithm>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "schedule/activations.h"
#include "schedule/arena.h"
#include "schedule/lanes.h"
#include "schedule/schedule.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Throws UserError if a value of the weight's `in_chunks` is negative or names a use that does not exist.
void check_in_chunks(const Weight& weight, int64_t num_uses) {
  const ChunkedReduction& reduction = weight.in_chunks;
  const auto check_value = [&](int64_t value, const char* field) {
    check_user(value >= 0, "weights: ", field, " of in_chunks of '", weight.name, "' must be at least 0, got ", value);
  };
  check_value(reduction.rest_ps, "rest_ps");
  check_value(reduction.gradient_bytes, "gradient_bytes");
  for (const ReducingProduct& product : reduction.products) {
    check_value(product.transfer_ps, "transfer_ps");
    check_value(product.last_chunk_ps, "last_chunk_ps");
    check_user(-1 <= product.use && product.use < num_uses, "weights: use of in_chunks of '", weight.name, "' must be ",
               InRange{-1, num_uses - 1}, " (-1: the use that completes the gradient), got ", product.use);
  }
}

// Throws UserError on the arguments that make_schedule rejects, except for budgets that are too small.
void check(const std::vector<Weight>& weights, const std::vector<Use>& uses, const ScheduleOptions& options) {
  for (const Weight& w : weights) {
    check_user(w.rest_bytes >= 0 && w.use_bytes >= 0 && w.gradient_bytes >= 0 && w.gather_ps >= 0 && w.reduce_ps >= 0 &&
                   w.fetch_ps >= 0 && w.send_ps >= 0,
               "weights: bytes and times of '", w.name, "' must be at least 0, got rest_bytes=", w.rest_bytes,
               ", use_bytes=", w.use_bytes, ", gradient_bytes=", w.gradient_bytes, ", gather_ps=", w.gather_ps,
               ", reduce_ps=", w.reduce_ps, ", fetch_ps=", w.fetch_ps, ", send_ps=", w.send_ps);
    check_in_chunks(w, std::ssize(uses));
    check_user(0 <= w.keep_bytes && w.keep_bytes <= w.use_bytes, "weights: keep_bytes of '", w.name, "' must be ",
               InRange{0, w.use_bytes}, " (its use_bytes), got ", w.keep_bytes);
  }
  for (size_t i = 0; i < uses.size(); ++i) {
    for (const auto& [field, indices] : {std::pair{"weights", &uses[i].weights}, {"gradients", &uses[i].gradients}}) {
      for (const int w : *indices) {
        check_user(0 <= w && w < static_cast<int>(weights.size()), field, " of uses[", i, "] must be ",
                   IndexInRange{std::ssize(weights), "weights"}, ", got ", w);
      }
      if (std::set<int>(indices->begin(), indices->end()).size() != indices->size()) {
        throw UserError(concat(field, " of uses[", i, "] must be distinct, got ", join(*indices)));
      }
    }
    for (const int w : uses[i].in_chunks) {
      check_user(std::count(uses[i].gradients.begin(), uses[i].gradients.end(), w) == 1, "in_chunks of uses[", i,
                 "] must be a subset of its gradients, got weight ", w);
    }
    check_user(uses[i].compute_ps >= 0, "compute_ps of uses[", i, "] must be at least 0, got ", uses[i].compute_ps);
  }
  constexpr size_t kMostUses = size_t{1} << 30;
  check_user(uses.size() <= kMostUses, "uses must be a list of at most ", kMostUses, " uses, got ", uses.size());
  check_argument(!options.budget_bytes || *options.budget_bytes >= 0, "budget_bytes", "at least 0, or None",
                 options.budget_bytes.value_or(0));
  check_argument(options.prefetch >= 0, "prefetch", "at least 0", options.prefetch);
  check_argument(options.held_bytes >= 0, "held_bytes", "at least 0", options.held_bytes);
  const auto most = static_cast<int>(uses.size()) - 1;
  const std::vector<int>& until = options.gather_until;
  check_user(until.empty() || until.size() == uses.size(), "gather_until must be empty or have one item for each of ",
             uses.size(), " uses, got ", until.size(), " items");
  if (!std::all_of(until.begin(), until.end(), [&](int use) { return use <= most; })) {
    throw UserError(concat("each item of gather_until must be at most ", most, ", got ", join(until)));
  }
  check_activations(options.activations, uses.size());
  check_argument(options.activations_ahead >= 0, "activations_ahead", "at least 0", options.activations_ahead);
  const int64_t a = options.alignment_bytes;
  check_argument(a > 0 && (a & (a - 1)) == 0, "alignment_bytes", "a power of two", a);
}

// Returns true if use i needs a weight that the previous use does not need: a *weight change*.
bool changes_weights(const std::vector<Use>& uses, int i) {
  const auto is_new = [&](int w) {
    return i == 0 || std::count(uses[i - 1].weights.begin(), uses[i - 1].weights.end(), w) == 0;
  };
  return std::any_of(uses[i].weights.begin(), uses[i].weights.end(), is_new);
}

// Plans the weights that are resident at each use, within a limit on buffer bytes.
//
// State: `resident_` maps each resident weight to its buffer; `uses_of_[w]` lists the uses of a weight, ascending.
// Invariant: a gathered buffer stays until the use for which it was gathered (`fits` checks every use on the way), so
// no gather is wasted.
class Residency {
 public:
  // `limit_bytes` is the maximum number of bytes of buffers at a use.
  Residency(StepSchedule& schedule, int64_t limit_bytes) : s_(schedule), limit_bytes_(limit_bytes) {
    uses_of_.resize(s_.weights.size());
    int changes = 0;
    for (int i = 0; i < num_uses(); ++i) {
      if (changes_weights(s_.uses, i)) ++changes;
      changes_until_.push_back(changes);
      for (const int w : s_.uses[i].weights) uses_of_[w].push_back(i);
    }
  }

  // Fills the schedule's buffers, without addresses, and its gathers.
  void plan() {
    for (int i = 0; i < num_uses(); ++i) {
      const int last = last_needed_at(i);
      evict_for(i, last);
      for (int use = i; use <= last; ++use) {
        for (const int w : s_.uses[use].weights) gather(i, use, w);
      }
      for (const int w : s_.uses[i].weights) {
        if (uses_of_[w].back() == i) release(w, i);
      }
    }
  }

  // Returns the least limit within which the weights of each single use fit.
  int64_t least_limit_bytes() const {
    int64_t least = 0;
    for (int i = 0; i < num_uses(); ++i) least = std::max(least, bytes_at(i, i));
    return least;
  }
  // Returns the least limit within which all gathers start as early as the options require.
  int64_t wanted_limit_bytes() const {
    int64_t most = 0;
    for (int i = 0; i < num_uses(); ++i) {
      for (int j = i; j < num_uses() && is_wanted(i, j); ++j) {
        for (int t = i; t <= j; ++t) most = std::max(most, bytes_at(t, j));
      }
    }
    return most;
  }

 private:
  int num_uses() const { return static_cast<int>(s_.uses.size()); }
  // Returns the aligned bytes of the gathered weight.
  int64_t gathered_bytes(int weight) const { return aligned(s_.weights[weight].use_bytes, s_.options.alignment_bytes); }
  // Returns true if the weight must stay gathered from its first use to its last.
  bool must_stay(int weight) const {
    const Weight& w = s_.weights[weight];
    return w.keep_bytes > 0 && w.keep_bytes == w.use_bytes;
  }
  // Returns true if a kept copy of the weight exists from its first use to its last.
  bool has_copy(int weight) const {
    const Weight& w = s_.weights[weight];
    return w.keep_bytes > 0 && w.keep_bytes < w.use_bytes && uses_of_[weight].size() > 1;
  }
  // Returns true if use i is one of the uses from the weight's first to its last.
  bool is_between_uses(int weight, int i) const {
    return !uses_of_[weight].empty() && uses_of_[weight].front() <= i && i <= uses_of_[weight].back();
  }

  // Returns the weights of uses i, ..., j and the weights that must stay at use i.
  std::set<int> resident_at(int i, int j) const {
    std::set<int> resident;
    for (int use = i; use <= j; ++use) resident.insert(s_.uses[use].weights.begin(), s_.uses[use].weights.end());
    for (int w = 0; w < static_cast<int>(s_.weights.size()); ++w) {
      if (must_stay(w) && is_between_uses(w, i)) resident.insert(w);
    }
    return resident;
  }

  // Returns the bytes of the weights resident_at(i, j) and of the kept copies that exist at use i.
  int64_t bytes_at(int i, int j) const {
    int64_t bytes = 0;
    for (const int w : resident_at(i, j)) bytes += gathered_bytes(w);
    for (int w = 0; w < static_cast<int>(s_.weights.size()); ++w) {
      if (has_copy(w) && is_between_uses(w, i)) bytes += aligned(s_.weights[w].keep_bytes, s_.options.alignment_bytes);
    }
    return bytes;
  }

  // Returns true if at each use t of i, ..., j the weights of uses t, ..., j fit into the limit, together with the
  // weights and kept copies that must stay.
  bool fits(int i, int j) const {
    for (int t = i; t <= j; ++t) {
      if (bytes_at(t, j) > limit_bytes_) return false;
    }
    return true;
  }

  // Returns true if gathers for use j should have started by use i, as `prefetch` or gather_until requires.
  bool is_wanted(int i, int j) const {
    if (i == j || (!s_.options.gather_until.empty() && j <= s_.options.gather_until[i])) return true;
    if (s_.options.prefetch == 0) return false;
    return changes_until_[j] - changes_until_[i] <= s_.options.prefetch;
  }

  // Returns the last use whose weights are resident or being gathered at use i.
  int last_needed_at(int i) const {
    int last = i;
    while (last + 1 < num_uses() && is_wanted(i, last + 1) && fits(i, last + 1)) ++last;
    return last;
  }

  // Makes room at use i for the weights of uses i, ..., last: releases other resident weights, the latest next use
  // first, until the rest fits. A weight is released right after its previous use.
  void evict_for(int i, int last) {
    const std::set<int> needed = resident_at(i, last);
    int64_t bytes = bytes_at(i, last);
    std::vector<std::pair<int, int>> evictable;  // next use and weight
    for (const auto& [w, buffer] : resident_) {
      if (needed.contains(w)) continue;
      evictable.emplace_back(*std::upper_bound(uses_of_[w].begin(), uses_of_[w].end(), i), w);
      bytes += gathered_bytes(w);
    }
    std::sort(evictable.rbegin(), evictable.rend());
    for (const auto& [next, w] : evictable) {
      if (bytes <= limit_bytes_) return;
      bytes -= gathered_bytes(w);
      release(w, *std::prev(std::lower_bound(uses_of_[w].begin(), uses_of_[w].end(), i)));
    }
  }

  // Plans the gather of weight w for `use`, which starts before use i, unless the weight is resident. The weight's
  // first gather also creates its kept copy.
  void gather(int i, int use, int w) {
    const bool is_first = uses_of_[w].front() == use;
    if (!resident_.contains(w)) {
      const auto buffer = static_cast<int>(s_.buffers.size());
      s_.buffers.push_back({w, false, i, i, s_.weights[w].use_bytes, 0});
      resident_[w] = buffer;
      s_.gathers.push_back({w, buffer, i, use, has_copy(w) && !is_first});
      if (has_copy(w) && is_first) {
        s_.buffers.push_back({w, true, use, uses_of_[w].back(), s_.weights[w].keep_bytes, 0});
      }
    }
  }

  // Ends the life of the weight's buffer after a use.
  void release(int weight, int after) {
    s_.buffers[resident_.at(weight)].last = after;
    resident_.erase(weight);
  }

  StepSchedule& s_;
  int64_t limit_bytes_;
  std::vector<std::vector<int>> uses_of_;  // by weight
  std::vector<int> changes_until_;         // by use: number of weight changes up to and including it
  std::map<int, int> resident_;            // index of the buffer, by weight
};

// Plans the reductions and the gathers of activations. Reductions are waited for after the next weight change with
// `overlaps`, otherwise at once. Sets the peaks of the memory outside of the arena.
void plan_reductions(StepSchedule& schedule, bool overlaps) {
  const auto n = static_cast<int>(schedule.uses.size());
  std::vector<int> next_change(n, n - 1);  // by use: the first weight change after it, or the last use
  for (int i = n - 1; i-- > 0;) next_change[i] = changes_weights(schedule.uses, i + 1) ? i + 1 : next_change[i + 1];
  std::vector<int> latest(schedule.weights.size(), -1);  // by weight: index of its previous reduction
  std::vector<int> begin(schedule.weights.size(), -1);   // by weight: first use of its unreduced gradient, -1: none
  for (int i = 0; i < n; ++i) {
    const Use& use = schedule.uses[i];
    if (use.pass == Pass::kBackward) {
      for (const int used : use.weights) {
        const int original = schedule.weights[used].original;
        const int w = original < 0 ? used : original;
        begin[w] = begin[w] < 0 ? i : begin[w];
      }
    }
    for (const int w : use.gradients) {
      const int first = begin[w] < 0 ? i : begin[w];
      if (latest[w] >= 0) {  // a weight has at most one reduction at a time
        Reduction& before = schedule.reductions[latest[w]];
        before.finish = std::min(before.finish, i - 1);
      }
      latest[w] = static_cast<int>(schedule.reductions.size());
      const bool in_chunks = std::count(use.in_chunks.begin(), use.in_chunks.end(), w) > 0;
      schedule.reductions.push_back({w, first, i, overlaps ? next_change[i] : i, in_chunks});
      begin[w] = -1;
    }
  }
  std::vector<int64_t> bytes(n, 0);
  for (const Reduction& r : schedule.reductions) {
    const Weight& w = schedule.weights[r.weight];
    for (int i = r.first; i <= r.finish; ++i) bytes[i] += r.in_chunks ? w.in_chunks.gradient_bytes : w.gradient_bytes;
  }
  const std::vector<Activation>& activations = schedule.options.activations;
  schedule.activation_gathers = plan_activations(schedule.uses, activations, schedule.options.activations_ahead);
  const std::vector<int64_t> gathered = activation_bytes(n, activations, schedule.activation_gathers);
  for (int i = 0; i < n; ++i) {
    schedule.peak_gradient_bytes = std::max(schedule.peak_gradient_bytes, bytes[i]);
    schedule.peak_activation_bytes = std::max(schedule.peak_activation_bytes, gathered[i]);
    schedule.peak_outside_bytes = std::max(schedule.peak_outside_bytes, bytes[i] + gathered[i]);
  }
}

// Sets the offsets of all buffers and the sizes of the arena.
void assign_offsets(StepSchedule& schedule) {
  std::vector<Lifetime> lifetimes;
  for (const WeightBuffer& b : schedule.buffers) lifetimes.push_back({b.first, b.last, b.size_bytes});
  const ArenaLayout layout = lay_out(lifetimes, schedule.options.alignment_bytes);
  for (size_t b = 0; b < lifetimes.size(); ++b) schedule.buffers[b].offset_bytes = layout.offsets[b];
  schedule.arena_bytes = layout.size_bytes;
  schedule.live_buffer_bytes = layout.live_bytes;
}

// Returns the schedule with its buffers and gathers planned within a limit on buffer bytes, which must hold the weights
// of each single use. Because of gaps, its arena may be larger than the limit.
StepSchedule with_limit(StepSchedule schedule, int64_t limit_bytes) {
  Residency(schedule, limit_bytes).plan();
  std::stable_sort(schedule.gathers.begin(), schedule.gathers.end(), [](const Gather& a, const Gather& b) {
    return std::make_pair(a.start, a.needed) < std::make_pair(b.start, b.needed);
  });
  assign_offsets(schedule);
  return schedule;
}

// Plans buffers and gathers for a schedule that has its reductions planned. Tries limits on buffer bytes from the
// available memory down to `least_limit_bytes`, and returns the first schedule that fits into the budget; nullopt if
// none does.
std::optional<StepSchedule> fit_into_budget(int64_t budget_bytes, const StepSchedule& with_reductions,
                                            int64_t least_limit_bytes) {
  const int64_t available = budget_bytes - with_reductions.peak_outside_bytes - with_reductions.options.held_bytes;
  for (int64_t limit = available; limit >= least_limit_bytes;) {
    StepSchedule schedule = with_limit(with_reductions, limit);
    if (schedule.arena_bytes <= available) return schedule;
    // The new limit is below the current peak of live buffers, so the next attempt differs.
    limit = std::min(limit, schedule.live_buffer_bytes) - with_reductions.options.alignment_bytes;
  }
  return std::nullopt;
}

// Returns the bytes of all gathers (twice for a gather that overlaps no compute) plus the bytes of reductions that
// overlap no compute.
int64_t cost_bytes(const StepSchedule& schedule) {
  int64_t bytes = 0;
  for (const Gather& g : schedule.gathers)
    bytes += schedule.weights[g.weight].use_bytes * (g.start == g.needed ? 2 : 1);
  for (const Reduction& r : schedule.reductions) {
    if (r.start == r.finish && !r.in_chunks) bytes += schedule.weights[r.weight].gradient_bytes;
  }
  return bytes;
}

}  // namespace

int64_t overlapping_budget_bytes(const std::vector<Weight>& weights, const std::vector<Use>& uses,
                                 const ScheduleOptions& options) {
  check(weights, uses, options);
  StepSchedule schedule{weights, uses, options, {}, {}, {}};
  plan_reductions(schedule, true);
  const int64_t limit = Residency(schedule, 0).wanted_limit_bytes();
  return with_limit(schedule, limit).arena_bytes + schedule.peak_outside_bytes + options.held_bytes;
}

int64_t activations_ahead_within(const std::vector<Weight>& weights, const std::vector<Use>& uses,
                                 const ScheduleOptions& options) {
  if (options.activations.empty() || options.prefetch == 0) return 0;
  ScheduleOptions with = options;
  with.prefetch = 0;
  with.gather_until = {};
  with.activations_ahead = 1;
  try {
    make_schedule(weights, uses, with);
    return 1;
  } catch (const UserError&) {
    return 0;
  }
}

StepSchedule make_schedule(std::vector<Weight> weights, std::vector<Use> uses, const ScheduleOptions& options) {
  check(weights, uses, options);
  // `overlapping` waits for reductions after the next weight change, `blocking` right after their start.
  StepSchedule overlapping{std::move(weights), std::move(uses), options, {}, {}, {}};
  StepSchedule blocking = overlapping;
  plan_reductions(overlapping, true);
  plan_reductions(blocking, false);
  if (!options.budget_bytes) return with_limit(std::move(overlapping), std::numeric_limits<int64_t>::max());

  const int64_t least = Residency(overlapping, 0).least_limit_bytes();
  const std::optional<StepSchedule> overlapped = fit_into_budget(*options.budget_bytes, overlapping, least);
  const std::optional<StepSchedule> blocked = fit_into_budget(*options.budget_bytes, blocking, least);
  if (overlapped && (!blocked || cost_bytes(*overlapped) <= cost_bytes(*blocked))) return *overlapped;
  if (blocked) return *blocked;
  const StepSchedule smallest = with_limit(blocking, least);
  throw UserError(
      concat("budget_bytes must be at least ", smallest.peak_bytes(), ", got ", *options.budget_bytes,
             ". The minimum is ", smallest.arena_bytes, " for gathered weights + ", smallest.peak_outside_bytes,
             smallest.peak_activation_bytes > 0 ? " for gradients and activations" : " for gradients",
             options.held_bytes > 0 ? concat(" + ", options.held_bytes, " for memory that stays allocated") : ""));
}

StepSchedule fastest_schedule(const std::vector<Weight>& weights, const std::vector<Use>& uses,
                              const ScheduleOptions& options) {
  std::vector<StepSchedule> schedules;
  std::vector<int64_t> times_ps;
  for (int64_t ahead = 1; ahead <= kMostChangesAhead; ++ahead) {
    ScheduleOptions with = options;
    with.prefetch = ahead;
    schedules.push_back(make_schedule(weights, uses, with));
    if (!has_times(schedules.back())) return schedules.front();
    times_ps.push_back(predict(schedules.back()).total_ps);
  }
  const int64_t least_ps = *std::min_element(times_ps.begin(), times_ps.end());
  const auto is_near = [&](int64_t ps) { return ps <= least_ps + least_ps / 100; };
  return schedules[std::find_if(times_ps.begin(), times_ps.end(), is_near) - times_ps.begin()];
}

}  // namespace shardwright
