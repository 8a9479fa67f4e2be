#include "search/over_relays.h"

#include <algorithm>
#include <utility>

#include "exchange/grid_exchange.h"
#include "moves/step_counts.h"
#include "search/relays.h"
#include "support/ceil_divide.h"

namespace shardwright {
namespace {

// Maximum number of shapes for which plans are computed, and of their levels between nodes and within nodes.
constexpr size_t kMaxShapes = 3;
constexpr int64_t kMaxLevels = 12;
constexpr int64_t kMaxLevelsInside = 3;

// Returns the number of messages that each rank sends in every crossing but the first, such that the sum over all
// crossings is smallest. `many` is the number of ranks to reach; `few` ranks send in the first crossing.
//
// Example: few = 1, many = 2048, levels = 2. With 45 messages per relay, ceil(2048 / 46) = 45 relays are needed, so the
// sum is 45 + 45; no other number has a smaller sum.
int64_t messages_per_relay(int64_t few, int64_t many, int64_t levels) {
  int64_t best = 1;
  int64_t least = many + levels;
  // Stops once the messages of the later crossings alone are as many as the smallest sum so far.
  for (int64_t messages = 1; levels > 1 && (levels - 1) * messages < least; ++messages) {
    int64_t left = many;
    for (int64_t i = 1; i < levels; ++i) left = ceil_divide(left, messages + 1);
    const int64_t all = ceil_divide(left, few) + (levels - 1) * messages;
    if (left < 2 || all >= least) continue;
    least = all;
    best = messages;
  }
  return best;
}

// Returns the smallest block size b with b^levels >= ranks: blocks of blocks, `levels` deep, then have all ranks.
int64_t min_block_size(int64_t ranks, int64_t levels) {
  int64_t block = 2;
  const auto has_all = [&] {
    int64_t reached = 1;
    for (int64_t i = 0; i < levels && reached < ranks; ++i) reached = saturating_product(reached, block);
    return reached >= ranks;
  };
  while (!has_all()) ++block;
  return block;
}

}  // namespace

RelayShapes::RelayShapes(const Layout& many, const Topology& topology) : topology_(topology) {
  const int64_t replicas = many.mesh().group_size(many.replicated_dims());
  members_ = std::max<int64_t>(ranks_with_elements(many), 1);
  parts_ = std::max<int64_t>(members_ / replicas, 1);
  bytes_ = many.largest_part_bytes();
}

// Returns the estimated time of all crossings. In each crossing a rank sends its messages one after the other, each
// with a relay's part.
int64_t RelayShapes::time(const Shape& shape, int64_t few) const {
  int64_t all = 0;
  int64_t reached = members_;
  const auto add_crossing = [&](int64_t messages, const Link& link) {
    const int64_t bytes = bytes_ * ceil_divide(parts_, reached);
    const int64_t each = saturating_sum(link.message_ps, picoseconds_for(bytes, link.ps_per_kib));
    all = saturating_sum(all, saturating_sum(topology_.step_ps, saturating_product(messages, each)));
  };
  if (shape.levels_inside > 0) {
    const int64_t block = min_block_size(topology_.ranks_per_node, shape.levels_inside);
    const int64_t nodes = ceil_divide(members_, topology_.ranks_per_node);
    for (int64_t i = 0; i < shape.levels_inside; ++i) {
      add_crossing(block - 1, topology_.inside);
      reached = std::max(ceil_divide(reached, block), nodes);
    }
  }
  const Link& link = topology_.ranks_per_node > 0 ? topology_.between : topology_.inside;
  const int64_t messages = messages_per_relay(few, reached, shape.levels);
  for (int64_t i = 1; i < shape.levels; ++i) {
    add_crossing(messages, link);
    reached = ceil_divide(reached, messages + 1);
  }
  add_crossing(ceil_divide(reached, few), link);
  return all;
}

std::vector<RelayShapes::Shape> RelayShapes::all(int64_t few) const {
  const bool has_nodes = topology_.ranks_per_node > 1 && members_ > topology_.ranks_per_node;
  std::vector<Shape> shapes;
  for (int64_t inside = 0; inside <= (has_nodes ? kMaxLevelsInside : 0); ++inside) {
    const int64_t least = inside == 0 ? 2 : 1;
    for (int64_t levels = least; levels <= kMaxLevels; ++levels) {
      shapes.push_back({0, levels, inside});
      shapes.back().picoseconds = time(shapes.back(), few);
      const bool takes_longer = levels > least && shapes.back().picoseconds > shapes[shapes.size() - 2].picoseconds;
      if (takes_longer) break;
    }
  }
  std::sort(shapes.begin(), shapes.end());
  return shapes;
}

namespace {

// Tries relays between two layouts. The *many* side is the layout whose ranks the relays stand for, the *few* side the
// other layout.
class RelaySearch {
 public:
  RelaySearch(const Layout& from, const Layout& to, bool fans_out, const PlanOptions& options, const Topology& topology,
              const std::function<bool(const Cost&)>& is_worth)
      : from_(from),
        to_(to),
        fans_out_(fans_out),
        options_(options),
        topology_(topology),
        cost_(options, topology),
        is_worth_(is_worth) {}

  // Returns the cheapest crossings over relays, or nullopt if is_worth accepts none.
  std::optional<OverRelays> cheapest() {
    int64_t wanted = 1;  // number of relays with which all ranks send and receive equally many messages
    while (wanted * wanted < from_.mesh().size() * to_.mesh().size()) ++wanted;
    for (Layout& relays : relays_of(many(), wanted)) {
      if (is_allowed(relays)) try_relays({std::move(relays)});
    }
    const RelayShapes shapes(many(), topology_);
    const int64_t few = num_senders(shapes.members());
    // Shapes are computed from sizes alone, so some have no relays: for example within nodes of one rank each.
    for (size_t tried = 0; const RelayShapes::Shape& shape : shapes.all(few)) {
      if (tried == kMaxShapes) break;
      auto relays = relays_in(shape, few, shapes.members());
      if (!relays) continue;
      ++tried;
      try_relays(std::move(*relays));
    }
    return std::move(best_);
  }

 private:
  const Layout& many() const { return fans_out_ ? to_ : from_; }
  const Layout& few() const { return fans_out_ ? from_ : to_; }
  // Returns true if is_worth accepts this cost and no cheaper crossings were found.
  bool improves(const Cost& cost) const { return is_worth_(cost) && (!best_ || cost < best_->cost); }
  // Returns true if no relay holds more than options.max_held.
  bool is_allowed(const Layout& relays) const {
    return options_.max_held == 0 || relays.largest_part_elements() <= options_.max_held;
  }

  // Estimates how many ranks of few() send at the same time in the first crossing: enough to reach all `members` of
  // many() once, if each reaches the mean number of ranks whose parts overlap its own. With fan-in, they receive in the
  // last crossing.
  int64_t num_senders(int64_t members) const {
    const int64_t overlaps = GridExchange(from_, to_, ReplicaPolicy::kWholeMessages).num_overlaps();
    const int64_t size = few().mesh().size();
    return std::clamp<int64_t>(members * size / std::max<int64_t>(overlaps, 1), 1, size);
  }

  // Returns the layouts of a shape's relays, the ones next to many() first; nullopt if there are none.
  std::optional<std::vector<Layout>> relays_in(const RelayShapes::Shape& shape, int64_t ranks_of_few,
                                               int64_t members) const {
    std::vector<Layout> all;
    const auto add = [&](int64_t block, int64_t ranks_per_node) {
      std::optional<Layout> relays = relays_in_blocks(all.empty() ? many() : all.back(), block, ranks_per_node);
      if (!relays || !is_allowed(*relays)) return false;
      all.push_back(std::move(*relays));
      return true;
    };
    for (int64_t i = shape.levels_inside; i > 0; --i) {
      const int64_t ranks = topology_.ranks_per_node;
      if (!add(i > 1 ? min_block_size(ranks, shape.levels_inside) : ranks, ranks)) return std::nullopt;
    }
    const int64_t messages =
        messages_per_relay(ranks_of_few, all.empty() ? members : all.back().mesh().size(), shape.levels);
    for (int64_t i = 1; i < shape.levels; ++i) {
      if (!add(messages + 1, 0)) return std::nullopt;
    }
    return all;
  }

  // Tries relays that are given in order from many() to few().
  void try_relays(std::vector<Layout> stops) {
    stops.insert(stops.begin(), many());
    stops.push_back(few());
    if (fans_out_) std::reverse(stops.begin(), stops.end());
    OverRelays route;
    for (size_t i = 0; i + 1 < stops.size(); ++i) {
      if (stops[i].mesh() == stops[i + 1].mesh()) return;
      auto crossing =
          cost_.cheapest(stops[i], stops[i + 1], [&](const Cost& cost) { return improves(route.cost + cost); });
      if (!crossing) return;
      route.crossings.push_back(std::move(crossing->first));
      route.cost = route.cost + crossing->second;
    }
    if (improves(route.cost)) best_ = std::move(route);
  }

  const Layout& from_;
  const Layout& to_;
  const bool fans_out_;
  const PlanOptions& options_;
  const Topology& topology_;
  const CrossingCost cost_;
  const std::function<bool(const Cost&)>& is_worth_;
  std::optional<OverRelays> best_;
};

}  // namespace

std::optional<OverRelays> cheapest_over_relays(const Layout& from, const Layout& to, bool fans_out,
                                               const PlanOptions& options, const Topology& topology,
                                               const std::function<bool(const Cost&)>& is_worth) {
  return RelaySearch(from, to, fans_out, options, topology, is_worth).cheapest();
}

}  // namespace shardwright
