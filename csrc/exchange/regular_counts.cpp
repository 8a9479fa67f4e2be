#include "exchange/regular_counts.h"

#include <algorithm>

namespace shardwright {

std::optional<RegularCounts> RegularCounts::of(const Layout& before, const Layout& after, int64_t rounds) {
  RegularCounts counts(before, after, rounds);
  return counts.kept_.matchings().empty() ? std::nullopt : std::optional(std::move(counts));
}

RegularCounts::RegularCounts(const Layout& before, const Layout& after, int64_t rounds)
    : mesh_(before.mesh()),
      item_bytes_(before.dtype().size_bytes()),
      rounds_(rounds),
      kept_(before, after),
      needed_elements_(after.largest_part_elements()),
      sent_elements_(needed_elements_) {
  for (const Matching& matching : kept_.matchings()) {
    message_elements_ *= matching.elements_per_overlap();
    sources_ *= matching.sources();
    for (const Matching::Common& digit : matching.digits()) {
      if (digit.is_tie()) ties_.push_back(digit);
      if (digit.before.mesh_dim < 0 || digit.after.mesh_dim < 0) continue;
      if (before.cut_dims().contains(digit.after.mesh_dim)) continue;
      sent_elements_ *= digit.radix;  // only one in `radix` ranks sends
      replica_ties_.push_back(digit);
    }
  }
}

Traffic RegularCounts::traffic(int64_t position) const {
  const bool sends = std::all_of(replica_ties_.begin(), replica_ties_.end(),
                                 [&](const Matching::Common& tie) { return tie.agrees_at(mesh_, position); });
  return traffic_with(kept_.at(position), sends);
}

// A rank needs the same number of elements from each source. Each takes one message per round, but at most one per
// element.
Traffic RegularCounts::traffic_with(int64_t own, bool sends) const {
  if (message_elements_ == 0) return {};  // the tensor is empty
  const int64_t messages_each = std::min(rounds_, message_elements_);
  const int64_t itself = own > 0 ? 1 : 0;  // a rank is one of its sources if it keeps elements
  Traffic traffic{(needed_elements_ - own) * item_bytes_, 0, (sources_ - itself) * messages_each, 0};
  if (sends) {
    traffic.sent_bytes = (sent_elements_ - own) * item_bytes_;
    traffic.sent_messages = (sent_elements_ / message_elements_ - itself) * messages_each;
  }
  return traffic;
}

Traffic RegularCounts::upper_bound() const {
  const bool some_keep_nothing = !kept_.varying_dims().empty();
  return traffic_with(some_keep_nothing ? 0 : kept_.at(0), true);
}

std::vector<int64_t> RegularCounts::tie_values_before(int64_t position) const {
  std::vector<int64_t> values;
  for (const Matching::Common& tie : ties_) values.push_back(tie.before.value_at(mesh_, position, tie.radix));
  return values;
}

std::vector<int64_t> RegularCounts::tie_values_after(int64_t position) const {
  std::vector<int64_t> values;
  for (const Matching::Common& tie : ties_) values.push_back(tie.after.value_at(mesh_, position, tie.radix));
  return values;
}

bool RegularCounts::ties_agree(int64_t from, int64_t to) const {
  return std::all_of(ties_.begin(), ties_.end(), [&](const Matching::Common& tie) {
    return tie.before.value_at(mesh_, from, tie.radix) == tie.after.value_at(mesh_, to, tie.radix);
  });
}

}  // namespace shardwright
