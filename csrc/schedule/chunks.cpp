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
  int form = 0;               // index of the form
  int use = 0;                // first use
  int last = 0;               // last use
  bool is_reduction = false;  // true: `use` and `last` are the use that completes the gradient
  auto operator<=>(const Candidate&) const = default;
};

// Chooses the gathers and reductions to run in chunks, as described in the header. `possible_` has all candidates.
class Chunking {
 public:
  Chunking(const std::vector<Weight>& weights, const std::vector<Use>& uses, const std::vector<ChunkedForm>& forms,
           const ChunkingOptions& options)
      : weights_(weights), uses_(uses), forms_(forms), options_(options) {
    for (int f = 0; f < static_cast<int>(forms_.size()); ++f) {
      const ChunkedForm& form = forms_[f];
      const auto num_weights = static_cast<int64_t>(weights_.size());
      check_user(0 <= form.weight && form.weight < num_weights, "weight of forms[", f, "] must be ",
                 InRange{0, num_weights - 1}, ", got ", form.weight);
      check_user(form.num_chunks >= 1, "num_chunks of forms[", f, "] must be at least 1, got ", form.num_chunks);
      check_user(form.chunk_bytes >= 0, "chunk_bytes of forms[", f, "] must be at least 0, got ", form.chunk_bytes);
      check_user(form.transfer_ps >= 0, "transfer_ps of forms[", f, "] must be at least 0, got ", form.transfer_ps);
      for (int i = 0; i < static_cast<int>(uses_.size()); ++i) {
        const int last = last_of_run(form.weight, i);
        if (last >= 0 && may_gather(form, i, last)) possible_.push_back({f, i, last, false});
        const std::vector<int>& complete = uses_[i].gradients;
        if (takes_time(form.reduction) && std::count(complete.begin(), complete.end(), form.weight) > 0) {
          possible_.push_back({f, i, i, true});
        }
      }
    }
  }

  StepSchedule run() const {
    std::set<Candidate> chosen;
    const std::optional<StepSchedule> without_chunks = without_error(chosen);
    StepSchedule best = without_chunks ? *without_chunks : smallest(chosen);
    if (!has_times(best)) return best;
    for (const auto& [wait_ps, candidate] : by_wait(best)) {
      if (chosen.contains(candidate)) continue;
      std::set<Candidate> with = chosen;
      with.insert(candidate);
      const std::optional<StepSchedule> tried = without_error(with);
      if (!tried || !has_times(*tried) || !never_both(*tried)) continue;
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
    const auto goes_on = [&](int i) { return needs(i, weight) && uses_[i].pass == uses_[use].pass; };
    if (!goes_on(use) || goes_on(use - 1)) return -1;
    int last = use;
    while (goes_on(last + 1)) ++last;
    for (int i = use; last > use && i <= last; ++i) {
      for (const int other : uses_[i].weights) {
        if (other != weight && weights_[other].use_bytes > 0) return -1;
      }
    }
    return last;
  }

  // Returns true if the form may be gathered in uses first, ..., last. With `in_backwards`, its backward may directly
  // follow the forward, but not a recomputation, which has already gathered the weight.
  bool may_gather(const ChunkedForm& form, int first, int last) const {
    const Pass pass = uses_[first].pass;
    if (pass != Pass::kForward && (pass != Pass::kBackward || !form.in_backwards)) return false;
    const auto is_there = [&](int other) {
      return needs(other, form.weight) && (!form.in_backwards || uses_[other].pass == Pass::kRecompute);
    };
    return !is_there(first - 1) && !is_there(last + 1);
  }

  // Returns true if the use exists and needs the weight.
  bool needs(int use, int weight) const {
    return 0 <= use && use < static_cast<int>(uses_.size()) &&
           std::count(uses_[use].weights.begin(), uses_[use].weights.end(), weight) > 0;
  }

  // Returns the schedule with exactly the chosen candidates in chunks: forms replace weights in their uses, and
  // retained_bytes includes the memory of their chunks. Throws UserError if the budget is too small.
  StepSchedule planned(const std::set<Candidate>& chosen) const {
    std::vector<Weight> weights = weights_;
    std::vector<Use> uses = uses_;
    ScheduleOptions options = options_.schedule;
    int64_t chunk_bytes = 0;
    int64_t added_bytes = 0;  // of gradients
    for (int f = 0; f < static_cast<int>(forms_.size()); ++f) {
      const ChunkedForm& form = forms_[f];
      const auto form_index = static_cast<int>(weights.size());
      bool is_used = false;
      for (const Candidate& candidate : chosen) {
        if (candidate.form != f) continue;
        if (candidate.is_reduction) {
          uses[candidate.last].in_chunks.push_back(form.weight);
          weights[form.weight].in_chunks = form.reduction;
          added_bytes = std::max(added_bytes, form.reduction.gradient_bytes - weights_[form.weight].gradient_bytes);
          continue;
        }
        is_used = true;
        for (int i = candidate.use; i <= candidate.last; ++i) {
          std::replace(uses[i].weights.begin(), uses[i].weights.end(), form.weight, form_index);
        }
      }
      if (!is_used) continue;
      weights.push_back({weights_[form.weight].name + " in chunks", 0, form.use_bytes, 0, 0, form.gather_ps, 0,
                         form.weight, form.transfer_ps, form.transfer_ps / form.num_chunks});
      chunk_bytes = std::max(chunk_bytes, form.chunk_bytes);
    }
    options.retained_bytes += chunk_bytes;
    if (options.budget_bytes && options_.may_add_chunks) *options.budget_bytes += chunk_bytes + added_bytes;
    return options_.chooses_prefetch ? fastest_schedule(weights, uses, options)
                                     : make_schedule(std::move(weights), std::move(uses), options);
  }

  // Returns planned(chosen), or nullopt on UserError. Rethrows the error if there are no candidates.
  std::optional<StepSchedule> without_error(const std::set<Candidate>& chosen) const {
    try {
      return planned(chosen);
    } catch (const UserError&) {
      if (chosen.empty() && possible_.empty()) throw;
      return std::nullopt;
    }
  }

  // Returns the schedule with all possible gathers in chunks, and adds them to `chosen`. Throws the error of the plan
  // without chunks if this schedule does not fit into the budget either, or !never_both().
  StepSchedule smallest(std::set<Candidate>& chosen) const {
    for (const Candidate& candidate : possible_) {
      if (!candidate.is_reduction) chosen.insert(candidate);  // a reduction takes as much memory in chunks
    }
    const std::optional<StepSchedule> chunked = without_error(chosen);
    return chunked && never_both(*chunked) ? *chunked : planned({});  // throws the error of the plan without chunks
  }

  // Returns the candidates that delay compute, each with its delay, longest first; at most kMostUsesTried.
  std::vector<std::pair<int64_t, Candidate>> by_wait(const StepSchedule& s) const {
    const StepLanes lanes = predict(s);
    std::vector<std::pair<int64_t, Candidate>> waits;
    for (const Candidate& candidate : possible_) {
      const int64_t wait_ps =
          candidate.is_reduction ? wait_after(s, lanes, candidate) : wait_before(s, lanes, candidate);
      if (wait_ps > 0) waits.emplace_back(wait_ps, candidate);
    }
    std::stable_sort(waits.begin(), waits.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    if (waits.size() > kMostUsesTried) waits.resize(kMostUsesTried);
    return waits;
  }

  // Returns the time that compute waits for a candidate's gather, without delays by earlier transfers. Returns 0 if the
  // schedule does not have the gather.
  int64_t wait_before(const StepSchedule& s, const StepLanes& lanes, const Candidate& candidate) const {
    const auto is_its = [&](const Gather& g) {
      return g.needed == candidate.use && g.weight == forms_[candidate.form].weight;
    };
    if (std::none_of(s.gathers.begin(), s.gathers.end(), is_its)) return 0;
    const int64_t before_ps = candidate.use == 0 ? 0 : lanes.uses[candidate.use - 1].end_ps;
    return std::min(lanes.uses[candidate.use].begin_ps - before_ps, weights_[forms_[candidate.form].weight].gather_ps);
  }

  // Returns the time that compute waits for a candidate's reduction, without delays by earlier transfers.
  int64_t wait_after(const StepSchedule& s, const StepLanes& lanes, const Candidate& candidate) const {
    for (size_t r = 0; r < s.reductions.size(); ++r) {
      if (s.reductions[r].start != candidate.last || s.reductions[r].weight != forms_[candidate.form].weight) continue;
      const int64_t wait_ps = lanes.reductions[r].end_ps - lanes.uses[s.reductions[r].finish].end_ps;
      return std::min(wait_ps, weights_[s.reductions[r].weight].reduce_ps);
    }
    return 0;
  }

  // Returns true if no weight is resident both with and without chunks at the same use.
  bool never_both(const StepSchedule& s) const {
    for (const WeightBuffer& form : s.buffers) {
      const int weight = s.weights[form.weight].form_of;
      if (weight < 0) continue;
      const auto overlaps = [&](const WeightBuffer& b) {
        return b.weight == weight && b.first <= form.last && form.first <= b.last;
      };
      if (std::any_of(s.buffers.begin(), s.buffers.end(), overlaps)) return false;
    }
    return true;
  }

  const std::vector<Weight>& weights_;
  const std::vector<Use>& uses_;
  const std::vector<ChunkedForm>& forms_;
  const ChunkingOptions& options_;
  std::vector<Candidate> possible_;
};

}  // namespace

StepSchedule schedule_with_chunks(const std::vector<Weight>& weights, const std::vector<Use>& uses,
                                  const std::vector<ChunkedForm>& forms, const ChunkingOptions& options) {
  return Chunking(weights, uses, forms, options).run();
}

}  // namespace shardwright
