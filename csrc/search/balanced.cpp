#include "search/balanced.h"

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "exchange/grid_exchange.h"
#include "layout/positions.h"
#include "search/relays.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Maximum number of times that stripes are recomputed from the elements that ranks send.
constexpr int kMaxIterations = 3;
constexpr int64_t kMinUnits = 24;  // minimum number of units per stripe; see stripe_unit()

// The cut that makes the stripes.
struct StripedDim {
  int tensor_dim = 0;       // the tensor dim that it cuts
  int64_t list_length = 0;  // length of the lists that the cut divides
};

// Returns the cut by a mesh dim. Returns nullopt unless the mesh dim is the last to cut its tensor dim, and cuts lists
// of equal length into chunks.
std::optional<StripedDim> striped_dim(const Layout& stripes, int mesh_dim) {
  for (int t = 0; t < stripes.ndim(); ++t) {
    const std::vector<Cut>& cuts = stripes.cuts(t);
    if (cuts.empty() || cuts.back().mesh_dim != mesh_dim || !cuts.back().rule.is_chunks()) continue;
    const std::span<const Cut> before(cuts.data(), cuts.size() - 1);
    if (!cuts_evenly(stripes.mesh(), stripes.shape()[t], before)) return std::nullopt;
    return StripedDim{t, length(part_at(stripes.mesh(), stripes.shape()[t], before, 0))};
  }
  return std::nullopt;
}

// Divides `amount` units among workers such that the busiest worker does as little work as possible. Worker i has done
// done[i] work already, and each unit takes `work_per_unit` work. The shares may sum to a little more than `amount`.
//
// Example: done = {7, 14, 14, 14, 0, 0, 0, 0}, work_per_unit = 7, amount = 56. No worker should exceed a level of work;
// 56 is the least level up to which all workers together do at least 56 units: 7 + 6 + 6 + 6 + 8 + 8 + 8 + 8 = 57.
std::vector<int64_t> water_fill(const std::vector<int64_t>& done, int64_t work_per_unit, int64_t amount) {
  const auto share = [&](int64_t level, size_t worker) {
    return std::max<int64_t>(level - done[worker], 0) / work_per_unit;
  };
  int64_t low = 0;
  int64_t high = *std::max_element(done.begin(), done.end()) + work_per_unit * amount;
  while (low < high) {
    const int64_t level = low + (high - low) / 2;
    int64_t all = 0;
    for (size_t i = 0; i < done.size(); ++i) all += share(level, i);
    (all < amount ? low : high) = all < amount ? level + 1 : level;
  }
  std::vector<int64_t> shares;
  for (size_t i = 0; i < done.size(); ++i) shares.push_back(share(low, i));
  return shares;
}

// Returns the unit of stripe lengths: the largest power of two that divides the list and leaves kMinUnits units per
// stripe. A large unit allows many equal segments, because segments divide units.
int64_t stripe_unit(int64_t list_length, int64_t stripes) {
  int64_t unit = 1;
  while (list_length % (2 * unit) == 0 && list_length / (2 * unit) >= kMinUnits * stripes) unit *= 2;
  return unit;
}

// Returns lengths that sum to `length` and are in proportion to the shares, up to rounding.
std::vector<int64_t> proportional_lengths(const std::vector<int64_t>& shares, int64_t length) {
  __int128 all = 0;
  for (const int64_t share : shares) all += share;
  std::vector<int64_t> lengths;
  __int128 before = 0;
  int64_t begin = 0;
  for (const int64_t share : shares) {
    before += share;
    const auto end = static_cast<int64_t>((2 * before * length + all) / (2 * all));
    lengths.push_back(end - begin);
    begin = end;
  }
  return lengths;
}

// Returns the layout in which the stripes have these lengths, by coordinate.
Layout with_lengths(const Layout& stripes, const StripedDim& striped, const std::vector<int64_t>& lengths) {
  std::vector<std::vector<Cut>> cuts = stripes.cuts();
  cuts[striped.tensor_dim].back().rule = CutRule::ragged(lengths);
  return stripes.with(std::move(cuts), std::vector<Placement>(stripes.mesh().ndim(), Placement::replicate()));
}

// Returns, for each coordinate on `mesh_dim`, the elements that the busiest rank with this coordinate sends in the
// crossing.
std::vector<int64_t> sent_by_coordinate(const Layout& before, const Layout& stripes, int mesh_dim) {
  const GridExchange crossing(before, stripes, ReplicaPolicy::kEvenBytes);
  const Mesh& mesh = stripes.mesh();
  std::vector<int64_t> sent(mesh.dim_size(mesh_dim), 0);
  for (int64_t p = 0; p < mesh.size(); ++p) {
    int64_t& most = sent[mesh.coordinate(p, mesh_dim)];
    most = std::max(most, crossing.num_elements(mesh.rank_at(Position{p}), Direction::kSend));
  }
  return sent;
}

}  // namespace

std::optional<Layout> balanced_stripes(const Layout& before, const Layout& stripes, const Layout& goal) {
  const Mesh& mesh = stripes.mesh();
  std::optional<StripedDim> striped;
  int mesh_dim = -1;
  for (const int d : (stripes.cut_dims() - goal.cut_dims()).to_vector()) {
    const std::optional<StripedDim> found = striped_dim(stripes, d);
    if (!found || (mesh_dim >= 0 && mesh.dim_size(d) <= mesh.dim_size(mesh_dim))) continue;
    striped = found;
    mesh_dim = d;
  }
  if (!striped || striped->list_length == 0) return std::nullopt;
  const int64_t num_peers = mesh.dim_size(mesh_dim) - 1;
  const int64_t unit = stripe_unit(striped->list_length, num_peers + 1);
  // The elements that a rank holds once this mesh dim is gathered.
  std::vector<std::vector<Cut>> without = stripes.cuts();
  without[striped->tensor_dim].pop_back();
  const int64_t elements = stripes.with(std::move(without), std::vector<Placement>(mesh.ndim(), Placement::replicate()))
                               .largest_part_elements();
  Layout best = stripes;
  for (int iteration = 0; iteration < kMaxIterations; ++iteration) {
    const std::vector<int64_t> shares = water_fill(sent_by_coordinate(before, best, mesh_dim), num_peers, elements);
    std::vector<int64_t> lengths = proportional_lengths(shares, striped->list_length / unit);
    for (int64_t& length : lengths) length *= unit;
    best = with_lengths(stripes, *striped, lengths);
  }
  return best;
}

namespace {

// Maximum number of runs, over all receivers' parts, that are divided into stripes.
constexpr size_t kMaxRunsDivided = 1 << 12;

// A receiver: the ranks that differ only in mesh dims that cut other tensor dims. They need the same part of the tensor
// dim.
struct Receiver {
  IntervalList part;
  int64_t position = 0;  // the rank with coordinate 0 on mesh dims that cut other tensor dims
};

// The receivers of a layout, sorted by the part of the tensor dim that they need.
class Receivers {
 public:
  Receivers(const Layout& goal, int tensor_dim) : goal_(goal), tensor_dim_(tensor_dim) {
    const Mesh& mesh = goal.mesh();
    for (int t = 0; t < goal.ndim(); ++t) {
      if (t != tensor_dim) other_dims_ = other_dims_ | dims_of(goal.cuts(t));
    }
    for (int64_t p = 0; p < mesh.size(); ++p) {
      bool is_first = true;
      for (const int d : other_dims_.to_vector()) is_first = is_first && mesh.coordinate(p, d) == 0;
      if (!is_first) continue;
      all_.push_back({part_at(mesh, goal.shape()[tensor_dim], goal.cuts(tensor_dim), p), p});
      runs_ += all_.back().part.size();
    }
    // No two parts overlap, so parts with equal begins are equal. Empty parts come first.
    const auto begin_of = [](const Receiver& receiver) {
      return receiver.part.empty() ? -1 : receiver.part.front().begin;
    };
    std::stable_sort(all_.begin(), all_.end(),
                     [&](const Receiver& a, const Receiver& b) { return begin_of(a) < begin_of(b); });
  }

  // Returns false if the parts have too many runs to be divided into stripes.
  bool can_divide() const { return runs_ <= kMaxRunsDivided; }
  size_t size() const { return all_.size(); }
  const IntervalList& part(size_t i) const { return all_[i].part; }  // indices that the i-th receiver needs

  // Returns the number of consecutive receivers, from the i-th on, that need the part of the i-th.
  size_t num_equal_parts(size_t i) const {
    size_t end = i;
    while (end < all_.size() && all_[end].part == all_[i].part) ++end;
    return end - i;
  }

  // Returns the layout in which the i-th receiver has a stripe of lengths[i]. Its mesh has a dim of receivers, and the
  // mesh dims that cut other tensor dims.
  Layout layout_with(const std::vector<int64_t>& lengths) const {
    const Mesh& mesh = goal_.mesh();
    std::vector<std::string> names{"relay"};
    std::vector<int64_t> sizes{static_cast<int64_t>(all_.size())};
    std::vector<Placement> placements{Placement::cut(tensor_dim_, rule_of(stripes(lengths)))};
    std::vector<int> new_dims(mesh.ndim());  // by old mesh dim
    for (const int d : other_dims_.to_vector()) {
      new_dims[d] = static_cast<int>(names.size());
      names.push_back(concat("other.", mesh.dim_names()[d]));
      sizes.push_back(mesh.dim_size(d));
      placements.push_back(goal_.placements()[d]);
    }
    std::vector<int64_t> ranks;
    for (const Receiver& receiver : all_) {
      for (const int64_t p : positions_of(receiver.position)) {
        ranks.push_back(to_int(mesh.rank_at(Position{p})));
      }
    }
    ShardOrder order;
    for (int t = 0; t < goal_.ndim(); ++t) {
      for (const Cut& cut : goal_.cuts(t)) {
        if (t != tensor_dim_) order[t].push_back(new_dims[cut.mesh_dim]);
      }
    }
    return Layout(std::make_shared<Mesh>(std::move(names), std::move(sizes), ranks, mesh.topology()),
                  goal_.tensor_shape(), goal_.dtype(), std::move(placements), order, StridedMeaning::kLiteral,
                  goal_.flattened());
  }

  // Returns, by receiver, the elements that its busiest rank sends.
  std::vector<int64_t> sent(const GridExchange& crossing) const {
    std::vector<int64_t> all;
    for (const Receiver& receiver : all_) {
      all.push_back(0);
      for (const int64_t p : positions_of(receiver.position)) {
        all.back() = std::max(all.back(), crossing.num_elements(goal_.mesh().rank_at(Position{p}), Direction::kSend));
      }
    }
    return all;
  }

 private:
  // Returns the indices of each receiver if receivers of the same part divide it into stripes of these lengths.
  std::vector<std::vector<Interval>> stripes(const std::vector<int64_t>& lengths) const {
    std::vector<std::vector<Interval>> lists;
    int64_t begin = 0;
    for (size_t i = 0; i < all_.size(); ++i) {
      if (i == 0 || !(all_[i].part == all_[i - 1].part)) begin = 0;
      const IntervalList stripe = subrange(all_[i].part, begin, begin + lengths[i]);
      lists.emplace_back(stripe.begin(), stripe.end());
      begin += lengths[i];
    }
    return lists;
  }

  // Returns the positions of a receiver, row-major, given the position with coordinate 0 on mesh dims that cut other
  // tensor dims.
  std::vector<int64_t> positions_of(int64_t position) const {
    std::vector<int64_t> positions = positions_along(goal_.mesh(), other_dims_.to_vector());
    for (int64_t& p : positions) p += position;
    return positions;
  }

  const Layout& goal_;
  int tensor_dim_;
  MeshDimSet other_dims_;      // mesh dims that cut other tensor dims
  std::vector<Receiver> all_;  // sorted by part
  size_t runs_ = 0;            // number of runs of all parts together
};

}  // namespace

std::optional<Layout> balanced_relays(const Layout& before, const Layout& goal, int tensor_dim) {
  const Receivers receivers(goal, tensor_dim);
  const int64_t n = goal.shape()[tensor_dim];
  if (!receivers.can_divide() || goal.num_elements() == 0 || goal.replicated_dims().empty()) return std::nullopt;
  std::vector<std::vector<Cut>> without = goal.cuts();
  without[tensor_dim].clear();
  // The elements of a rank's part per index of the tensor dim.
  const int64_t elements_per_index =
      goal.with(std::move(without), std::vector<Placement>(goal.mesh().ndim(), Placement::replicate()))
          .largest_part_elements() /
      n;
  std::vector<int64_t> done(receivers.size(), 0);
  std::optional<Layout> best;
  for (int iteration = 0; iteration <= kMaxIterations; ++iteration) {
    std::vector<int64_t> lengths;
    for (size_t i = 0; i < receivers.size(); i += receivers.num_equal_parts(i)) {
      const size_t count = receivers.num_equal_parts(i);
      const int64_t length = shardwright::length(receivers.part(i));
      const int64_t unit = length == 0 ? 1 : stripe_unit(length, static_cast<int64_t>(count));
      const std::vector<int64_t> done_by_these(done.begin() + static_cast<int64_t>(i),
                                               done.begin() + static_cast<int64_t>(i + count));
      const std::vector<int64_t> shares =
          count > 1 && length > 0
              ? water_fill(done_by_these, static_cast<int64_t>(count) - 1, length * elements_per_index)
              : std::vector<int64_t>(count, 1);
      for (const int64_t units : proportional_lengths(shares, length / unit)) lengths.push_back(units * unit);
    }
    best = receivers.layout_with(lengths);
    done = receivers.sent(GridExchange(before, *best, ReplicaPolicy::kEvenBytes));
  }
  return best;
}

}  // namespace shardwright
