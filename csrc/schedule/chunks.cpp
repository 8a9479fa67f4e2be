#include "schedule/chunks.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "schedule/lanes.h"
#include "support/error.h"

namespace shardwright {
namespace {

// A form, by index, in a use.
struct Place {
  int form = 0;
  int use = 0;
  auto operator<=>(const Place&) const = default;
};

class Chunking {
 public:
  Chunking(const std::vector<Weight>& weights, const std::vector<Use>& uses, const std::vector<ChunkedForm>& forms,
           const ChunkingOptions& options)
      : weights_(weights), uses_(uses), forms_(forms), options_(options) {
    for (int f = 0; f < static_cast<int>(forms_.size()); ++f) {
      const ChunkedForm& form = forms_[f];
      check_user(0 <= form.weight && form.weight < static_cast<int>(weights_.size()) && form.num_chunks >= 1 &&
                     form.chunk_bytes >= 0 && form.transfer_ps >= 0,
                 "forms: number ", f, " is of weight ", form.weight, ", in ", form.num_chunks, " chunks of ",
                 form.chunk_bytes, " bytes that take ", form.transfer_ps, " ps; allowed are weights 0 to ",
                 static_cast<int64_t>(weights_.size()) - 1, ", 1 or more chunks, and bytes and times from 0 on");
      for (int i = 0; i < static_cast<int>(uses_.size()); ++i) {
        if (uses_[i].pass == Pass::kForward && needs(i, form.weight) && !needs(i - 1, form.weight) &&
            !needs(i + 1, form.weight)) {
          possible_.push_back({f, i});
        }
      }
    }
  }

  StepSchedule run() const {
    const std::optional<StepSchedule> whole = without_error({});
    std::set<Place> chosen;
    StepSchedule best = whole ? *whole : smallest(chosen);
    if (!has_times(best)) return best;
    for (const auto& [wait_ps, place] : by_wait(best)) {
      if (chosen.contains(place)) continue;
      std::set<Place> with = chosen;
      with.insert(place);
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
  bool needs(int use, int weight) const {
    return 0 <= use && use < static_cast<int>(uses_.size()) &&
           std::count(uses_[use].weights.begin(), uses_[use].weights.end(), weight) > 0;
  }

  StepSchedule planned(const std::set<Place>& chosen) const {
    std::vector<Weight> weights = weights_;
    std::vector<Use> uses = uses_;
    ScheduleOptions options = options_.schedule;
    int64_t chunk_bytes = 0;
    for (int f = 0; f < static_cast<int>(forms_.size()); ++f) {
      const ChunkedForm& form = forms_[f];
      const auto number = static_cast<int>(weights.size());
      bool is_used = false;
      for (const Place& place : chosen) {
        if (place.form != f) continue;
        is_used = true;
        std::vector<int>& used = uses[place.use].weights;
        std::replace(used.begin(), used.end(), form.weight, number);
      }
      if (!is_used) continue;
      weights.push_back({weights_[form.weight].name + " in chunks", 0, form.use_bytes, 0, 0, form.gather_ps, 0,
                         form.weight, form.transfer_ps, form.transfer_ps / form.num_chunks});
      chunk_bytes = std::max(chunk_bytes, form.chunk_bytes);
    }
    options.held_bytes += chunk_bytes;
    if (options.budget_bytes && options_.may_add_chunks) *options.budget_bytes += chunk_bytes;
    return options_.chooses_prefetch ? fastest_schedule(weights, uses, options)
                                     : make_schedule(std::move(weights), std::move(uses), options);
  }

  std::optional<StepSchedule> without_error(const std::set<Place>& chosen) const {
    try {
      return planned(chosen);
    } catch (const UserError&) {
      if (chosen.empty() && possible_.empty()) throw;
      return std::nullopt;
    }
  }

  StepSchedule smallest(std::set<Place>& chosen) const {
    chosen.insert(possible_.begin(), possible_.end());
    const std::optional<StepSchedule> found = without_error(chosen);
    return found && never_both(*found) ? *found : planned({});  // whose error is the one to show
  }

  // What may be in chunks, whole there now and waited for by compute, with the wait: the longest first.
  std::vector<std::pair<int64_t, Place>> by_wait(const StepSchedule& s) const {
    const StepLanes lanes = predict(s);
    std::vector<std::pair<int64_t, Place>> found;
    for (const Place& place : possible_) {
      const int64_t before_ps = place.use == 0 ? 0 : lanes.uses[place.use - 1].end_ps;
      const int64_t wait_ps = lanes.uses[place.use].begin_ps - before_ps;
      const auto is_its = [&](const Gather& g) {
        return g.needed == place.use && g.weight == forms_[place.form].weight;
      };
      if (wait_ps > 0 && std::any_of(s.gathers.begin(), s.gathers.end(), is_its)) found.emplace_back(wait_ps, place);
    }
    std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    if (found.size() > kMostUsesTried) found.resize(kMostUsesTried);
    return found;
  }

  bool never_both(const StepSchedule& s) const {
    for (const WeightBuffer& form : s.buffers) {
      const int whole = s.weights[form.weight].form_of;
      if (whole < 0) continue;
      const auto overlaps = [&](const WeightBuffer& b) {
        return b.weight == whole && b.first <= form.last && form.first <= b.last;
      };
      if (std::any_of(s.buffers.begin(), s.buffers.end(), overlaps)) return false;
    }
    return true;
  }

  const std::vector<Weight>& weights_;
  const std::vector<Use>& uses_;
  const std::vector<ChunkedForm>& forms_;
  const ChunkingOptions& options_;
  std::vector<Place> possible_;
};

}  // namespace

StepSchedule schedule_with_chunks(const std::vector<Weight>& weights, const std::vector<Use>& uses,
                                  const std::vector<ChunkedForm>& forms, const ChunkingOptions& options) {
  return Chunking(weights, uses, forms, options).run();
}

}  // namespace shardwright
