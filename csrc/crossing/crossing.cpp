#include "crossing/crossing.h"

#include <algorithm>
#include <utility>

#include "crossing/node_sharing.h"
#include "support/error.h"

namespace shardwright {
namespace {

using Met = SlotMeetings::Met;

int64_t elements_of(const std::vector<Met>& met) { return met.empty() ? 0 : met.back().before + met.back().elements; }

bool by_peer(const Crossing::Parcel& a, const Crossing::Parcel& b) { return a.peer < b.peer; }

}  // namespace

Crossing::Crossing(const Layout& src, const Layout& dst, Sharing sharing, int64_t ranks_per_node)
    : Crossing(Grid(src), Grid(dst), src.dtype().size_bytes(), sharing, 0, ranks_per_node) {
  check_invariant(src.shape() == dst.shape() && src.dtype() == dst.dtype(), "a crossing from ", src.to_string(), " to ",
                  dst.to_string());
}

Crossing::Crossing(Grid src, Grid dst, int64_t item_bytes, Sharing sharing, int64_t first_turn, int64_t ranks_per_node)
    : sharing_(sharing),
      item_bytes_(item_bytes),
      src_(std::move(src)),
      dst_(std::move(dst)),
      ranks_(src_.ranks()),
      first_turn_(first_turn % src_.replicas()),
      ranks_per_node_(ranks_per_node) {
  check_invariant(src_.ndim() == dst_.ndim(), "a crossing from ", src_.ndim(), " to ", dst_.ndim(), " dims");
  check_invariant(sharing != Sharing::kNone, "a crossing without sharing");
  for (int t = 0; t < src_.ndim(); ++t) meetings_.emplace_back(src_.lists(t), dst_.lists(t));

  const std::vector<Rank> others = dst_.ranks();
  ranks_.insert(ranks_.end(), others.begin(), others.end());
  std::sort(ranks_.begin(), ranks_.end());
  ranks_.erase(std::unique(ranks_.begin(), ranks_.end()), ranks_.end());

  find_absent();
  for (int64_t part = 0; part < src_.parts(); ++part) {
    const int64_t elements = length(line_of(src_.slots_of(part)));
    stretch_ = std::max(stretch_, (elements + src_.replicas() - 1) / src_.replicas());
  }
  least_stretch_ = stretch_;
  for (int64_t part = 0; part < src_.parts(); ++part) {
    const Line line = line_of(src_.slots_of(part));
    if (length(line) > 0 && !line.absent.empty()) least_stretch_ = std::min(least_stretch_, line.stretch);
  }
  if (sharing == Sharing::kNodes) share_among_nodes();
}

void Crossing::share_among_nodes() {
  check_invariant(ranks_per_node_ > 0, "a crossing that prefers nodes of ", ranks_per_node_, " ranks");
  for (int64_t part = 0; part < src_.parts(); ++part) {
    const Line line = line_of(src_.slots_of(part));
    std::vector<Rank> holders;
    for (int64_t turn = 0; turn < src_.replicas(); ++turn) holders.push_back(holder(line, turn));
    std::vector<Need> needs;
    for (int64_t number = 0; number < num_places(line); ++number) {
      const int64_t elements = place(line, number).elements;
      if (elements > 0) needs.push_back({needer(line, number), elements});
    }
    for (const auto& [from, to, range] : share_by_nodes(holders, needs, ranks_per_node_, kMostInside * stretch_)) {
      sends_[from].push_back({to, range});
      receives_[to].push_back({from, range});
    }
  }
  for (auto* all : {&sends_, &receives_}) {
    for (auto& [rank, parcels] : *all) std::sort(parcels.begin(), parcels.end(), by_peer);
  }
}

int64_t Crossing::num_meetings() const {
  int64_t meetings = dst_.replicas();
  for (int t = 0; t < src_.ndim(); ++t) {
    int64_t of_dim = 0;
    const auto slots = static_cast<int64_t>(src_.lists(t).size());
    for (int64_t slot = 0; slot < slots; ++slot) of_dim += static_cast<int64_t>(meetings_[t].of_src(slot).size());
    meetings = saturating_product(meetings, of_dim);
  }
  return meetings;
}

Crossing::Inside Crossing::inside(Rank rank) const {
  Inside inside;
  for (const Parcel& parcel : sends(rank)) {
    if (number(parcel.peer) / ranks_per_node_ != number(rank) / ranks_per_node_) continue;
    inside.sent_bytes += (parcel.range.end - parcel.range.begin) * item_bytes_;
  }
  for (const Parcel& parcel : receives(rank)) {
    if (number(parcel.peer) / ranks_per_node_ != number(rank) / ranks_per_node_) continue;
    inside.received_bytes += (parcel.range.end - parcel.range.begin) * item_bytes_;
  }
  return inside;
}

Rank Crossing::holder(const Line& line, int64_t turn) const {
  return src_.rank_at(line.slots, (turn + first_turn_) % src_.replicas());
}

int64_t Crossing::turn_of(const Grid::Seat& seat) const {
  return (seat.replica + src_.replicas() - first_turn_) % src_.replicas();
}

void Crossing::find_absent() {
  absent_.resize(src_.parts());
  for (const Rank rank : ranks_) {
    const std::optional<Grid::Seat> holds = src_.seat_of(rank);
    const std::optional<Grid::Seat> needs = dst_.seat_of(rank);
    if (!holds || !needs) continue;
    Absent absent{0, 1, 0};
    int64_t places = 1;
    for (int t = 0; t < src_.ndim() && absent.elements > 0; ++t) {
      const Met* met = meetings_[t].between(holds->slots[t], needs->slots[t]);
      const int64_t choices = static_cast<int64_t>(meetings_[t].of_src(holds->slots[t]).size());
      places *= choices;
      absent.place *= choices;
      if (met != nullptr) absent.place += meetings_[t].of_dst(needs->slots[t])[met->index].index;
      absent.elements *= met != nullptr ? met->elements : 0;
    }
    if (absent.elements == 0) continue;
    absent.place += needs->replica * places;
    absent_[src_.index_of(holds->slots)].push_back(absent);
  }
  for (std::vector<Absent>& all : absent_) {
    std::sort(all.begin(), all.end(), [](const Absent& a, const Absent& b) { return a.place < b.place; });
    for (size_t i = 1; i < all.size(); ++i) all[i].before = all[i - 1].before + all[i - 1].elements;
  }
}

Crossing::Line Crossing::line_of(std::vector<int64_t> slots) const {
  Line line;
  for (int t = 0; t < src_.ndim(); ++t) {
    const std::vector<Met>& met = meetings_[t].of_src(slots[t]);
    line.places *= static_cast<int64_t>(met.size());
    line.elements *= elements_of(met);
  }
  line.absent = absent_[src_.index_of(slots)];
  line.slots = std::move(slots);
  const int64_t of_each = (length(line) + dst_.replicas() - 1) / dst_.replicas();
  const int64_t replicas_each = (dst_.replicas() + src_.replicas() - 1) / src_.replicas();
  line.stretch = std::clamp<int64_t>(of_each * replicas_each, 1, stretch_);
  return line;
}

int64_t Crossing::length(const Line& line) const {
  const int64_t absent = line.absent.empty() ? 0 : line.absent.back().before + line.absent.back().elements;
  return line.elements * dst_.replicas() - absent;
}

// Within a replica, places are numbered by their meeting on each tensor dim, the last dim fastest. So the elements
// before a place are the sum, over tensor dims, of its own elements on the dims before, times the elements of the
// meetings before its own on this dim, times all elements on the dims after.
Crossing::Place Crossing::place(const Line& line, int64_t number) const {
  if (number == num_places(line)) return {length(line), 0};
  Place found{0, 1};
  int64_t rest = number % line.places;
  int64_t all_after = 1;
  for (int t = src_.ndim() - 1; t >= 0; --t) {
    const std::vector<Met>& met = meetings_[t].of_src(line.slots[t]);
    const auto choices = static_cast<int64_t>(met.size());
    const Met& own = met[rest % choices];
    rest /= choices;
    found.begin = own.before * all_after + own.elements * found.begin;
    found.elements *= own.elements;
    all_after *= elements_of(met);
  }
  found.begin += number / line.places * line.elements;
  const auto absent = std::partition_point(line.absent.begin(), line.absent.end(),
                                           [&](const Absent& one) { return one.place < number; });
  if (absent != line.absent.begin()) found.begin -= (absent - 1)->before + (absent - 1)->elements;
  if (absent != line.absent.end() && absent->place == number) found.elements = 0;
  return found;
}

int64_t Crossing::first_served(const Line& line, int64_t turn) const {
  const int64_t begin = line.stretch * turn;
  int64_t low = 0;
  int64_t high = num_places(line);
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    const Place at = place(line, middle);
    const bool is_before =
        sharing_ == Sharing::kBytes ? at.begin + at.elements <= begin : 2 * at.begin + at.elements < 2 * begin;
    (is_before ? low : high) = is_before ? middle + 1 : middle;
  }
  return low;
}

// If parcels are split, the place that the next holder serves first may be served by this one too.
int64_t Crossing::end_served(const Line& line, int64_t turn) const {
  const int64_t next = first_served(line, turn + 1);
  const bool is_shared =
      sharing_ == Sharing::kBytes && next < num_places(line) && place(line, next).begin < line.stretch * (turn + 1);
  return next + (is_shared ? 1 : 0);
}

int64_t Crossing::num_present(const Line& line, int64_t first, int64_t end) {
  const auto before = [&](int64_t number) {
    return std::partition_point(line.absent.begin(), line.absent.end(),
                                [&](const Absent& one) { return one.place < number; });
  };
  return end - first - (before(end) - before(first));
}

Interval Crossing::served(const Line& line, const Place& place, int64_t turn) const {
  if (sharing_ == Sharing::kMessages) {
    return {0, (2 * place.begin + place.elements) / (2 * line.stretch) == turn ? place.elements : 0};
  }
  const int64_t begin = std::max(line.stretch * turn, place.begin);
  const int64_t end = std::min(line.stretch * (turn + 1), place.begin + place.elements);
  return begin < end ? Interval{begin - place.begin, end - place.begin} : Interval{0, 0};
}

Rank Crossing::needer(const Line& line, int64_t number) const {
  std::vector<int64_t> slots(line.slots.size());
  int64_t rest = number % line.places;
  for (size_t t = slots.size(); t-- > 0;) {
    const std::vector<Met>& met = meetings_[t].of_src(line.slots[t]);
    const auto choices = static_cast<int64_t>(met.size());
    slots[t] = met[rest % choices].slot;
    rest /= choices;
  }
  return dst_.rank_at(slots, number / line.places);
}

std::vector<Crossing::Parcel> Crossing::sends(Rank rank) const {
  if (sharing_ == Sharing::kNodes) {
    const auto found = sends_.find(rank);
    return found == sends_.end() ? std::vector<Parcel>{} : found->second;
  }
  std::vector<Parcel> parcels;
  const std::optional<Grid::Seat> holds = src_.seat_of(rank);
  if (!holds) return parcels;
  const Line line = line_of(holds->slots);
  const int64_t turn = turn_of(*holds);
  const int64_t end = end_served(line, turn);
  for (int64_t number = first_served(line, turn); number < end; ++number) {
    const Interval range = served(line, place(line, number), turn);
    if (range.begin < range.end) parcels.push_back({needer(line, number), range});
  }
  std::sort(parcels.begin(), parcels.end(), by_peer);
  return parcels;
}

template <typename Visit>
void Crossing::for_each_received(Rank rank, const Visit& visit) const {
  if (sharing_ == Sharing::kNodes) {
    const auto found = receives_.find(rank);
    if (found == receives_.end()) return;
    for (const Parcel& parcel : found->second) visit(parcel.peer, parcel.range);
    return;
  }
  const std::optional<Grid::Seat> needs = dst_.seat_of(rank);
  if (!needs) return;
  const std::optional<Grid::Seat> holds = src_.seat_of(rank);
  int64_t parts = 1;
  for (int t = 0; t < dst_.ndim(); ++t) parts *= static_cast<int64_t>(meetings_[t].of_dst(needs->slots[t]).size());
  for (int64_t part = 0; part < parts; ++part) {
    std::vector<int64_t> slots(src_.ndim());
    int64_t rest = part;
    int64_t number = 0;
    int64_t places_after = 1;
    for (int t = src_.ndim() - 1; t >= 0; --t) {
      const std::vector<Met>& met = meetings_[t].of_dst(needs->slots[t]);
      const auto choices = static_cast<int64_t>(met.size());
      const Met& one = met[rest % choices];
      rest /= choices;
      slots[t] = one.slot;
      number += one.index * places_after;
      places_after *= static_cast<int64_t>(meetings_[t].of_src(one.slot).size());
    }
    if (holds && holds->slots == slots) continue;
    const Line line = line_of(std::move(slots));
    const Place at = place(line, needs->replica * line.places + number);
    const bool in_whole = sharing_ == Sharing::kMessages;
    const int64_t first = in_whole ? (2 * at.begin + at.elements) / (2 * line.stretch) : at.begin / line.stretch;
    const int64_t last = in_whole ? first : (at.begin + at.elements - 1) / line.stretch;
    for (int64_t turn = first; turn <= last; ++turn) visit(holder(line, turn), served(line, at, turn));
  }
}

std::vector<Crossing::Parcel> Crossing::receives(Rank rank) const {
  std::vector<Parcel> parcels;
  for_each_received(rank, [&](Rank from, Interval range) { parcels.push_back({from, range}); });
  std::sort(parcels.begin(), parcels.end(), by_peer);
  return parcels;
}

int64_t Crossing::received_elements(Rank rank) const {
  const std::optional<Grid::Seat> needs = dst_.seat_of(rank);
  if (!needs) return 0;
  const std::optional<Grid::Seat> holds = src_.seat_of(rank);
  int64_t needed = 1;
  int64_t kept = holds ? 1 : 0;
  for (int t = 0; t < dst_.ndim(); ++t) {
    needed *= elements_of(meetings_[t].of_dst(needs->slots[t]));
    const Met* met = holds ? meetings_[t].between(holds->slots[t], needs->slots[t]) : nullptr;
    kept *= met != nullptr ? met->elements : 0;
  }
  return needed - kept;
}

bool Crossing::communicates() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [&](Rank rank) { return received_elements(rank) > 0; });
}

int64_t Crossing::sent_elements(Rank rank) const { return sent(rank).elements; }

Crossing::Sent Crossing::sent(Rank rank) const {
  if (sharing_ == Sharing::kNodes) {
    Sent sent;
    for (const Parcel& parcel : sends(rank)) sent.elements += parcel.range.end - parcel.range.begin;
    sent.parcels = static_cast<int64_t>(sends(rank).size());
    return sent;
  }
  const std::optional<Grid::Seat> holds = src_.seat_of(rank);
  if (!holds) return {};
  const Line line = line_of(holds->slots);
  const int64_t turn = turn_of(*holds);
  const int64_t first = first_served(line, turn);
  const int64_t end = end_served(line, turn);
  const int64_t parcels = num_present(line, first, end);
  if (sharing_ == Sharing::kBytes) {
    return {std::clamp<int64_t>(length(line) - line.stretch * turn, 0, line.stretch), parcels};
  }
  return {place(line, end).begin - place(line, first).begin, parcels};
}

int64_t Crossing::parcels_received_at_most(Rank rank) const {
  if (sharing_ == Sharing::kNodes) return static_cast<int64_t>(receives(rank).size());
  const int64_t parts = parts_received(rank);
  if (sharing_ == Sharing::kMessages) return parts;
  // A place of e elements is served in at most 2 + (e - 2) / s stretches of s elements. Where s is less than
  // least_stretch_, nobody is absent, so s is no less than e, and a place is served in two at most, or in one if e = 1.
  const int64_t elements = received_elements(rank);
  const int64_t most = parts + (elements + (least_stretch_ - 2) * parts) / least_stretch_;
  return std::min({most, elements, parts * src_.replicas()});
}

int64_t Crossing::parcels_sent(Rank rank) const { return sent(rank).parcels; }

int64_t Crossing::parts_received(Rank rank) const {
  const std::optional<Grid::Seat> needs = dst_.seat_of(rank);
  if (!needs) return 0;
  const std::optional<Grid::Seat> holds = src_.seat_of(rank);
  int64_t parts = 1;
  bool holds_one = holds.has_value();
  for (int t = 0; t < dst_.ndim(); ++t) {
    parts *= static_cast<int64_t>(meetings_[t].of_dst(needs->slots[t]).size());
    holds_one = holds_one && meetings_[t].between(holds->slots[t], needs->slots[t]) != nullptr;
  }
  return parts - (holds_one ? 1 : 0);
}

Traffic Crossing::at(Rank rank, int64_t rounds) const {
  const Sent all_sent = sent(rank);
  Traffic traffic{received_elements(rank) * item_bytes_, all_sent.elements * item_bytes_, 0, all_sent.parcels};
  if (rounds == 1 && sharing_ == Sharing::kMessages) {
    traffic.messages = parts_received(rank);
    return traffic;
  }
  if (rounds > 1) {
    traffic.sent_messages = 0;
    for (const Parcel& parcel : sends(rank)) {
      traffic.sent_messages += std::min(rounds, parcel.range.end - parcel.range.begin);
    }
  }
  for_each_received(rank, [&](Rank, Interval range) { traffic.messages += std::min(rounds, range.end - range.begin); });
  return traffic;
}

int64_t Crossing::largest_result_bytes() const {
  int64_t bytes = item_bytes_;
  for (int t = 0; t < dst_.ndim(); ++t) {
    int64_t longest = 0;
    for (const IntervalList& list : dst_.lists(t)) longest = std::max(longest, shardwright::length(list));
    bytes *= longest;
  }
  return bytes;
}

Crossing::Totals Crossing::totals(int64_t rounds) const {
  Totals totals;
  for (const Rank rank : ranks_) {
    const Traffic one = at(rank, rounds);
    totals.worst.received_bytes = std::max(totals.worst.received_bytes, one.received_bytes);
    totals.worst.sent_bytes = std::max(totals.worst.sent_bytes, one.sent_bytes);
    totals.worst.messages = std::max(totals.worst.messages, one.messages);
    totals.worst.sent_messages = std::max(totals.worst.sent_messages, one.sent_messages);
    totals.received_bytes_sum += one.received_bytes;
    if (sharing_ != Sharing::kNodes) continue;
    const Inside within = inside(rank);
    if (!totals.worst.by_link) totals.worst.by_link.emplace();
    StepFigures::ByLink& most = *totals.worst.by_link;
    most.inside = std::max({most.inside, within.received_bytes, within.sent_bytes});
    most.between =
        std::max({most.between, one.received_bytes - within.received_bytes, one.sent_bytes - within.sent_bytes});
  }
  totals.worst.touched_bytes = largest_result_bytes();
  return totals;
}

StepFigures Crossing::worst_at_least() const {
  StepFigures worst;
  for (const Rank rank : ranks_) {
    worst.received_bytes = std::max(worst.received_bytes, received_elements(rank) * item_bytes_);
    worst.messages = std::max(worst.messages, parts_received(rank));
  }
  if (worst.messages > 0) worst.sent_bytes = stretch_ * item_bytes_;
  worst.touched_bytes = largest_result_bytes();
  return worst;
}

bool Crossing::crosses_nodes(int64_t ranks_per_node) const {
  if (ranks_per_node <= 0) return false;
  const auto node_of = [&](Rank rank) { return number(rank) / ranks_per_node; };
  if (node_of(ranks_.front()) == node_of(ranks_.back())) return false;
  for (const Rank rank : ranks_) {
    bool crosses = false;
    for_each_received(rank, [&](Rank from, Interval) { crosses = crosses || node_of(from) != node_of(rank); });
    if (crosses) return true;
  }
  return false;
}

}  // namespace shardwright
