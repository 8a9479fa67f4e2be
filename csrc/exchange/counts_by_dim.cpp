#include "exchange/counts_by_dim.h"

#include <algorithm>
#include <utility>

#include "exchange/axis_overlap.h"

namespace shardwright {

// Peers depend on the coordinates that determine the rank's part, and on the coordinates that it shares with all peers.
CountsByDim::CountsByDim(GroupMove& move) : move_(move), sources_(move.before.ndim()), receivers_(move.before.ndim()) {
  for (int t = 0; t < move.before.ndim(); ++t) {
    const MeshDimSet before = dims_of(move.before.cuts(t));
    const MeshDimSet after = dims_of(move.after.cuts(t));
    dims_.push_back({{move.mesh(), after | (before - move.cutting_dims)},
                     {move.mesh(), before | (after - move.cutting_dims)},
                     {move.mesh(), before | after}});
  }
}

Traffic CountsByDim::traffic(int64_t position) {
  int64_t own = 1;
  int64_t needed = 1;
  int64_t sent = move_.receivers_per_part;
  for (int t = 0; t < move_.before.ndim(); ++t) {
    ByCoordinates<Factors>& known = dims_[t].factors;
    const auto compute = [&] { return factors_at(t, position); };
    const Factors factors = known.fits_table() ? known.at(position, compute) : compute();
    own *= factors.own;
    needed *= factors.needed;
    sent *= factors.receivers->elements;
    sources_[t] = factors.sources;
    receivers_[t] = factors.receivers;
  }
  const int64_t to_itself = std::min(own, move_.rounds);
  const int64_t item = move_.before.dtype().size_bytes();
  return {(needed - own) * item, (sent - own) * item, num_messages(sources_) - to_itself,
          num_messages(receivers_) * move_.receivers_per_part - to_itself};
}

int64_t CountsByDim::reduce_scatter_messages(int64_t position) {
  std::vector<Peers> receivers;
  for (int t = 0; t < move_.before.ndim(); ++t) {
    receivers.push_back(count_peers(move_.after, t, position, move_.group_dims, move_.held.at(t, position).list));
  }
  std::vector<const Peers*> by_dim;
  for (const Peers& of_dim : receivers) by_dim.push_back(&of_dim);
  return num_messages(by_dim) -
         std::min(move_.needed.num_elements(position), move_.rounds);  // without messages to itself
}

CountsByDim::Factors CountsByDim::factors_at(int tensor_dim, int64_t position) {
  const KnownParts::Part& held = move_.held.at(tensor_dim, position);
  const KnownParts::Part& needed = move_.needed.at(tensor_dim, position);
  Dim& dim = dims_[tensor_dim];
  const auto count = [&](const Layout& layout, const IntervalList& list) {
    return count_peers(layout, tensor_dim, position, move_.cutting_dims, list);
  };
  return {intersection_length(held.list, needed.list), needed.length,
          &dim.sources.at(position, [&] { return count(move_.before, needed.list); }),
          &dim.receivers.at(position, [&] { return count(move_.after, held.list); })};
}

CountsByDim::Peers CountsByDim::count_peers(const Layout& layout, int tensor_dim, int64_t position, MeshDimSet varying,
                                            const IntervalList& list) const {
  Peers peers;
  for_each_overlap(layout.mesh(), layout.shape()[tensor_dim], layout.cuts(tensor_dim), position, varying, list,
                   [&](int64_t elements, int64_t times) {
                     peers.count += times;
                     peers.elements += elements * times;
                     if (move_.rounds > 1) peers.by_length[std::min(elements, move_.rounds)] += times;
                   });
  return peers;
}

// With several rounds, multiplies the counts of peers by length, tensor dim by tensor dim. A peer with e elements takes
// min(e, rounds) messages. Example: 4 rounds, two peers with 3 indices of dim 0, and one with 1 and one with 2 indices
// of dim 1. So two of the four combinations have 3 elements and two have 6: 2 * 3 + 2 * 4 = 14 messages.
int64_t CountsByDim::num_messages(const std::vector<const Peers*>& by_dim) const {
  if (move_.rounds == 1) {
    int64_t messages = 1;
    for (const Peers* peers : by_dim) messages *= peers->count;
    return messages;
  }
  std::map<int64_t, int64_t> all{{1, 1}};
  for (const Peers* peers : by_dim) {
    std::map<int64_t, int64_t> finer;
    for (const auto& [length, parts] : peers->by_length) {
      for (const auto& [elements, count] : all) finer[std::min(elements * length, move_.rounds)] += count * parts;
    }
    all = std::move(finer);
  }
  int64_t messages = 0;
  for (const auto& [elements, count] : all) messages += elements * count;
  return messages;
}

}  // namespace shardwright
