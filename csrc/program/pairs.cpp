#include "program/pairs.h"

#include <algorithm>
#include <set>
#include <utility>

#include "layout/selection.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Returns numbers that are equal only for pieces that are the same except for a shift.
std::vector<int64_t> name_of(const PieceList& pieces) {
  std::vector<int64_t> name;
  for (const auto& [block, count, shift] : pieces.blocks()) {
    name.insert(name.end(), {static_cast<int64_t>(block.size()), count, shift.a, shift.b});
    for (const Piece& piece : block) {
      name.push_back(piece.length);
      name.push_back(piece.a_position - pieces.front().a_position);
      name.push_back(piece.b_position - pieces.front().b_position);
    }
  }
  return name;
}

bool lie_alike(const PieceList& a, const PieceList& b) { return name_of(a) == name_of(b); }

}  // namespace

SharedRuns shared_runs(const StepPairs::Part& held, const StepPairs::Part& needed) {
  const int64_t begin = std::max(held.begin, needed.begin);
  const int64_t end = std::min(held.end, needed.end);
  if (begin >= end) return {};
  if (held.has_gaps || needed.has_gaps) return shared_runs(*held.list, *needed.list);
  return {end - begin, 1, begin - held.begin, begin - needed.begin};
}

StepPairs::StepPairs(const Step& step)
    : step_(step),
      ndim_(step.before.ndim()),
      cutting_(step.mesh_dims & step.before.cut_dims()),
      replicas_(step.mesh_dims - step.before.cut_dims()),
      spanned_(step.mesh_dims.to_vector()),
      held_(step.before),
      needed_(step.after) {
  const SharedElements shared(step.before, step.after);
  all_look_alike_ = step.sharing == Sharing::kNone && !shared.matchings().empty();
  for (const Matching& matching : shared.matchings()) {
    for (const Matching::Common& digit : matching.digits()) {
      if (digit.is_tie()) ties_.push_back(digit);
    }
  }
}

const Coordinates& StepPairs::coordinates(int64_t position) {
  if (position != position_) coordinates_at(step_.before.mesh(), position_ = position, coordinates_);
  return coordinates_;
}

StepPairs::Part StepPairs::part(KnownParts& parts, int tensor_dim, int64_t position) {
  const auto& [list, length] = parts.at(tensor_dim, coordinates(position));
  const Interval span = span_of(list);
  return {span.begin, span.end, length, &list, list.size() > 1};
}

const StepPairs::PartsOfRank& StepPairs::parts_at(KnownParts& parts, PartsAt& at, int64_t position) {
  if (at.position == position) return at.parts;
  at.position = position;
  at.parts.resize(ndim_);
  for (size_t t = 0; t < ndim_; ++t) at.parts[t] = part(parts, static_cast<int>(t), position);
  return at.parts;
}

StepPairs::Group& StepPairs::around(int64_t position) {
  const Mesh& mesh = step_.before.mesh();
  int64_t least = position;
  for (const int d : spanned_) least -= mesh.coordinate(position, d) * mesh.stride(d);
  Group& group = groups_[least];
  group.least = least;
  group.size = mesh.group_size(step_.mesh_dims);
  return group;
}

StepPairs::Group& StepPairs::group(int64_t position) {
  Group& group = around(position);
  if (!group.positions.empty()) return group;
  group.positions = step_.before.mesh().group(position, step_.mesh_dims);
  if (step_.sharing != Sharing::kNone) group.transfers.emplace(step_, position);
  return group;
}

size_t StepPairs::index_of(const Group& group, int64_t position) {
  return std::find(group.positions.begin(), group.positions.end(), position) - group.positions.begin();
}

int64_t StepPairs::num_held(int64_t position) {
  int64_t total = 1;
  for (const Part& part : held(position)) total *= part.length;
  return total;
}

Load StepPairs::own(int64_t position) { return shared(held(position), needed(position)); }

// Returns how many members of the group around a position have how much of a tensor dim, among those that differ in
// mesh dims that cut it.
std::map<int64_t, int64_t> StepPairs::lengths(const Layout& layout, int tensor_dim, int64_t position) const {
  const std::vector<Cut>& cuts = layout.cuts(tensor_dim);
  if (!layout.is_restricted()) {
    return part_lengths(layout.mesh(), layout.shape()[tensor_dim], cuts, position, step_.mesh_dims);
  }
  std::map<int64_t, int64_t> lengths;
  for (const int64_t member : layout.mesh().group(position, dims_of(cuts) & step_.mesh_dims)) {
    ++lengths[length(layout.part(tensor_dim, member))];
  }
  return lengths;
}

// All combinations of parts of the tensor dims exist, so all members have equally much exactly if they do in every
// tensor dim, or if all have nothing.
bool StepPairs::hold_equally(int64_t position) const {
  const Layout& layout = step_.before;
  bool all_alike = true;
  for (int t = 0; t < layout.ndim(); ++t) {
    const std::map<int64_t, int64_t> held = lengths(layout, t, position);
    if (held.rbegin()->first == 0) return true;
    all_alike = all_alike && held.size() == 1;
  }
  return all_alike;
}

std::map<int64_t, int64_t> StepPairs::members_by_need(int64_t position) const {
  const Layout& layout = step_.after;
  const Mesh& mesh = layout.mesh();
  std::map<int64_t, int64_t> members{{1, mesh.group_size(step_.mesh_dims - layout.cut_dims())}};
  for (int t = 0; t < layout.ndim(); ++t) {
    std::map<int64_t, int64_t> more;
    for (const auto& [length, times] : lengths(layout, t, position)) {
      for (const auto& [elements, others] : members) more[elements * length] += others * times;
    }
    members = std::move(more);
  }
  return members;
}

// Goes from the innermost dim outwards: in a run, every dim of more than one index has as its stride the product of the
// sizes of the dims within it.
template <typename RunsOf>
Load StepPairs::shared(const PartsOfRank& held, const PartsOfRank& needed, const RunsOf& runs_of) const {
  Load load{1, 0, 0, true, true};
  int64_t held_stride = 1;
  int64_t needed_stride = 1;
  for (size_t t = ndim_; t-- > 0;) {
    const SharedRuns runs = runs_of(t);
    if (runs.length == 0) return {};
    load.first_held += runs.a_position * held_stride;
    load.first_needed += runs.b_position * needed_stride;
    if (runs.length > 1) {
      load.is_run_held = load.is_run_held && runs.runs == 1 && held_stride == load.count;
      load.is_run_needed = load.is_run_needed && runs.runs == 1 && needed_stride == load.count;
    }
    load.count *= runs.length;
    held_stride *= held[t].length;
    needed_stride *= needed[t].length;
  }
  return load;
}

Load StepPairs::shared(const PartsOfRank& held, const PartsOfRank& needed) const {
  return shared(held, needed, [&](size_t t) { return shared_runs(held[t], needed[t]); });
}

Load StepPairs::Transfer::in_round(int64_t round) const {
  if (rounds_ == nullptr || whole_.count == 0) return whole_;
  Load load = (*rounds_)[round];
  load.first_held += whole_.first_held;
  load.first_needed += whole_.first_needed;
  return load;
}

bool StepPairs::Transfer::has_runs() const {
  if (rounds_ == nullptr) return whole_.is_run_held || whole_.is_run_needed;
  return std::any_of(rounds_->begin(), rounds_->end(),
                     [](const Load& load) { return load.is_run_held || load.is_run_needed; });
}

bool StepPairs::shares_with(int64_t from, int64_t to) {
  const Mesh& mesh = step_.before.mesh();
  for (int d = 0; d < mesh.ndim(); ++d) {
    if (replicas_.contains(d) && mesh.coordinate(from, d) != mesh.coordinate(to, d)) return false;
  }
  return true;
}

bool StepPairs::talks(const Group& group, int64_t from, int64_t to) {
  if (group.transfers) return transfer(group, from, to).count() > 0;
  if (!shares_with(from, to)) return false;
  const Mesh& mesh = step_.before.mesh();
  if (all_look_alike_) {
    return std::all_of(ties_.begin(), ties_.end(), [&](const Matching::Common& tie) {
      return mesh.coordinate(from, tie.before.mesh_dim) / tie.before.below % tie.radix ==
             mesh.coordinate(to, tie.after.mesh_dim) / tie.after.below % tie.radix;
    });
  }
  for (size_t t = 0; t < ndim_; ++t) {
    const int dim = static_cast<int>(t);
    const Part held = part(held_, dim, from);
    const Part needed = part(needed_, dim, to);
    if (shared_runs(held, needed).length == 0) return false;
  }
  return true;
}

StepPairs::Transfer StepPairs::transfer(const Group& group, int64_t from, int64_t to) {
  if (group.transfers) {
    const Interval range = group.transfers->range(index_of(group, from), index_of(group, to));
    if (range.begin == range.end) return {};
    const PartsOfRank& has = held(from);
    const PartsOfRank& wants = needed(to);
    return in_rounds(has, wants, shared(has, wants), range);
  }
  if (!all_look_alike_) return shares_with(from, to) ? share(from, to) : Transfer();
  if (!talks(group, from, to)) return {};
  if (!alike_ || alike_->has_runs()) alike_ = share(from, to);  // without runs, offsets do not matter
  return *alike_;
}

StepPairs::Transfer StepPairs::share(int64_t from, int64_t to) {
  const PartsOfRank& has = held(from);
  const PartsOfRank& wants = needed(to);
  const Load whole = shared(has, wants);
  return in_rounds(has, wants, whole, {0, whole.count});
}

// Tries the partner that differs least from the rank, only in the digits that are tied. If that is the rank itself, or
// not in the group, tries all members.
const StepPairs::Transfer& StepPairs::any_transfer(int64_t position) {
  if (alike_) return *alike_;
  const Mesh& mesh = step_.before.mesh();
  const Group& own_group = around(position);
  const auto try_with = [&](int64_t other) {
    if (other != position && talks(own_group, position, other)) alike_ = share(position, other);
    if (!alike_ && other != position && talks(own_group, other, position)) alike_ = share(other, position);
    return alike_.has_value();
  };
  for (const int d : cutting_.to_vector()) {
    const int64_t first = position - mesh.coordinate(position, d) * mesh.stride(d);
    for (int64_t c = 0; c < mesh.dim_size(d); ++c) {
      if (try_with(first + c * mesh.stride(d))) return *alike_;
    }
  }
  for (const int64_t other : mesh.group(position, step_.mesh_dims)) {
    if (try_with(other)) break;
  }
  check_invariant(alike_.has_value(), "nobody exchanges anything with position ", position);
  return *alike_;
}

// Slices of what two ranks share look alike if the parts have the same lengths and relative places, so they are kept
// under these.
StepPairs::Transfer StepPairs::in_rounds(const PartsOfRank& held, const PartsOfRank& needed, const Load& whole,
                                         Interval range) {
  if (whole.count == 0 || (step_.rounds == 1 && range.end - range.begin == whole.count)) return {whole, nullptr};
  std::vector<int64_t> name{range.begin, range.end};
  name.reserve(2 + 4 * ndim_);
  for (size_t t = 0; t < ndim_; ++t) {
    name.push_back(held[t].length);
    name.push_back(needed[t].length);
    if (!held[t].has_gaps && !needed[t].has_gaps) {
      name.push_back(shared_runs(held[t], needed[t]).length);
      continue;
    }
    const std::vector<int64_t> pieces = name_of(intersect(*held[t].list, *needed[t].list));
    name.push_back(-static_cast<int64_t>(pieces.size()));
    name.insert(name.end(), pieces.begin(), pieces.end());
  }
  const auto [found, is_new] = rounds_.try_emplace(std::move(name));
  if (is_new) {
    Region all_held;
    Region all_needed;
    for (size_t t = 0; t < ndim_; ++t) all_held.push_back(*held[t].list);
    for (size_t t = 0; t < ndim_; ++t) all_needed.push_back(*needed[t].list);
    const Selection intersection(all_held, all_needed);
    for (int64_t round = 0; round < step_.rounds; ++round) {
      const Interval part = in_round(range, round, step_.rounds);
      const Selection elements = intersection.slice(part.begin, part.end);
      Load load{elements.count()};
      if (load.count > 0) {
        const int64_t in_held = elements.contiguous_in_sender();
        const int64_t in_needed = elements.contiguous_in_receiver();
        load.is_run_held = in_held >= 0;
        load.is_run_needed = in_needed >= 0;
        load.first_held = in_held - whole.first_held;
        load.first_needed = in_needed - whole.first_needed;
      }
      found->second.push_back(load);
    }
  }
  return {whole, &found->second};
}

void StepPairs::add_meeting(const IntervalList& theirs, int64_t times, Meetings& with) {
  const Layout& layout = with.others_hold ? step_.before : step_.after;
  const IntervalList& list = lists_.emplace_back(layout.restricted(with.tensor_dim, theirs));
  const Part other{list.front().begin, list.back().end, length(list), &list, list.size() > 1};
  const Part& held = with.others_hold ? other : with.mine;
  const Part& needed = with.others_hold ? with.mine : other;
  const SharedRuns shared = shared_runs(held, needed);
  PieceList pieces;
  if (step_.rounds > 1 && (held.has_gaps || needed.has_gaps)) pieces = intersect(*held.list, *needed.list);
  for (Meeting& known : with.found) {
    if (known.part.length == other.length && known.shared.length == shared.length && known.shared.runs == shared.runs &&
        lie_alike(known.pieces, pieces)) {
      known.times += times;
      lists_.pop_back();
      return;
    }
  }
  with.found.push_back({other, times, shared, std::move(pieces)});
}

// Adds the parts into which the cuts of other ranks divide a list, as far as they intersect a part. Within a run that
// the part covers completely, parts are full chunks and one short one.
void StepPairs::meet_below(const IntervalList& list, std::span<const Cut> cuts, int64_t times, Meetings& with) {
  const Part& mine = with.mine;
  const SharedRuns met = shardwright::shared_runs(list, *mine.list);
  if (met.length == 0) return;
  if (cuts.empty()) return add_meeting(list, times, with);
  const Mesh& mesh = step_.before.mesh();
  const Cut& first = cuts[0];
  const int64_t k = mesh.dim_size(first.mesh_dim);
  const auto go_on = [&](const IntervalList& part, int64_t more) {
    meet_below(part, cuts.subspan(1), times * more, with);
  };
  if (!cutting_.contains(first.mesh_dim)) {
    return go_on(first.rule.part(list, k, mesh.coordinate(with.position, first.mesh_dim)), 1);
  }
  const bool all_vary = std::all_of(cuts.begin(), cuts.end(),
                                    [&](const Cut& c) { return c.rule.is_chunks() && cutting_.contains(c.mesh_dim); });
  const int64_t n = length(list);
  if (all_vary && list.size() == 1 && met.runs == 1 && met.length == n) {
    const int64_t begin = list.front().begin;
    const int64_t chunk = (n + k - 1) / k;
    const int64_t full = n / chunk;
    go_on({{begin, begin + chunk}}, full);
    if (full * chunk < n) go_on({{begin + full * chunk, begin + n}}, 1);
    return;
  }
  Interval coordinates{0, k};
  if (first.rule.makes_runs()) {  // only the coordinates between the first and the last shared element
    const int64_t until = intersection_length(list, {{0, mine.list->back().end}});
    coordinates = first.rule.coordinates_of({met.a_position, until}, n, k);
  }
  const bool all_runs = list.size() == 1 && mine.list->size() == 1 &&
                        std::all_of(cuts.begin(), cuts.end(), [](const Cut& c) { return c.rule.is_chunks(); });
  if (all_runs && coordinates.end - coordinates.begin > 3) {  // those between the first and the last are full chunks
    go_on(first.rule.part(list, k, coordinates.begin), 1);
    go_on(first.rule.part(list, k, coordinates.begin + 1), coordinates.end - coordinates.begin - 2);
    return go_on(first.rule.part(list, k, coordinates.end - 1), 1);
  }
  for (int64_t c = coordinates.begin; c < coordinates.end; ++c) go_on(first.rule.part(list, k, c), 1);
}

ByCoordinates<std::vector<StepPairs::Meeting>> StepPairs::no_meetings_yet(int tensor_dim, bool others_hold) const {
  const Layout& theirs = others_hold ? step_.before : step_.after;
  const Layout& ours = others_hold ? step_.after : step_.before;
  return {step_.before.mesh(), (dims_of(theirs.cuts(tensor_dim)) - cutting_) | dims_of(ours.cuts(tensor_dim))};
}

const std::vector<StepPairs::Meeting>& StepPairs::meetings(int tensor_dim, int64_t position, bool others_hold) {
  for (size_t i = meetings_.size(); i < 2 * ndim_; ++i) {
    meetings_.push_back(no_meetings_yet(static_cast<int>(i / 2), i % 2 == 1));
  }
  return meetings_[2 * tensor_dim + others_hold].at(coordinates(position), [&] {
    const Layout& theirs = others_hold ? step_.before : step_.after;
    Meetings with{tensor_dim, position, others_hold, part(others_hold ? needed_ : held_, tensor_dim, position), {}};
    if (with.mine.length > 0) meet_below({{0, theirs.shape()[tensor_dim]}}, theirs.cuts(tensor_dim), 1, with);
    return std::move(with.found);
  });
}

std::optional<std::vector<int>> StepPairs::likeness(int64_t position) {
  if (step_.rounds > 1 || step_.sharing != Sharing::kNone) return std::nullopt;
  if (likenesses_.empty()) {
    for (int t = 0; t < static_cast<int>(ndim_); ++t) {
      likenesses_.emplace_back(step_.before.mesh(), dims_of(step_.before.cuts(t)) | dims_of(step_.after.cuts(t)));
    }
    known_likenesses_.resize(ndim_);
  }
  std::vector<int> all(ndim_);
  for (size_t t = 0; t < ndim_; ++t) {
    if (!likenesses_[t].are_few()) return std::nullopt;
    all[t] = likenesses_[t].at(coordinates(position), [&] { return likeness_in(static_cast<int>(t), position); });
  }
  return all;
}

// Numbers whatever shared() reads of one tensor dim, except for offsets.
int StepPairs::likeness_in(int tensor_dim, int64_t position) {
  const Part held = part(held_, tensor_dim, position);
  const Part needed = part(needed_, tensor_dim, position);
  const SharedRuns own = shared_runs(held, needed);
  std::vector<int64_t> figures{held.length, needed.length, own.length, own.runs};
  for (const bool others_hold : {false, true}) {
    figures.push_back(-1);
    for (const Meeting& one : meetings(tensor_dim, position, others_hold)) {
      figures.insert(figures.end(), {one.times, one.part.length, one.shared.length, one.shared.runs});
    }
  }
  std::map<std::vector<int64_t>, int>& known = known_likenesses_[tensor_dim];
  return known.try_emplace(std::move(figures), static_cast<int>(known.size())).first->second;
}

// Every mesh dim cuts at most one tensor dim, so parts of different tensor dims combine freely.
const std::vector<StepPairs::Alike>& StepPairs::alike(int64_t position, bool others_hold) {
  // Receivers that differ only in mesh dims that cut nothing after the step need the same.
  const MeshDimSet idle = others_hold ? MeshDimSet() : cutting_ - step_.after.cut_dims();
  const int64_t idle_times = step_.before.mesh().group_size(idle);
  const PartsOfRank& mine = others_hold ? needed(position) : held(position);
  std::vector<const std::vector<Meeting>*>& met = met_;
  std::vector<size_t>& at = combination_;
  PartsOfRank& others = others_;
  met.resize(ndim_);
  at.assign(ndim_, 0);
  others.resize(ndim_);
  bool is_left = true;
  for (size_t t = 0; t < ndim_; ++t) {
    met[t] = &meetings(static_cast<int>(t), position, others_hold);
    is_left = is_left && !met[t]->empty();
  }
  std::vector<Alike>& all = all_alike_;
  all.clear();
  while (is_left) {
    int64_t times = idle_times;
    for (size_t t = 0; t < ndim_; ++t) {
      others[t] = (*met[t])[at[t]].part;
      times *= (*met[t])[at[t]].times;
    }
    const PartsOfRank& has = others_hold ? others : mine;
    const PartsOfRank& wants = others_hold ? mine : others;
    const Load whole = shared(has, wants, [&](size_t t) { return (*met[t])[at[t]].shared; });
    all.push_back({in_rounds(has, wants, whole, {0, whole.count}), times});
    size_t t = ndim_;
    while (t > 0 && ++at[t - 1] == met[t - 1]->size()) at[--t] = 0;
    is_left = t > 0;
  }
  all.push_back({share(position, position), -1});
  return all;
}

const std::vector<StepPairs::Alike>& StepPairs::one_by_one(const Group& group, int64_t position, bool others_hold) {
  std::vector<Alike>& all = all_alike_;
  all.clear();
  for (const int64_t member : group.positions) {
    if (member == position) continue;
    all.push_back({others_hold ? transfer(group, member, position) : transfer(group, position, member), 1});
  }
  return all;
}

const std::vector<StepPairs::Alike>& StepPairs::sends(const Group& group, int64_t position) {
  return group.transfers ? one_by_one(group, position, false) : alike(position, false);
}

const std::vector<StepPairs::Alike>& StepPairs::receives(const Group& group, int64_t position) {
  return group.transfers ? one_by_one(group, position, true) : alike(position, true);
}

}  // namespace shardwright
