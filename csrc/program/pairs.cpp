#include "program/pairs.h"

#include <algorithm>
#include <set>
#include <utility>

#include "program/boxes.h"
#include "program/builder.h"

namespace shardwright {
namespace {

// Above this, looking at every pair of a group costs more than messages to absent peers save.
constexpr size_t kMaxGroupForPairs = 512;

// Gloo's single messages stall where its all-to-all does not: up to this many ranks that are connected by what they
// exchange, an all-to-all among them is faster even if some pairs have nothing to say.
constexpr size_t kMaxSparseAllToAll = 8;

SharedRuns shared_runs(const StepPairs::Part& held, const StepPairs::Part& needed) {
  const int64_t begin = std::max(held.begin, needed.begin);
  const int64_t end = std::min(held.end, needed.end);
  if (begin >= end) return {};
  if (held.has_gaps || needed.has_gaps) return shared_runs(*held.list, *needed.list);
  return {end - begin, 1, begin - held.begin, begin - needed.begin};
}

// The same pieces, perhaps elsewhere.
bool lie_alike(const std::vector<Piece>& a, const std::vector<Piece>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].length != b[i].length || a[i].a_position - a[0].a_position != b[i].a_position - b[0].a_position ||
        a[i].b_position - a[0].b_position != b[i].b_position - b[0].b_position) {
      return false;
    }
  }
  return true;
}

}  // namespace

StepPairs::StepPairs(const Step& step) : step_(step), ndim_(step.before.ndim()), held_(ndim_), needed_(ndim_) {
  const SharedElements shared(step.before, step.after);
  all_look_alike_ = step.sharing == Sharing::kNone && !shared.matchings().empty();
  for (const Matching& matching : shared.matchings()) {
    for (const Matching::Common& digit : matching.digits()) {
      if (digit.is_tie()) ties_.push_back(digit);
    }
  }
}

StepPairs::Part StepPairs::part(const Layout& layout, Parts& parts, int tensor_dim, int64_t position) {
  const Mesh& mesh = layout.mesh();
  const std::vector<Cut>& cuts = layout.cuts(tensor_dim);
  int64_t number = 0;
  for (const Cut& c : cuts) number = number * mesh.dim_size(c.mesh_dim) + mesh.coordinate(position, c.mesh_dim);
  const auto [found, is_new] = parts[tensor_dim].try_emplace(number);
  IntervalList& list = found->second;
  if (is_new) list = part_at(mesh, layout.shape()[tensor_dim], cuts, position);
  if (list.empty()) return {0, 0, 0, &list, false};
  return {list.front().begin, list.back().end, length(list), &list, list.size() > 1};
}

StepPairs::Group& StepPairs::group(int64_t position) {
  const Mesh& mesh = step_.before.mesh();
  int64_t least = position;
  for (const int d : step_.mesh_dims.to_vector()) least -= mesh.coordinate(position, d) * mesh.stride(d);
  const auto [found, is_new] = groups_.try_emplace(least);
  Group& group = found->second;
  if (!is_new) return group;
  group.positions = mesh.group(position, step_.mesh_dims);
  const MeshDimSet holding_the_same = step_.mesh_dims - step_.before.cut_dims();
  const std::vector<int> replica_dims = holding_the_same.to_vector();
  group.num_replicas = mesh.group_size(holding_the_same);
  for (const int64_t member : group.positions) {
    for (int t = 0; t < step_.before.ndim(); ++t) {
      group.held.push_back(part(step_.before, held_, t, member));
      group.needed.push_back(part(step_.after, needed_, t, member));
    }
    int64_t replica = 0;
    for (const int d : replica_dims) replica = replica * mesh.dim_size(d) + mesh.coordinate(member, d);
    group.replica.push_back(replica);
    for (const Matching::Common& tie : ties_) {
      const auto value = [&](const Matching::Owner& owner) {
        return mesh.coordinate(member, owner.mesh_dim) / owner.below % tie.radix;
      };
      group.held_ties.push_back(value(tie.before));
      group.needed_ties.push_back(value(tie.after));
    }
  }
  if (step_.sharing != Sharing::kNone) group.transfers.emplace(step_, position);
  return group;
}

size_t StepPairs::index_of(const Group& group, int64_t position) {
  return std::find(group.positions.begin(), group.positions.end(), position) - group.positions.begin();
}

int64_t StepPairs::num_held(const Group& group, size_t member) const {
  int64_t total = 1;
  for (size_t t = 0; t < ndim_; ++t) total *= group.held[member * ndim_ + t].length;
  return total;
}

// From the innermost dim out: a run has, in every dim with more than one index, the stride that the dims within fill.
Load StepPairs::shared(const Part* held, const Part* needed) const {
  Load load{1, 0, 0, true, true};
  int64_t held_stride = 1;
  int64_t needed_stride = 1;
  for (size_t t = ndim_; t-- > 0;) {
    const SharedRuns runs = shared_runs(held[t], needed[t]);
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

bool StepPairs::talks(const Group& group, size_t from, size_t to) {
  if (!all_look_alike_) return transfer(group, from, to).count() > 0;
  const auto held = group.held_ties.begin() + static_cast<int64_t>(from * ties_.size());
  const auto needed = group.needed_ties.begin() + static_cast<int64_t>(to * ties_.size());
  return group.replica[from] == group.replica[to] &&
         std::equal(held, held + static_cast<int64_t>(ties_.size()), needed);
}

StepPairs::Transfer StepPairs::transfer(const Group& group, size_t from, size_t to) {
  if (all_look_alike_) {
    if (!talks(group, from, to)) return {};
    if (alike_ && !alike_->has_runs()) return *alike_;  // so offsets do not matter
    alike_ = share(group, from, to);
    return *alike_;
  }
  if (!group.transfers && group.replica[from] != group.replica[to]) return {};
  if (!group.transfers) return share(group, from, to);
  const Interval range = group.transfers->range(from, to);
  if (range.begin == range.end) return {};
  const Part* held = &group.held[from * ndim_];
  const Part* needed = &group.needed[to * ndim_];
  return in_rounds(held, needed, shared(held, needed), range);
}

StepPairs::Transfer StepPairs::share(const Group& group, size_t from, size_t to) {
  const Part* held = &group.held[from * ndim_];
  const Part* needed = &group.needed[to * ndim_];
  const Load whole = shared(held, needed);
  return in_rounds(held, needed, whole, {0, whole.count});
}

// Slices of what two ranks share look alike wherever the parts have the same lengths and lie alike.
StepPairs::Transfer StepPairs::in_rounds(const Part* held, const Part* needed, const Load& whole, Interval range) {
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
    const std::vector<Piece> pieces = intersect(*held[t].list, *needed[t].list);
    name.push_back(-static_cast<int64_t>(pieces.size()));
    for (const Piece& piece : pieces) {
      name.push_back(piece.length);
      name.push_back(piece.a_position - pieces[0].a_position);
      name.push_back(piece.b_position - pieces[0].b_position);
    }
  }
  const auto [found, is_new] = rounds_.try_emplace(std::move(name));
  if (is_new) {
    Region all_held;
    Region all_needed;
    for (size_t t = 0; t < ndim_; ++t) all_held.push_back(*held[t].list);
    for (size_t t = 0; t < ndim_; ++t) all_needed.push_back(*needed[t].list);
    const Intersection intersection(all_held, all_needed);
    for (int64_t round = 0; round < step_.rounds; ++round) {
      const Interval part = in_round(range, round, step_.rounds);
      const Parcel parcel(intersection, part.begin, part.end);
      Load load{parcel.count()};
      if (load.count > 0) {
        const int64_t in_held = parcel.run_in_a();
        const int64_t in_needed = parcel.run_in_b();
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

// Every mesh dim of the group cuts one tensor dim at most, so parts of different tensor dims combine freely.
void StepPairs::list_parts(Group& group) {
  if (!group.all_held.empty()) return;
  group.all_held.resize(std::max<size_t>(ndim_, 1));
  group.all_needed.resize(std::max<size_t>(ndim_, 1) * group.num_replicas);
  std::set<std::pair<size_t, const IntervalList*>> seen_held;
  std::set<std::pair<size_t, const IntervalList*>> seen_needed;
  for (size_t m = 0; m < group.positions.size(); ++m) {
    for (size_t t = 0; t < ndim_; ++t) {
      const Part& held = group.held[m * ndim_ + t];
      const Part& needed = group.needed[m * ndim_ + t];
      const size_t to = group.replica[m] * ndim_ + t;
      if (seen_held.emplace(t, held.list).second) group.all_held[t].push_back(held);
      if (seen_needed.emplace(to, needed.list).second) group.all_needed[to].push_back(needed);
    }
  }
}

const std::vector<StepPairs::Meeting>& StepPairs::meetings(const std::vector<Part>& others, const Part& mine,
                                                           bool others_hold) {
  const auto [found, is_new] = meetings_.try_emplace({&others, mine.list});
  std::vector<Meeting>& all = found->second;
  if (!is_new) return all;
  for (const Part& other : others) {
    const Part& held = others_hold ? other : mine;
    const Part& needed = others_hold ? mine : other;
    const SharedRuns shared = shared_runs(held, needed);
    if (shared.length == 0) continue;
    std::vector<Piece> pieces;
    if (step_.rounds > 1 && (held.has_gaps || needed.has_gaps)) pieces = intersect(*held.list, *needed.list);
    const auto is_alike = [&](const Meeting& known) {
      return known.part.length == other.length && known.shared.length == shared.length &&
             known.shared.runs == shared.runs && lie_alike(known.pieces, pieces);
    };
    const auto known = std::find_if(all.begin(), all.end(), is_alike);
    if (known == all.end()) {
      all.push_back({other, 1, shared, std::move(pieces)});
    } else {
      ++known->times;
    }
  }
  return all;
}

std::vector<StepPairs::Alike> StepPairs::alike(const std::vector<Part>* others, const Part* mine, bool others_hold,
                                               int64_t members) {
  struct Combination {
    std::vector<Part> parts;
    int64_t times = 1;
  };
  std::vector<Combination> combinations{Combination()};
  for (size_t t = 0; t < ndim_; ++t) {
    members /= static_cast<int64_t>(others[t].size());
    std::vector<Combination> longer;
    for (const Combination& combination : combinations) {
      for (const Meeting& meeting : meetings(others[t], mine[t], others_hold)) {
        longer.push_back(combination);
        longer.back().parts.push_back(meeting.part);
        longer.back().times *= meeting.times;
      }
    }
    combinations = std::move(longer);
  }
  std::vector<Alike> all;
  for (const Combination& combination : combinations) {
    const Part* held = others_hold ? combination.parts.data() : mine;
    const Part* needed = others_hold ? mine : combination.parts.data();
    const Load whole = shared(held, needed);
    all.push_back({in_rounds(held, needed, whole, {0, whole.count}), combination.times * members});
  }
  return all;
}

std::vector<StepPairs::Alike> StepPairs::sends(Group& group, size_t member) {
  std::vector<Alike> all;
  if (group.transfers) {
    for (size_t m = 0; m < group.positions.size(); ++m) {
      if (m != member) all.push_back({transfer(group, member, m), 1});
    }
    return all;
  }
  list_parts(group);
  const auto members = static_cast<int64_t>(group.positions.size()) / group.num_replicas;
  all = alike(&group.all_needed[group.replica[member] * ndim_], &group.held[member * ndim_], false, members);
  all.push_back({share(group, member, member), -1});
  return all;
}

std::vector<StepPairs::Alike> StepPairs::receives(Group& group, size_t member) {
  std::vector<Alike> all;
  if (group.transfers) {
    for (size_t m = 0; m < group.positions.size(); ++m) {
      if (m != member) all.push_back({transfer(group, m, member), 1});
    }
    return all;
  }
  list_parts(group);
  const auto members = static_cast<int64_t>(group.positions.size()) / group.num_replicas;
  all = alike(group.all_held.data(), &group.needed[member * ndim_], true, members);
  all.push_back({share(group, member, member), -1});
  return all;
}

void StepPairs::connect(Group& group) {
  if (!group.circles.empty()) return;
  const size_t k = group.positions.size();
  std::vector<std::vector<size_t>> talks_with(k);
  std::vector<size_t> sends(k, 0);
  for (size_t from = 0; from < k; ++from) {
    for (size_t to = 0; to < k; ++to) {
      if (from == to || !talks(group, from, to)) continue;
      talks_with[from].push_back(to);
      talks_with[to].push_back(from);
      ++sends[from];
    }
  }
  group.connected.assign(k, k);
  for (size_t first = 0; first < k; ++first) {
    if (group.connected[first] < k) continue;
    const size_t number = group.circles.size();
    std::vector<size_t> circle{first};
    group.connected[first] = number;
    size_t talking = 0;
    for (size_t at = 0; at < circle.size(); ++at) {
      talking += sends[circle[at]];
      for (const size_t peer : talks_with[circle[at]]) {
        if (group.connected[peer] < k) continue;
        group.connected[peer] = number;
        circle.push_back(peer);
      }
    }
    std::sort(circle.begin(), circle.end());
    group.all_pairs_talk.push_back(talking == circle.size() * (circle.size() - 1));
    group.circles.push_back(std::move(circle));
  }
}

DataMovePlan way_of(StepPairs& pairs, StepPairs::Group& group, size_t member, Backend backend, bool named_groups_only) {
  const Step& step = pairs.step();
  const size_t k = group.positions.size();
  if (step.op == StepOp::kAllGather) {
    const int64_t first = pairs.num_held(group, 0);
    bool is_even = first > 0;
    for (size_t m = 0; m < k && is_even; ++m) is_even = pairs.num_held(group, m) == first;
    if (backend.gathers && step.rounds == 1 && is_even) return {DataMoveWay::kNativeGather, {}};
    const bool copies = backend.copies_gather(static_cast<int64_t>(k), step.before.largest_part_bytes());
    return {copies ? DataMoveWay::kAllToAll : DataMoveWay::kMessages, {}};
  }
  if (k > kMaxGroupForPairs) return {DataMoveWay::kMessages, {}};
  pairs.connect(group);
  const bool waits_for_those_concerned = backend.narrows_groups && !named_groups_only;
  if (waits_for_those_concerned) {
    const size_t number = group.connected[member];
    const std::vector<size_t>& circle = group.circles[number];
    if (circle.size() == 1) return {DataMoveWay::kLocal, {}};
    const bool suits_all_to_all = circle.size() <= kMaxSparseAllToAll || group.all_pairs_talk[number];
    return {suits_all_to_all ? DataMoveWay::kAllToAll : DataMoveWay::kMessages, circle};
  }
  if (k == 1) return {DataMoveWay::kLocal, {}};
  const bool all_talk = group.circles.size() == 1 && group.all_pairs_talk[0];
  return {all_talk ? DataMoveWay::kAllToAll : DataMoveWay::kMessages, {}};
}

}  // namespace shardwright
