#include "moves/exchange.h"

#include <algorithm>
#include <map>
#include <span>

namespace shardwright {
namespace {

// Calls visit(length, times) for the parts into which cuts divide a list of n elements, with parts of equal length
// counted together; empty parts are left out. Mesh dims in `all` take every coordinate, others that of `position`.
template <typename Visit>
void for_each_part(const Mesh& mesh, int64_t position, MeshDimSet all, int64_t n, std::span<const Cut> cuts,
                   int64_t times, const Visit& visit) {
  if (n == 0 || times == 0) return;
  if (cuts.empty()) return visit(n, times);
  const Cut& first = cuts[0];
  const int64_t k = mesh.dim_size(first.mesh_dim);
  const auto go_on = [&](int64_t length, int64_t parts) {
    for_each_part(mesh, position, all, length, cuts.subspan(1), times * parts, visit);
  };
  if (!all.contains(first.mesh_dim)) {
    return go_on(first.rule.length(n, k, mesh.coordinate(position, first.mesh_dim)), 1);
  }
  if (first.rule.is_chunks()) {
    const int64_t chunk = (n + k - 1) / k;
    const int64_t full = n / chunk;
    go_on(chunk, full);
    return go_on(n - full * chunk, 1);
  }
  std::map<int64_t, int64_t> parts;
  for (int64_t c = 0; c < k; ++c) ++parts[first.rule.length(n, k, c)];
  for (const auto& [length, count] : parts) go_on(length, count);
}

// The same for what the parts of a list share with a target, where list, target and so all parts are single intervals.
template <typename Visit>
void for_each_met_in_runs(const Mesh& mesh, int64_t position, MeshDimSet all, Interval list, std::span<const Cut> cuts,
                          Interval target, const Visit& visit) {
  const Interval shared{std::max(list.begin, target.begin), std::min(list.end, target.end)};
  if (shared.begin >= shared.end) return;
  const int64_t n = list.end - list.begin;
  if (shared == list) return for_each_part(mesh, position, all, n, cuts, 1, visit);
  if (cuts.empty()) return visit(shared.end - shared.begin, int64_t{1});
  const int64_t k = mesh.dim_size(cuts[0].mesh_dim);
  const int64_t chunk = (n + k - 1) / k;
  const auto go_on = [&](int64_t c) {
    const Interval part{std::min(list.begin + c * chunk, list.end), std::min(list.begin + (c + 1) * chunk, list.end)};
    for_each_met_in_runs(mesh, position, all, part, cuts.subspan(1), target, visit);
  };
  if (!all.contains(cuts[0].mesh_dim)) return go_on(mesh.coordinate(position, cuts[0].mesh_dim));
  const int64_t first = (shared.begin - list.begin) / chunk;
  const int64_t last = (shared.end - 1 - list.begin) / chunk;
  go_on(first);
  for_each_part(mesh, position, all, chunk, cuts.subspan(1), std::max<int64_t>(last - first - 1, 0), visit);
  if (last > first) go_on(last);
}

// The same for one cut of a single interval, without making its parts: into strided parts that meet a single interval,
// or into chunks that meet any. Returns false for anything else.
template <typename Visit>
bool visited_without_parts(int64_t k, Interval coordinates, Interval list, const CutRule& rule,
                           const IntervalList& target, const Visit& visit) {
  const auto within = [](int64_t begin, int64_t end, Interval range) {
    return std::max<int64_t>(std::min(end, range.end) - std::max(begin, range.begin), 0);
  };
  const int64_t n = list.end - list.begin;
  if (rule.is_chunks() && !target.has_repeats()) {
    const int64_t chunk = (n + k - 1) / k;
    auto at = target.kept().begin();
    const auto end = target.kept().end();
    for (int64_t c = coordinates.begin; c < coordinates.end; ++c) {
      const Interval part{list.begin + c * chunk, std::min(list.begin + (c + 1) * chunk, list.end)};
      while (at != end && at->end <= part.begin) ++at;
      int64_t shared = 0;
      for (auto other = at; other != end && other->begin < part.end; ++other) {
        shared += within(other->begin, other->end, part);
      }
      if (shared > 0) visit(shared, int64_t{1});
    }
    return true;
  }
  if (!rule.is_strided_or_chunks() || target.size() != 1) return false;
  // The target covers some pieces and perhaps parts of the pieces before and after these.
  const Interval range{std::max(target[0].begin, list.begin) - list.begin,
                       std::min(target[0].end, list.end) - list.begin};
  const int64_t piece = (n + rule.split_factor() - 1) / rule.split_factor();
  const auto in_piece = [&](int64_t index, int64_t c) {
    const int64_t begin = index * piece;
    const int64_t length = std::min(piece, n - begin);
    const int64_t chunk = (length + k - 1) / k;
    return within(begin + std::min(c * chunk, length), begin + std::min((c + 1) * chunk, length), range);
  };
  const int64_t first = range.begin / piece;
  const int64_t last = (range.end - 1) / piece;
  for (int64_t c = coordinates.begin; c < coordinates.end; ++c) {
    int64_t shared = in_piece(first, c);
    if (last > first) shared += in_piece(last, c);
    if (last > first + 1) shared += (last - first - 1) * in_piece(first + 1, c);
    if (shared > 0) visit(shared, int64_t{1});
  }
  return true;
}

// The same for any lists.
template <typename Visit>
void for_each_met(const Mesh& mesh, int64_t position, MeshDimSet all, const IntervalList& list,
                  std::span<const Cut> cuts, const IntervalList& target, const Visit& visit) {
  const auto is_chunks = [](const Cut& c) { return c.rule.is_chunks(); };
  if (list.size() == 1 && target.size() == 1 && std::all_of(cuts.begin(), cuts.end(), is_chunks)) {
    return for_each_met_in_runs(mesh, position, all, list[0], cuts, target[0], visit);
  }
  const SharedRuns shared = shared_runs(list, target);
  if (shared.length == 0) return;
  const int64_t n = length(list);
  if (shared.length == n) return for_each_part(mesh, position, all, n, cuts, 1, visit);
  if (cuts.empty()) return visit(shared.length, int64_t{1});
  const Cut& first = cuts[0];
  const int64_t k = mesh.dim_size(first.mesh_dim);
  if (list.size() == 1 && cuts.size() == 1) {
    const int64_t own = mesh.coordinate(position, first.mesh_dim);
    const Interval some = all.contains(first.mesh_dim) ? Interval{0, k} : Interval{own, own + 1};
    if (visited_without_parts(k, some, list[0], first.rule, target, visit)) return;
  }
  if (!all.contains(first.mesh_dim)) {
    const IntervalList part = first.rule.part(list, k, mesh.coordinate(position, first.mesh_dim));
    return for_each_met(mesh, position, all, part, cuts.subspan(1), target, visit);
  }
  Interval coordinates{0, k};
  if (first.rule.makes_runs()) {  // only the coordinates between the first and the last shared element
    const int64_t until = intersection_length(list, {{0, target.back().end}});
    coordinates = first.rule.coordinates_of({shared.a_position, until}, n, k);
  }
  for (int64_t c = coordinates.begin; c < coordinates.end; ++c) {
    for_each_met(mesh, position, all, first.rule.part(list, k, c), cuts.subspan(1), target, visit);
  }
}

int64_t position_at(const Mesh& mesh, const Coordinates& coordinates) {
  int64_t position = 0;
  for (int d = 0; d < mesh.ndim(); ++d) position += coordinates[d] * mesh.stride(d);
  return position;
}

IntervalList whole(int64_t n) { return {{0, n}}; }

// The mesh dims of the step that do not cut `before`; along them all ranks hold the same.
MeshDimSet replica_dims(const Step& step) { return step.mesh_dims - step.before.cut_dims(); }

}  // namespace

int64_t source_for(const Step& step, int64_t holder, int64_t receiver) {
  const Mesh& mesh = step.before.mesh();
  int64_t source = holder;
  for (const int d : replica_dims(step).to_vector()) {
    source += (mesh.coordinate(receiver, d) - mesh.coordinate(holder, d)) * mesh.stride(d);
  }
  return source;
}

int64_t transfer_elements(const Step& step, int64_t source, int64_t receiver) {
  if (source_for(step, source, receiver) != source) return 0;
  return shared_elements(step.before.region(source), step.after.region(receiver));
}

Transfers::Transfers(const Step& step, int64_t position)
    : step_(step), group_(step.before.mesh().group(position, step.mesh_dims)) {
  if (step.sharing == Sharing::kNone) return;
  const Mesh& mesh = step.before.mesh();
  const MeshDimSet replica = replica_dims(step);
  replicas_ = mesh.group_size(replica);
  std::vector<Region> needed;
  for (const int64_t member : group_) needed.push_back(step.after.region(member));
  line_.resize(group_.size());
  for (size_t m = 0; m < group_.size(); ++m) {
    const std::vector<int64_t> holders = mesh.group(group_[m], replica);
    turn_.push_back(std::find(holders.begin(), holders.end(), group_[m]) - holders.begin());
    part_.push_back(std::find(group_.begin(), group_.end(), holders[0]) - group_.begin());
  }
  for (size_t m = 0; m < group_.size(); ++m) {
    if (part_[m] != m) continue;
    const Region held = step.before.region(group_[m]);
    line_[m].push_back({});
    for (size_t to = 0; to < group_.size(); ++to) {
      const int64_t wanted = part_[to] == m ? 0 : shared_elements(held, needed[to]);
      const Place& last = line_[m].back();
      line_[m].push_back({last.elements + wanted, last.receivers + (wanted > 0)});
    }
    const Place& end = line_[m].back();
    stretch_.elements = std::max(stretch_.elements, (end.elements + replicas_ - 1) / replicas_);
    stretch_.receivers = std::max(stretch_.receivers, (end.receivers + replicas_ - 1) / replicas_);
  }
}

Interval Transfers::range(size_t from, size_t to) const {
  if (step_.sharing == Sharing::kNone) return {0, transfer_elements(step_, group_[from], group_[to])};
  const std::vector<Place>& line = line_[part_[from]];
  const int64_t place = line[to].elements;
  const int64_t wanted = line[to + 1].elements - place;
  if (wanted == 0) return {0, 0};
  if (step_.sharing == Sharing::kMessages) {
    return {0, line[to].receivers / stretch_.receivers == turn_[from] ? wanted : 0};
  }
  const int64_t begin = stretch_.elements * turn_[from];
  const int64_t first = std::max(begin, place);
  const int64_t last = std::min(begin + stretch_.elements, place + wanted);
  return first < last ? Interval{first - place, last - place} : Interval{0, 0};
}

Interval in_round(Interval range, int64_t round, int64_t rounds) {
  const __int128 length = range.end - range.begin;
  return {range.begin + static_cast<int64_t>(length * round / rounds),
          range.begin + static_cast<int64_t>(length * (round + 1) / rounds)};
}

Meeting meet(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position, MeshDimSet varying,
             const IntervalList& target) {
  Meeting total;
  for_each_met(mesh, position, varying, whole(n), cuts, target, [&](int64_t elements, int64_t times) {
    total.elements += elements * times;
    total.parts += times;
  });
  return total;
}

std::map<int64_t, int64_t> part_lengths(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position,
                                        MeshDimSet varying) {
  std::map<int64_t, int64_t> parts;
  int64_t num_empty = 1;
  for (const Cut& c : cuts) num_empty *= varying.contains(c.mesh_dim) ? mesh.dim_size(c.mesh_dim) : 1;
  for_each_part(mesh, position, varying, n, cuts, 1, [&](int64_t length, int64_t times) {
    parts[length] += times;
    num_empty -= times;
  });
  if (num_empty > 0) parts[0] = num_empty;
  return parts;
}

ExchangeTraffic::ExchangeTraffic(const Step& step)
    : step_(step),
      shared_(step.before, step.after),
      item_(step.before.dtype().size_bytes()),
      cutting_(step.mesh_dims & step.before.cut_dims()),
      held_(step.before),
      needed_parts_(step.after),
      idle_receivers_(step.before.mesh().group_size(cutting_ - step.after.cut_dims())) {
  if (step.sharing != Sharing::kNone) return;
  if (shared_.matchings().empty()) {
    const Mesh& mesh = step.before.mesh();
    for (int t = 0; t < step.before.ndim(); ++t) {
      const MeshDimSet before = dims_of(step.before.cuts(t));
      const MeshDimSet after = dims_of(step.after.cuts(t));
      dims_.push_back(
          {{mesh, after | (before - cutting_)}, {mesh, before | (after - cutting_)}, {mesh, before | after}});
    }
    return;
  }
  is_closed_ = true;
  needed_ = sent_ = step.after.largest_part_elements();
  for (const Matching& matching : shared_.matchings()) {
    from_each_ *= matching.free();
    sources_ *= matching.sources();
    for (const Matching::Common& digit : matching.digits()) {
      if (digit.before.mesh_dim < 0 || digit.after.mesh_dim < 0) continue;
      if (step.before.cut_dims().contains(digit.after.mesh_dim)) continue;
      sent_ *= digit.radix;
      ties_with_replicas_.push_back(digit);
    }
  }
}

Traffic ExchangeTraffic::at(int64_t position) const {
  if (step_.sharing != Sharing::kNone) return pairwise_at(position);
  if (!is_closed_) return walked_at(position);
  const Mesh& mesh = step_.before.mesh();
  bool sends = true;
  for (const Matching::Common& tie : ties_with_replicas_) sends = sends && tie.agrees_at(mesh, position);
  return closed_form(shared_.at(position), sends);
}

Traffic ExchangeTraffic::closed_form(int64_t own, bool sends) const {
  const int64_t messages_each = std::min(step_.rounds, from_each_);
  const int64_t itself = own > 0 ? 1 : 0;
  Traffic traffic{(needed_ - own) * item_, 0, (sources_ - itself) * messages_each, 0};
  if (sends) {
    traffic.sent_bytes = (sent_ - own) * item_;
    traffic.sent_messages = (sent_ / from_each_ - itself) * messages_each;
  }
  return traffic;
}

std::optional<Traffic> ExchangeTraffic::at_most() const {
  if (!is_closed_) return std::nullopt;
  const bool some_share_nothing = !shared_.varying_dims().empty();
  return closed_form(some_share_nothing ? 0 : shared_.at(0), true);
}

Traffic ExchangeTraffic::pairwise_at(int64_t position) const {
  if (!pairwise_.contains(position)) {
    const Transfers transfers(step_, position);
    const std::vector<int64_t>& group = transfers.group();
    for (const int64_t member : group) pairwise_.try_emplace(member);
    for (size_t from = 0; from < group.size(); ++from) {
      for (size_t to = 0; to < group.size(); ++to) {
        const Interval range = transfers.range(from, to);
        if (from == to || range.begin == range.end) continue;
        const int64_t elements = range.end - range.begin;
        const int64_t messages = std::min(step_.rounds, elements);
        const Traffic sent{0, elements * item_, 0, messages};
        const Traffic received{elements * item_, 0, messages, 0};
        pairwise_[group[from]] = pairwise_[group[from]] + sent;
        pairwise_[group[to]] = pairwise_[group[to]] + received;
      }
    }
  }
  return pairwise_[position];
}

// Each combination of coordinates on the mesh dims that cut `before` is one rank that may hold a part of what is
// needed. Tensor dims are cut by different mesh dims, so their counts multiply. What is sent is computed in the same
// way from the other side, for the receivers with this rank's coordinates on the replica dims. A part takes as many
// messages as there are rounds, but no more than it has elements.
Traffic ExchangeTraffic::walked_at(int64_t position) const {
  Coordinates coordinates;
  coordinates_at(step_.before.mesh(), position, coordinates);
  if (step_.rounds > 1) return walked_in_rounds(coordinates);
  Factors all;
  for (int t = 0; t < step_.before.ndim(); ++t) {
    ByCoordinates<Factors>& known = dims_[t].factors;
    const auto make = [&] { return factors_at(t, coordinates); };
    const Factors factors = known.are_few() ? known.at(coordinates, make) : make();
    all.own *= factors.own;
    all.needed *= factors.needed;
    all.sent *= factors.sent;
    all.sources *= factors.sources;
    all.receivers *= factors.receivers;
  }
  const int64_t itself = std::min<int64_t>(all.own, 1);
  return {(all.needed - all.own) * item_, (all.sent * idle_receivers_ - all.own) * item_, all.sources - itself,
          all.receivers * idle_receivers_ - itself};
}

ExchangeTraffic::Factors ExchangeTraffic::factors_at(int tensor_dim, const Coordinates& coordinates) const {
  const KnownParts::Part& before = held_.at(tensor_dim, coordinates);
  const KnownParts::Part& after = needed_parts_.at(tensor_dim, coordinates);
  const Peers& receivers = receivers_at(tensor_dim, coordinates, before.list);
  return {intersection_length(before.list, after.list), after.length, receivers.elements,
          sources_at(tensor_dim, coordinates, after.list).count, receivers.count};
}

Traffic ExchangeTraffic::walked_in_rounds(const Coordinates& coordinates) const {
  Factors all;
  std::vector<const Peers*> sources;
  std::vector<const Peers*> receivers;
  for (int t = 0; t < step_.before.ndim(); ++t) {
    const Factors factors = factors_at(t, coordinates);
    all.own *= factors.own;
    all.needed *= factors.needed;
    all.sent *= factors.sent;
    sources.push_back(&sources_at(t, coordinates, needed_parts_.at(t, coordinates).list));
    receivers.push_back(&receivers_at(t, coordinates, held_.at(t, coordinates).list));
  }
  const int64_t to_itself = std::min(all.own, step_.rounds);
  return {(all.needed - all.own) * item_, (all.sent * idle_receivers_ - all.own) * item_,
          messages_with(sources) - to_itself, messages_with(receivers) * idle_receivers_ - to_itself};
}

int64_t ExchangeTraffic::messages_with(const std::vector<const Peers*>& by_dim) const {
  ByLength all{{1, 1}};
  for (const Peers* peers : by_dim) {
    ByLength finer;
    for (const auto& [length, parts] : peers->by_length) {
      for (const auto& [elements, others] : all) finer[std::min(elements * length, step_.rounds)] += others * parts;
    }
    all = std::move(finer);
  }
  int64_t messages = 0;
  for (const auto& [elements, others] : all) messages += elements * others;
  return messages;
}

int64_t ExchangeTraffic::messages_to_keepers(int64_t position) const {
  Coordinates coordinates;
  coordinates_at(step_.before.mesh(), position, coordinates);
  std::vector<Peers> keepers;
  std::vector<const Peers*> by_dim;
  keepers.reserve(step_.before.ndim());
  for (int t = 0; t < step_.before.ndim(); ++t) {
    const IntervalList& held = held_.at(t, coordinates).list;
    by_dim.push_back(&keepers.emplace_back(peers_in(step_.after, t, coordinates, step_.mesh_dims, held)));
  }
  return messages_with(by_dim) - std::min(num_needed(position), step_.rounds);
}

int64_t ExchangeTraffic::num_elements(KnownParts& parts, int64_t position) const {
  Coordinates coordinates;
  coordinates_at(step_.before.mesh(), position, coordinates);
  return parts.num_elements(coordinates);
}

// Both depend on the coordinates that determine this rank's part, and on those that it shares with all others.
const ExchangeTraffic::Peers& ExchangeTraffic::sources_at(int tensor_dim, const Coordinates& coordinates,
                                                          const IntervalList& needed) const {
  return dims_[tensor_dim].sources.at(
      coordinates, [&] { return peers_in(step_.before, tensor_dim, coordinates, cutting_, needed); });
}

const ExchangeTraffic::Peers& ExchangeTraffic::receivers_at(int tensor_dim, const Coordinates& coordinates,
                                                            const IntervalList& held) const {
  return dims_[tensor_dim].receivers.at(coordinates,
                                        [&] { return peers_in(step_.after, tensor_dim, coordinates, cutting_, held); });
}

ExchangeTraffic::Peers ExchangeTraffic::peers_in(const Layout& layout, int tensor_dim, const Coordinates& coordinates,
                                                 MeshDimSet varying, const IntervalList& list) const {
  const Mesh& mesh = layout.mesh();
  Peers peers;
  for_each_met(mesh, position_at(mesh, coordinates), varying, whole(layout.shape()[tensor_dim]),
               layout.cuts(tensor_dim), list, [&](int64_t elements, int64_t times) {
                 peers.count += times;
                 peers.elements += elements * times;
                 if (step_.rounds > 1) peers.by_length[std::min(elements, step_.rounds)] += times;
               });
  if (step_.rounds == 1 && peers.count > 0) peers.by_length[1] = peers.count;
  return peers;
}

bool reduces_natively(const Layout& layout, MeshDimSet mesh_dims, Lowering lowering) {
  if (!lowering.reduces) return false;
  for (const int d : mesh_dims.to_vector()) {
    const ReduceOp op = layout.placements()[d].op;
    if (op == ReduceOp::kBitAnd || op == ReduceOp::kBitOr || op == ReduceOp::kBitXor) return false;
  }
  const DType& dtype = layout.dtype();
  return dtype.kind() == DTypeKind::kFloat || (dtype.kind() == DTypeKind::kInteger && dtype != DType::kInt16);
}

bool reduces_natively(const Step& step, Lowering lowering) {
  return !step.ordered && reduces_natively(step.before, step.mesh_dims, lowering);
}

bool may_go_in_rounds(const Step& step, Lowering lowering) {
  return !is_local(step.op) && (step.op != StepOp::kAllReduce || !reduces_natively(step, lowering));
}

int64_t collectives_of(StepOp op, int64_t group_size, bool native) {
  return op == StepOp::kAllReduce && !native && group_size > 2 ? 2 : 1;
}

Traffic reduce_scatter_traffic(int64_t held, int64_t kept, int64_t k, int64_t item_bytes) {
  return {(k - 1) * kept * item_bytes, (held - kept) * item_bytes, kept > 0 ? k - 1 : 0, held > kept ? k - 1 : 0};
}

// Native: that of a ring, rounded up. Composed: contributions to this rank's chunk from every peer, then every peer's
// reduced chunk; two ranks simply exchange everything.
Traffic all_reduce_traffic(int64_t held, int64_t k, int64_t index, int64_t item_bytes, bool native) {
  if (native) {
    const int64_t bytes = (2 * held * item_bytes * (k - 1) + k - 1) / k;
    const int64_t messages = held > 0 ? 2 * (k - 1) : 0;
    return {bytes, bytes, messages, messages};
  }
  if (k == 2) return {held * item_bytes, held * item_bytes, held > 0 ? 1 : 0, held > 0 ? 1 : 0};
  const Interval mine = flat_chunk(held, k, index);
  const int64_t own = mine.end - mine.begin;
  const int64_t bytes = ((k - 1) * own + held - own) * item_bytes;
  const int64_t chunk = (held + k - 1) / k;
  const int64_t chunks = held > 0 ? (held + chunk - 1) / chunk : 0;
  const int64_t messages = chunks - (own > 0 ? 1 : 0) + (own > 0 ? k - 1 : 0);
  return {bytes, bytes, messages, messages};
}

int64_t index_in_group(const Mesh& mesh, int64_t position, MeshDimSet mesh_dims) {
  if (!mesh.ranks_are_positions()) {
    const std::vector<int64_t> group = mesh.group(position, mesh_dims);
    return std::find(group.begin(), group.end(), position) - group.begin();
  }
  int64_t index = 0;
  for (const int d : mesh_dims.to_vector()) index = index * mesh.dim_size(d) + mesh.coordinate(position, d);
  return index;
}

Interval flat_chunk(int64_t n, int64_t k, int64_t index) {
  const int64_t chunk = (n + k - 1) / k;
  return {std::min(index * chunk, n), std::min((index + 1) * chunk, n)};
}

}  // namespace shardwright
