#include "crossing/crossing.h"

#include <algorithm>
#include <utility>

#include "crossing/node_sharing.h"
#include "support/error.h"

namespace shardwright {
namespace {

using Met = SlotMeetings::Met;

int64_t elements_of(std::span<const Met> met) { return met.empty() ? 0 : met.back().before + met.back().elements; }

bool by_peer(const Crossing::Parcel& a, const Crossing::Parcel& b) { return a.peer < b.peer; }

}  // namespace

Crossing::Crossing(const Layout& src, const Layout& dst, Sharing sharing, int64_t ranks_per_node)
    : Crossing(Grid(src), Grid(dst), src.dtype().size_bytes(), sharing, 0, ranks_per_node) {
  check_invariant(src.shape() == dst.shape() && src.dtype() == dst.dtype(), "a crossing from ", src.to_string(), " to ",
                  dst.to_string());
}

Crossing::Crossing(Grid src, Grid dst, int64_t item_bytes, Sharing sharing, int64_t first_turn, int64_t ranks_per_node)
    : Crossing(std::make_shared<const Parties>(std::move(src), std::move(dst)), item_bytes, sharing, first_turn,
               ranks_per_node) {}

Crossing::Crossing(std::shared_ptr<const Parties> all, int64_t item_bytes, Sharing sharing, int64_t first_turn,
                   int64_t ranks_per_node)
    : all_(std::move(all)),
      item_bytes_(item_bytes),
      sharing_(sharing),
      first_turn_(first_turn % all_->src.replicas()),
      ranks_per_node_(ranks_per_node) {
  check_invariant(sharing != Sharing::kNone, "a crossing without sharing");
  if (sharing == Sharing::kNodes) share_among_nodes();
}

Crossing Crossing::shared_by(Sharing sharing, int64_t ranks_per_node) const {
  return Crossing(all_, item_bytes_, sharing, first_turn_, ranks_per_node);
}

Crossing::Parties::Parties(Grid from, Grid to) : src(std::move(from)), dst(std::move(to)), ranks(src.ranks()) {
  check_invariant(src.ndim() == dst.ndim(), "a crossing from ", src.ndim(), " to ", dst.ndim(), " dims");
  for (int t = 0; t < src.ndim(); ++t) meetings.emplace_back(src.lists(t), dst.lists(t));
  const std::vector<Rank> others = dst.ranks();
  ranks.insert(ranks.end(), others.begin(), others.end());
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  for (const Rank rank : ranks) ends.push_back({src.seat_of(rank), dst.seat_of(rank)});
  find_absent();
  find_lines();
}

void Crossing::Parties::find_absent() {
  absent.resize(src.parts());
  for (const auto& [holds, needs] : ends) {
    if (!holds || !needs) continue;
    Absent one{0, 1, 0};
    int64_t places = 1;
    for (int t = 0; t < src.ndim() && one.elements > 0; ++t) {
      const int64_t held = src.slots_of(holds->part)[t];
      const int64_t needed = dst.slots_of(needs->part)[t];
      const Met* met = meetings[t].between(held, needed);
      const auto choices = static_cast<int64_t>(meetings[t].of_src(held).size());
      places *= choices;
      one.place *= choices;
      if (met != nullptr) one.place += meetings[t].of_dst(needed)[met->index].index;
      one.elements *= met != nullptr ? met->elements : 0;
    }
    if (one.elements == 0) continue;
    one.place += needs->replica * places;
    absent[holds->part].push_back(one);
  }
  for (std::vector<Absent>& all : absent) {
    std::sort(all.begin(), all.end(), [](const Absent& a, const Absent& b) { return a.place < b.place; });
    for (size_t i = 1; i < all.size(); ++i) all[i].before = all[i - 1].before + all[i - 1].elements;
  }
}

void Crossing::Parties::find_lines() {
  lines.resize(src.parts());
  for (int64_t part = 0; part < src.parts(); ++part) {
    Line& line = lines[part];
    line.part = part;
    for (int t = 0; t < src.ndim(); ++t) {
      const std::span<const Met> met = meetings[t].of_src(src.slots_of(part)[t]);
      line.places *= static_cast<int64_t>(met.size());
      line.elements *= elements_of(met);
    }
    line.length = line.elements * dst.replicas();
    if (!absent[part].empty()) line.length -= absent[part].back().before + absent[part].back().elements;
    stretch = std::max(stretch, (line.length + src.replicas() - 1) / src.replicas());
  }
  least_stretch = stretch;
  for (Line& line : lines) {
    const int64_t of_each = (line.length + dst.replicas() - 1) / dst.replicas();
    const int64_t replicas_each = (dst.replicas() + src.replicas() - 1) / src.replicas();
    line.stretch = std::clamp<int64_t>(of_each * replicas_each, 1, stretch);
    if (line.length > 0 && !absent[line.part].empty()) least_stretch = std::min(least_stretch, line.stretch);
  }
}

void Crossing::share_among_nodes() {
  check_invariant(ranks_per_node_ > 0, "a crossing that prefers nodes of ", ranks_per_node_, " ranks");
  for (const Line& line : all_->lines) {
    std::vector<Rank> holders;
    for (int64_t turn = 0; turn < src().replicas(); ++turn) holders.push_back(holder(line, turn));
    std::vector<Need> needs;
    for (int64_t number = 0; number < num_places(line); ++number) {
      const int64_t elements = place(line, number).elements;
      if (elements > 0) needs.push_back({needer(line, number), elements});
    }
    for (const auto& [from, to, range] : share_by_nodes(holders, needs, ranks_per_node_, kMostInside * all_->stretch)) {
      sends_[from].push_back({to, range});
      receives_[to].push_back({from, range});
    }
  }
  for (auto* all : {&sends_, &receives_}) {
    for (auto& [rank, parcels] : *all) std::sort(parcels.begin(), parcels.end(), by_peer);
  }
}

const Crossing::Ends& Crossing::ends_of(Rank rank) const {
  static const Ends kNone;
  const auto found = std::lower_bound(all_->ranks.begin(), all_->ranks.end(), rank);
  return found != all_->ranks.end() && *found == rank ? all_->ends[found - all_->ranks.begin()] : kNone;
}

const std::vector<Crossing::Parcel>& Crossing::listed(const Parcels& parcels, Rank rank) {
  static const std::vector<Parcel> kNone;
  const auto found = parcels.find(rank);
  return found == parcels.end() ? kNone : found->second;
}

int64_t Crossing::num_meetings() const {
  int64_t meetings = dst().replicas();
  for (int t = 0; t < src().ndim(); ++t) {
    int64_t of_dim = 0;
    const auto slots = static_cast<int64_t>(src().lists(t).size());
    for (int64_t slot = 0; slot < slots; ++slot) of_dim += static_cast<int64_t>(all_->meetings[t].of_src(slot).size());
    meetings = saturating_product(meetings, of_dim);
  }
  return meetings;
}

Crossing::Inside Crossing::inside(Rank rank) const {
  Inside inside;
  for (const Parcel& parcel : listed(sends_, rank)) {
    if (number(parcel.peer) / ranks_per_node_ != number(rank) / ranks_per_node_) continue;
    inside.sent_bytes += (parcel.range.end - parcel.range.begin) * item_bytes_;
  }
  for (const Parcel& parcel : listed(receives_, rank)) {
    if (number(parcel.peer) / ranks_per_node_ != number(rank) / ranks_per_node_) continue;
    inside.received_bytes += (parcel.range.end - parcel.range.begin) * item_bytes_;
  }
  return inside;
}

Rank Crossing::holder(const Line& line, int64_t turn) const {
  return src().rank_at(src().slots_of(line.part), (turn + first_turn_) % src().replicas());
}

int64_t Crossing::turn_of(const Grid::Seat& seat) const {
  return (seat.replica + src().replicas() - first_turn_) % src().replicas();
}

// Within a replica, places are numbered by their meeting on each tensor dim, the last dim fastest. So the elements
// before a place are the sum, over tensor dims, of its own elements on the dims before, times the elements of the
// meetings before its own on this dim, times all elements on the dims after.
Crossing::Place Crossing::place(const Line& line, int64_t number) const {
  if (number == num_places(line)) return {line.length, 0};
  const std::span<const int64_t> slots = src().slots_of(line.part);
  Place found{0, 1};
  int64_t rest = number % line.places;
  int64_t all_after = 1;
  for (int t = src().ndim() - 1; t >= 0; --t) {
    const std::span<const Met> met = all_->meetings[t].of_src(slots[t]);
    const auto choices = static_cast<int64_t>(met.size());
    const Met& own = met[rest % choices];
    rest /= choices;
    found.begin = own.before * all_after + own.elements * found.begin;
    found.elements *= own.elements;
    all_after *= elements_of(met);
  }
  found.begin += number / line.places * line.elements;
  const std::vector<Absent>& all = all_->absent[line.part];
  const auto absent =
      std::partition_point(all.begin(), all.end(), [&](const Absent& one) { return one.place < number; });
  if (absent != all.begin()) found.begin -= (absent - 1)->before + (absent - 1)->elements;
  if (absent != all.end() && absent->place == number) found.elements = 0;
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

int64_t Crossing::num_present(const Line& line, int64_t first, int64_t end) const {
  const std::vector<Absent>& all = all_->absent[line.part];
  const auto before = [&](int64_t number) {
    return std::partition_point(all.begin(), all.end(), [&](const Absent& one) { return one.place < number; });
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
  const std::span<const int64_t> from = src().slots_of(line.part);
  std::vector<int64_t> slots(from.size());
  int64_t rest = number % line.places;
  for (size_t t = slots.size(); t-- > 0;) {
    const std::span<const Met> met = all_->meetings[t].of_src(from[t]);
    const auto choices = static_cast<int64_t>(met.size());
    slots[t] = met[rest % choices].slot;
    rest /= choices;
  }
  return dst().rank_at(slots, number / line.places);
}

std::vector<Crossing::Parcel> Crossing::sends(Rank rank) const {
  if (sharing_ == Sharing::kNodes) return listed(sends_, rank);
  std::vector<Parcel> parcels;
  const std::optional<Grid::Seat>& holds = ends_of(rank).holds;
  if (!holds) return parcels;
  const Line& line = all_->lines[holds->part];
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
void Crossing::for_each_received(Rank rank, const Ends& ends, const Visit& visit) const {
  if (sharing_ == Sharing::kNodes) {
    for (const Parcel& parcel : listed(receives_, rank)) visit(parcel.peer, parcel.range);
    return;
  }
  const auto& [holds, needs] = ends;
  if (!needs) return;
  const std::span<const int64_t> needed = dst().slots_of(needs->part);
  int64_t meetings = 1;
  for (int t = 0; t < dst().ndim(); ++t) {
    meetings *= static_cast<int64_t>(all_->meetings[t].of_dst(needed[t]).size());
  }
  for (int64_t meeting = 0; meeting < meetings; ++meeting) {
    int64_t rest = meeting;
    int64_t part = 0;
    int64_t parts_after = 1;
    int64_t number = 0;
    int64_t places_after = 1;
    for (int t = src().ndim() - 1; t >= 0; --t) {
      const std::span<const Met> met = all_->meetings[t].of_dst(needed[t]);
      const auto choices = static_cast<int64_t>(met.size());
      const Met& one = met[rest % choices];
      rest /= choices;
      part += one.slot * parts_after;
      parts_after *= static_cast<int64_t>(src().lists(t).size());
      number += one.index * places_after;
      places_after *= static_cast<int64_t>(all_->meetings[t].of_src(one.slot).size());
    }
    if (holds && holds->part == part) continue;
    const Line& line = all_->lines[part];
    const Place at = place(line, needs->replica * line.places + number);
    const bool in_whole = sharing_ == Sharing::kMessages;
    const int64_t first = in_whole ? (2 * at.begin + at.elements) / (2 * line.stretch) : at.begin / line.stretch;
    const int64_t last = in_whole ? first : (at.begin + at.elements - 1) / line.stretch;
    for (int64_t turn = first; turn <= last; ++turn) visit(holder(line, turn), served(line, at, turn));
  }
}

std::vector<Crossing::Parcel> Crossing::receives(Rank rank) const {
  std::vector<Parcel> parcels;
  for_each_received(rank, ends_of(rank), [&](Rank from, Interval range) { parcels.push_back({from, range}); });
  std::sort(parcels.begin(), parcels.end(), by_peer);
  return parcels;
}

int64_t Crossing::received_elements(Rank rank) const { return received_elements(ends_of(rank)); }

int64_t Crossing::received_elements(const Ends& ends) const {
  const auto& [holds, needs] = ends;
  if (!needs) return 0;
  int64_t needed = 1;
  int64_t kept = holds ? 1 : 0;
  for (int t = 0; t < dst().ndim(); ++t) {
    const int64_t slot = dst().slots_of(needs->part)[t];
    needed *= elements_of(all_->meetings[t].of_dst(slot));
    const Met* met = kept > 0 ? all_->meetings[t].between(src().slots_of(holds->part)[t], slot) : nullptr;
    kept *= met != nullptr ? met->elements : 0;
  }
  return needed - kept;
}

bool Crossing::communicates() const {
  return std::any_of(all_->lines.begin(), all_->lines.end(), [](const Line& line) { return line.length > 0; });
}

int64_t Crossing::sent_elements(Rank rank) const { return sent(rank, ends_of(rank)).elements; }

Crossing::Sent Crossing::sent(Rank rank, const Ends& ends) const {
  if (sharing_ == Sharing::kNodes) {
    const std::vector<Parcel>& parcels = listed(sends_, rank);
    Sent sent{0, static_cast<int64_t>(parcels.size())};
    for (const Parcel& parcel : parcels) sent.elements += parcel.range.end - parcel.range.begin;
    return sent;
  }
  if (!ends.holds) return {};
  const Line& line = all_->lines[ends.holds->part];
  const int64_t turn = turn_of(*ends.holds);
  const int64_t first = first_served(line, turn);
  const int64_t end = end_served(line, turn);
  const int64_t parcels = num_present(line, first, end);
  if (sharing_ == Sharing::kBytes) {
    return {std::clamp<int64_t>(line.length - line.stretch * turn, 0, line.stretch), parcels};
  }
  return {place(line, end).begin - place(line, first).begin, parcels};
}

int64_t Crossing::parcels_received_at_most(Rank rank) const {
  if (sharing_ == Sharing::kNodes) return static_cast<int64_t>(listed(receives_, rank).size());
  const Ends& ends = ends_of(rank);
  const int64_t parts = parts_received(ends);
  if (sharing_ == Sharing::kMessages) return parts;
  // A place of e elements is served in at most 2 + (e - 2) / s stretches of s elements. Where s is less than
  // least_stretch, nobody is absent, so s is no less than e, and a place is served in two at most, or in one if e = 1.
  const int64_t elements = received_elements(ends);
  const int64_t least = all_->least_stretch;
  const int64_t most = parts + (elements + (least - 2) * parts) / least;
  return std::min({most, elements, parts * src().replicas()});
}

int64_t Crossing::parcels_sent(Rank rank) const { return sent(rank, ends_of(rank)).parcels; }

int64_t Crossing::parts_received(const Ends& ends) const {
  const auto& [holds, needs] = ends;
  if (!needs) return 0;
  int64_t parts = 1;
  bool holds_one = holds.has_value();
  for (int t = 0; t < dst().ndim(); ++t) {
    const int64_t slot = dst().slots_of(needs->part)[t];
    parts *= static_cast<int64_t>(all_->meetings[t].of_dst(slot).size());
    holds_one = holds_one && all_->meetings[t].between(src().slots_of(holds->part)[t], slot) != nullptr;
  }
  return parts - (holds_one ? 1 : 0);
}

Traffic Crossing::at(Rank rank, int64_t rounds) const { return at(rank, ends_of(rank), rounds); }

Traffic Crossing::at(Rank rank, const Ends& ends, int64_t rounds) const {
  const Sent all_sent = sent(rank, ends);
  Traffic traffic{received_elements(ends) * item_bytes_, all_sent.elements * item_bytes_, 0, all_sent.parcels};
  if (rounds == 1 && sharing_ == Sharing::kMessages) {
    traffic.messages = parts_received(ends);
    return traffic;
  }
  if (rounds > 1) {
    traffic.sent_messages = 0;
    for (const Parcel& parcel : sends(rank)) {
      traffic.sent_messages += std::min(rounds, parcel.range.end - parcel.range.begin);
    }
  }
  for_each_received(rank, ends,
                    [&](Rank, Interval range) { traffic.messages += std::min(rounds, range.end - range.begin); });
  return traffic;
}

int64_t Crossing::largest_result_bytes() const {
  int64_t bytes = item_bytes_;
  for (int t = 0; t < dst().ndim(); ++t) {
    int64_t longest = 0;
    for (const IntervalList& list : dst().lists(t)) longest = std::max(longest, shardwright::length(list));
    bytes *= longest;
  }
  return bytes;
}

Crossing::Totals Crossing::totals(int64_t rounds) const {
  Totals totals;
  for (size_t i = 0; i < all_->ranks.size(); ++i) {
    const Rank rank = all_->ranks[i];
    const Traffic one = at(rank, all_->ends[i], rounds);
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
  for (const Ends& ends : all_->ends) {
    worst.received_bytes = std::max(worst.received_bytes, received_elements(ends) * item_bytes_);
    worst.messages = std::max(worst.messages, parts_received(ends));
  }
  if (worst.messages > 0) worst.sent_bytes = all_->stretch * item_bytes_;
  worst.touched_bytes = largest_result_bytes();
  return worst;
}

bool Crossing::crosses_nodes(int64_t ranks_per_node) const {
  if (ranks_per_node <= 0) return false;
  const auto node_of = [&](Rank rank) { return number(rank) / ranks_per_node; };
  if (node_of(all_->ranks.front()) == node_of(all_->ranks.back())) return false;
  for (size_t i = 0; i < all_->ranks.size(); ++i) {
    const Rank rank = all_->ranks[i];
    bool crosses = false;
    for_each_received(rank, all_->ends[i],
                      [&](Rank from, Interval) { crosses = crosses || node_of(from) != node_of(rank); });
    if (crosses) return true;
  }
  return false;
}

}  // namespace shardwright
