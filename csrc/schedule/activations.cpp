#include "schedule/activations.h"

#include <algorithm>

#include "support/error.h"

namespace shardwright {

std::vector<ActivationGather> plan_activations(const std::vector<Use>& uses, const std::vector<Activation>& activations,
                                               int64_t ahead) {
  std::vector<ActivationGather> gathers;
  for (int k = 0; k < static_cast<int>(activations.size()); ++k) {
    const Activation& a = activations[k];
    int begin = a.first;  // first use of the backward that needs the activation, but after the use that saves it
    while (begin - 1 > a.saved && uses[begin - 1].pass != Pass::kForward) --begin;
    // The gather starts in the turn of activation `trigger` if that is in the same backward, else before the backward.
    const int trigger = k - static_cast<int>(ahead);
    const bool is_in_backward = trigger >= 0 && activations[trigger].first >= begin;
    gathers.push_back(is_in_backward ? ActivationGather{activations[trigger].first, trigger}
                                     : ActivationGather{begin, -1});
  }
  return gathers;
}

std::vector<int64_t> activation_bytes(size_t num_uses, const std::vector<Activation>& activations,
                                      const std::vector<ActivationGather>& gathers) {
  std::vector<int64_t> most(num_uses, 0);
  int current = -1;  // the activation whose turn it is
  for (int use = 0; use < static_cast<int>(num_uses); ++use) {
    // Counts at the beginning of the use and at the beginning of each turn within it.
    while (true) {
      int64_t bytes = 0;
      for (size_t k = 0; k < activations.size(); ++k) {
        const bool has_started = gathers[k].start <= use && gathers[k].trigger <= current;
        if (has_started && use <= activations[k].last && current <= activations[k].until) bytes += activations[k].bytes;
      }
      most[use] = std::max(most[use], bytes);
      if (current + 1 == static_cast<int>(activations.size()) || activations[current + 1].first > use) break;
      ++current;
    }
  }
  return most;
}

void check_activations(const std::vector<Activation>& activations, size_t num_uses) {
  const auto count = static_cast<int>(activations.size());
  for (int k = 0; k < count; ++k) {
    const Activation& a = activations[k];
    check_user(a.kept_bytes >= 0 && a.bytes >= 0 && a.gather_ps >= 0, "bytes and times of activations[", k,
               "] must be at least 0, got kept_bytes=", a.kept_bytes, ", bytes=", a.bytes, ", gather_ps=", a.gather_ps);
    const int before = k == 0 ? 0 : activations[k - 1].first;
    check_user(0 <= a.saved && a.saved <= a.first && a.first <= a.last && a.last < static_cast<int>(num_uses),
               "uses of activations[", k, "] must satisfy 0 <= saved <= first <= last < ", num_uses,
               ", got saved=", a.saved, ", first=", a.first, ", last=", a.last);
    check_user(before <= a.first, "activations[", k, "].first must be at least ", before, " (activations[", k - 1,
               "].first), got ", a.first);
    check_user(k <= a.until && a.until < count, "activations[", k, "].until must be ", InRange{k, count - 1}, ", got ",
               a.until);
  }
}

}  // namespace shardwright
