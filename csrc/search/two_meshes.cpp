#include "search/two_meshes.h"

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "cost/cost.h"
#include "exchange/grid_exchange.h"
#include "moves/segments.h"
#include "moves/step_counts.h"
#include "moves/traffic.h"
#include "search/balanced.h"
#include "search/choices.h"
#include "search/crossing_cost.h"
#include "search/leg.h"
#include "search/over_relays.h"
#include "search/split.h"

namespace shardwright {
namespace {

// Mesh dims of the destination are split if a plan takes longer than the lower bound by more than 1/8 of it.
constexpr int64_t kSplitsAboveFraction = 8;

// Relays are tried if they are estimated to save 1 / kRelaysAboveFraction of a plan's time. They are also tried if
// three conditions hold: the busiest rank of one side has kRelaysAboveRatio times as many messages in the crossing as
// that of the other side; its messages take 1 / kRelaysAboveFraction of the time; and the messages that relays save
// take longer than another step.
constexpr int64_t kRelaysAboveFraction = 4;
constexpr int64_t kRelaysAboveRatio = 4;
constexpr size_t kPairsWithRelays = 4;  // maximum number of pairs of layouts that are tried with relays

// Conditions under which pairs of layouts are tried as plans in segments.
constexpr int64_t kSegmentsAboveFraction = 20;  // sent bytes exceed received bytes by 1/20, and the time its bound too
constexpr int64_t kSegmentsAboveSteps = 8;      // minimum time bound, in latencies of a step: each segment pays them
constexpr size_t kPairsInSegments = 6;          // maximum number of these pairs
constexpr int64_t kMaxRanksTriedInSegments = 1024;  // maximum number of ranks of both meshes together

// Maximum number of overlaps of parts with which ReplicaPolicy::kNodeLocal is tried, because it lists all messages.
constexpr int64_t kMaxListedOverlaps = 1 << 16;

// The ranks and nodes of two meshes in common.
struct CommonRanks {
  bool shares_ranks = false;  // the two meshes have ranks in common
  bool shares_nodes = false;  // some node has ranks of both meshes
};

// Returns what two meshes have in common. A node is `ranks_per_node` consecutive ranks; with 0, all ranks are on one
// node.
CommonRanks common_ranks(const Mesh& a, const Mesh& b, int64_t ranks_per_node) {
  CommonRanks common;
  std::set<int64_t> nodes;
  const auto node_of = [&](Rank rank) { return ranks_per_node > 0 ? to_int(rank) / ranks_per_node : 0; };
  for (const Rank rank : a.ranks()) nodes.insert(node_of(rank));
  for (const Rank rank : b.ranks()) {
    common.shares_nodes = common.shares_nodes || nodes.contains(node_of(rank));
    common.shares_ranks = common.shares_ranks || a.position_of(rank).has_value();
  }
  return common;
}

// Tries pairs of a layout on each mesh in the order of lower bounds of their costs, so that most pairs are skipped
// before their moves are computed.
class Crossings {
 public:
  Crossings(const Layout& src, const Layout& goal, const PlanOptions& options, const Topology& topology, bool may_split)
      : src_(src),
        goal_(goal),
        options_(options),
        topology_(topology),
        cost_(options, topology),
        may_split_(may_split),
        tensor_dims_(tensor_dims_to_cut(src, goal)),
        common_(common_ranks(src.mesh(), goal.mesh(), topology.ranks_per_node)) {}

  // Returns the steps of the cheapest plan.
  std::vector<Step> cheapest() {
    for (const Layout& layout : layouts_before_crossing(src_, tensor_dims_, is_for_time())) {
      add_leg(before_, layout, src_, layout, options_, topology_);
    }
    add_legs_to(goal_);
    try_pair(before_.front(), after_.front());
    // If nothing is pending, the direct crossing receives and sends the fewest bytes.
    if (!is_for_time() && src_.partial_dims().empty()) return std::move(best_);
    try_pairs(0);
    const size_t known = after_.size();
    for (const Layout& goal : split_goals()) add_legs_to(goal);
    try_pairs(known);
    if (!is_for_time()) return std::move(best_);
    try_relays();
    if (options_.segments) prefer_in_segments();
    return std::move(best_);
  }

 private:
  // Tries the pairs of a leg in before_ and a leg in after_ whose lower bound is below the best cost. Leaves out the
  // first `first` legs of after_, and the pair of the first legs, which cheapest() tries.
  void try_pairs(size_t first) {
    struct Pair {  // one leg of each side
      Cost cost_bound;
      size_t before;  // index in before_
      size_t after;   // index in after_
      auto operator<=>(const Pair&) const = default;
    };
    std::vector<Pair> pairs;
    for (size_t i = 0; i < before_.size(); ++i) {
      for (size_t j = first; j < after_.size(); ++j) {
        const Cost least = before_[i].cost_bound + crossing_lower_bound(before_[i], after_[j]) + after_[j].cost_bound;
        if (i + j > 0 && least < *best_cost_) pairs.push_back({least, i, j});
      }
    }
    std::sort(pairs.begin(), pairs.end());
    for (const Pair& pair : pairs) {
      if (*best_cost_ <= pair.cost_bound) break;
      try_pair(before_[pair.before], after_[pair.after]);
    }
  }

  // Replaces the best plan by a plan that is faster in segments, if one is found. In segments the time depends on the
  // work of one rank in all steps together, not on the sum of the steps' busiest ranks. So pairs of legs are tried in
  // the order of segmented_time_bound(), and also with balanced stripes and balanced relays (search/balanced.h).
  void prefer_in_segments() {
    // Only ranks of both meshes send both in the crossing and after it. If no more is sent than received, shorter
    // stripes for them do not make the plan faster.
    const bool is_balanced = best_sent_bytes_ <= best_received_bytes_ + best_received_bytes_ / kSegmentsAboveFraction;
    if (!common_.shares_ranks || is_balanced) return;
    if (!may_have_segments()) return;
    const int64_t bound = least_picoseconds_between(src_, goal_, topology_);
    if (bound < kSegmentsAboveSteps * topology_.step_ps) return;
    int64_t least = time_in_segments(best_);
    if (least <= bound + bound / kSegmentsAboveFraction) return;
    std::vector<std::tuple<int64_t, size_t, size_t>> pairs;
    for (size_t i = 0; i < before_.size(); ++i) {
      for (size_t j = 0; j < after_.size(); ++j) {
        const int64_t time = segmented_time_bound(before_[i], after_[j]);
        if (time < least) pairs.emplace_back(time, i, j);
      }
    }
    std::sort(pairs.begin(), pairs.end());
    if (pairs.size() > kPairsInSegments) pairs.resize(kPairsInSegments);
    const auto try_steps = [&](std::vector<Step> steps) {
      if (segmented_time_bound(steps) >= least) return;
      const int64_t time = time_in_segments(steps);
      if (time >= least) return;
      least = time;
      best_ = std::move(steps);
    };
    std::set<size_t> tried;  // indices in before_ that were tried with balanced relays
    for (const auto& [time_bound, i, j] : pairs) {
      Leg& first = before_[i];
      first.find_steps(options_, topology_);
      after_[j].find_steps(options_, topology_);
      std::vector<Leg> lasts{after_[j]};
      if (const std::optional<Layout> stripes = balanced_stripes(first.layout, after_[j].layout, after_[j].to)) {
        add_leg(lasts, *stripes, *stripes, after_[j].to, options_, topology_);
      }
      for (Leg& last : lasts) {
        last.find_steps(options_, topology_);
        try_steps(joined_steps(first, {cost_.cheapest(first.layout, last.layout)->first}, last));
      }
      if (!tried.insert(i).second) continue;
      for (int t = 0; t < goal_.ndim(); ++t) {
        const std::optional<Layout> relays = balanced_relays(first.layout, goal_, t);
        if (!relays || relays->mesh() == first.layout.mesh() || relays->mesh() == goal_.mesh()) continue;
        if (options_.max_held > 0 && relays->largest_part_elements() > options_.max_held) continue;
        std::vector<Step> crossings{cost_.cheapest(first.layout, *relays)->first,
                                    cost_.cheapest(*relays, goal_)->first};
        try_steps(joined_steps(first, std::move(crossings), after_.front()));
      }
    }
  }

  // Return a lower bound on the time of these legs and their crossing, or of these steps, in any number of segments.
  int64_t segmented_time_bound(const Leg& first, const Leg& last) const {
    const std::array<int64_t, 3> times{first.cost_bound.first, crossing_lower_bound(first, last).first,
                                       last.cost_bound.first};
    const int64_t moves = std::count_if(times.begin(), times.end(), [](int64_t time) { return time > 0; });
    return segments_lower_bound(times, moves * topology_.step_ps);
  }

  int64_t segmented_time_bound(const std::vector<Step>& steps) const {
    std::vector<int64_t> times;
    int64_t latencies = 0;
    for (const Step& step : steps) {
      times.push_back(predicted_picoseconds(step, options_.lowering, topology_));
      latencies += is_local(step.op) ? 0 : topology_.step_ps;
    }
    return segments_lower_bound(times, latencies);
  }

  // Returns false if there are too many ranks for segments.
  bool may_have_segments() const {
    const Plan plan{src_, goal_, options_.lowering, Objective::kTime, topology_, false, {}};
    const auto ranks = static_cast<int64_t>(ranks_of(plan).size());
    if (ranks <= kMaxRanksInNonUniformSegments) return true;
    for (int t = 0; t < src_.ndim() && ranks <= kMaxRanksTriedInSegments; ++t) {
      if (block_length(plan, t) > 1) return true;
    }
    return false;
  }

  // Returns the predicted time of these steps in the best segments, in picoseconds.
  int64_t time_in_segments(const std::vector<Step>& steps) const {
    const Plan plan{src_, goal_, options_.lowering, Objective::kTime, topology_, false, steps};
    return best_timed_segments(plan).picoseconds;
  }

  // Tries pairs of legs with relays between them, in the order of the legs' time plus the estimated time of the relays.
  void try_relays() {
    const auto [fewer, messages] = std::minmax(best_crossing_.messages, best_crossing_.sent_messages);
    const bool fans_out = best_crossing_.sent_messages == messages;
    if (!relays_may_save_messages(fewer, messages) && !relays_may_save_time(fans_out)) return;
    std::vector<std::tuple<int64_t, size_t, size_t>> pairs;
    std::vector<Leg>& many = fans_out ? after_ : before_;  // the legs next to the ranks that relays stand for
    std::vector<Leg>& few = fans_out ? before_ : after_;
    for (size_t i = 0; i < many.size(); ++i) {
      if (fans_out && begins_with_goal_parts(many[i])) continue;
      const RelayShapes shapes(many[i].layout, topology_);
      std::map<int64_t, int64_t> picoseconds;  // by the number of replicas of `few`
      for (size_t j = 0; j < few.size(); ++j) {
        const Cost legs_cost = many[i].cost_bound + few[j].cost_bound;
        if (!may_improve(legs_cost)) continue;
        const int64_t replicas = few[j].layout.mesh().group_size(few[j].layout.replicated_dims());
        const auto [known, is_new] = picoseconds.emplace(replicas, 0);
        if (is_new) known->second = shapes.all(replicas).front().picoseconds;
        pairs.emplace_back(legs_cost.first + known->second, fans_out ? j : i, fans_out ? i : j);
      }
    }
    std::sort(pairs.begin(), pairs.end());
    if (pairs.size() > kPairsWithRelays) pairs.resize(kPairsWithRelays);
    for (const auto& [estimate, i, j] : pairs) try_relays_between(before_[i], after_[j], fans_out);
  }

  // Returns true if the three conditions of kRelaysAboveFraction hold. Of the most messages that a rank sends in the
  // crossing and the most that a rank receives, `messages` is the larger number and `fewer` the smaller one.
  bool relays_may_save_messages(int64_t fewer, int64_t messages) const {
    const int64_t latency = saturating_product(messages, best_link_.message_ps);
    if (messages < kRelaysAboveRatio * fewer || latency < best_cost_->first / kRelaysAboveFraction) return false;
    int64_t root = 1;  // messages per crossing if there are two
    while (root * root < messages) ++root;
    return saturating_product(messages - 2 * root, best_link_.message_ps) > topology_.step_ps;
  }

  // Returns true if relays from source to goal are estimated, from sizes alone, to be much faster than the best plan.
  bool relays_may_save_time(bool fans_out) const {
    const Layout& many = fans_out ? goal_ : before_.front().layout;
    const Layout& few = fans_out ? before_.front().layout : goal_;
    const int64_t replicas = few.mesh().group_size(few.replicated_dims());
    const int64_t over_relays = RelayShapes(many, topology_).all(replicas).front().picoseconds;
    return best_cost_->first - best_cost_->first / kRelaysAboveFraction > over_relays;
  }

  // Returns true if the leg after the crossing begins with the goal, on a mesh on which one of its mesh dims is split.
  bool begins_with_goal_parts(const Leg& last) const {
    if (last.layout.mesh() == goal_.mesh()) return false;
    const std::optional<Layout> rejoined = joined(last.layout, goal_.mesh_ptr());
    return rejoined && *rejoined == goal_;
  }

  // Tries relays between two legs. Relays stand for ranks of `last` if `fans_out`, else for ranks of `first`.
  void try_relays_between(Leg& first, Leg& last, bool fans_out) {
    first.find_steps(options_, topology_);
    last.find_steps(options_, topology_);
    const Cost legs_cost = first.cost_bound + last.cost_bound;
    std::optional<OverRelays> found =
        cheapest_over_relays(first.layout, last.layout, fans_out, options_, topology_,
                             [&](const Cost& crossings) { return may_improve(legs_cost + crossings); });
    if (found) set_best(legs_cost + found->cost, first, std::move(found->crossings), last);
  }

  // Makes the steps of these legs and crossings the best plan.
  void set_best(const Cost& total, const Leg& first, std::vector<Step> crossings, const Leg& last) {
    best_cost_ = total;
    best_ = joined_steps(first, std::move(crossings), last);
  }

  // Returns the steps of a plan in order.
  static std::vector<Step> joined_steps(const Leg& first, std::vector<Step> crossings, const Leg& last) {
    std::vector<Step> steps = *first.steps;
    for (Step& step : crossings) steps.push_back(std::move(step));
    steps.insert(steps.end(), last.steps->begin(), last.steps->end());
    return steps;
  }

  bool is_for_time() const { return cost_.is_for_time(); }

  // Adds legs after the crossing that end with `goal`.
  void add_legs_to(const Layout& goal) {
    for (const Layout& layout : layouts_after_crossing(goal, tensor_dims_, is_for_time())) {
      add_leg(after_, layout, layout, goal, options_, topology_);
    }
  }

  // Returns the goals in which the largest replicated mesh dim is split, if the best plan so far is far above the lower
  // bound. The leg after the crossing then has several steps: within nodes, and to many ranks in few messages.
  std::vector<Layout> split_goals() const {
    int largest = -1;
    for (const int d : goal_.replicated_dims().to_vector()) {
      if (largest < 0 || goal_.mesh().dim_size(d) > goal_.mesh().dim_size(largest)) largest = d;
    }
    if (!may_split_ || !is_for_time() || largest < 0) return {};
    const std::vector<std::vector<int64_t>> ways = topology_.mesh_dims.contains(goal_.mesh().dim_names()[largest])
                                                       ? std::vector<std::vector<int64_t>>{}
                                                       : ways_to_split(goal_.mesh(), largest, topology_.ranks_per_node);
    if (ways.empty()) return {};
    const int64_t least = least_picoseconds_between(src_, goal_, topology_);
    if (best_cost_->first <= least + least / kSplitsAboveFraction) return {};
    std::vector<Layout> goals;
    for (const std::vector<int64_t>& sizes : ways) {
      std::optional<Layout> goal = split(goal_, largest, sizes);
      // The source's mesh may be the split mesh; a step from it to the split goal is then no crossing.
      if (goal && !(goal->mesh() == src_.mesh())) goals.push_back(std::move(*goal));
    }
    return goals;
  }

  // Returns a lower bound on the cost of the crossing between two legs, from sizes alone. A rank of both meshes may
  // already hold some of the elements that it needs.
  Cost crossing_lower_bound(const Leg& first, const Leg& last) const {
    const int64_t item = src_.dtype().size_bytes();
    StepCounts least;
    least.received_bytes = (last.elements - (common_.shares_ranks ? first.elements : 0)) * item;
    least.touched_bytes = last.elements * item;
    if (last.elements == 0 || least.received_bytes <= 0) {
      return {is_for_time() ? picoseconds_for(least.touched_bytes, topology_.memory_ps_per_kib) : 0, 0, 0, 0};
    }
    if (!is_for_time()) return {least.received_bytes, 0, 0, 0};
    least.messages = std::max<int64_t>(least.received_bytes / item / std::max<int64_t>(first.elements, 1), 1);
    return {predicted_picoseconds(false, least, fastest_link(), topology_), 0, 0, 0};
  }

  // Returns the best latency and the best bandwidth of all links that a crossing may use.
  Link fastest_link() const {
    if (!common_.shares_nodes) return topology_.between;
    return {std::min(topology_.inside.message_ps, topology_.between.message_ps),
            std::min(topology_.inside.ps_per_kib, topology_.between.ps_per_kib)};
  }

  // Returns true if a plan with this lower bound on its cost may be cheaper than the best plan so far.
  bool may_improve(const Cost& cost_bound) const { return !best_cost_ || cost_bound < *best_cost_; }

  // Tries the crossing between two legs, unless lower bounds show that the plan is not cheaper than the best.
  void try_pair(Leg& first, Leg& last) {
    const Cost crossing = crossing_lower_bound(first, last);
    first.find_steps(options_, topology_);
    if (!may_improve(first.cost_bound + crossing + last.cost_bound)) return;
    last.find_steps(options_, topology_);
    if (!may_improve(first.cost_bound + crossing + last.cost_bound)) return;
    try_crossing(first, last);
  }

  // Tries replica policies: whole messages; even bytes, if some rank sends more than any receives; and node-local, if
  // nodes have ranks of both meshes. Objective kBytes tries even bytes only: the policy does not change its cost, and
  // even bytes make the busiest rank send least.
  void try_crossing(const Leg& first, const Leg& last) {
    const GridExchange crossing(first.layout, last.layout,
                                is_for_time() ? ReplicaPolicy::kWholeMessages : ReplicaPolicy::kEvenBytes);
    if (try_policy(first, last, crossing) && is_for_time()) {
      try_policy(first, last, crossing.with_policy(ReplicaPolicy::kEvenBytes));
    }
    const bool has_replicas = first.layout.mesh().group_size(first.layout.replicated_dims()) > 1;
    const bool may_prefer_nodes = is_for_time() && has_replicas && common_.shares_nodes && topology_.ranks_per_node > 0;
    if (may_prefer_nodes && crossing.num_overlaps() <= kMaxListedOverlaps) {
      try_policy(first, last, crossing.with_policy(ReplicaPolicy::kNodeLocal, topology_.ranks_per_node));
    }
  }

  // Tries a crossing with its policy. Returns true if some rank sends more in it than any rank receives.
  bool try_policy(const Leg& first, const Leg& last, const GridExchange& crossing) {
    const ReplicaPolicy policy = crossing.policy();
    Step step{StepOp::kCross, {}, first.layout, last.layout, policy};
    if (policy == ReplicaPolicy::kNodeLocal) step.ranks_per_node = topology_.ranks_per_node;
    const Cost legs_cost = first.cost_bound + last.cost_bound;
    const StepCounts least = crossing.maxima_lower_bound();
    // Bytes of kNodeLocal take several links, so the bound does not apply, and its listed messages are counted quickly.
    const bool is_worse =
        policy != ReplicaPolicy::kNodeLocal && !may_improve(legs_cost + cost_.of(step, crossing, least));
    if (is_worse) return least.sent_bytes > least.received_bytes;
    const StepCounts maxima = crossing.totals().maxima;
    const Cost total = legs_cost + cost_.of(step, crossing, maxima);
    if (may_improve(total)) {
      set_best(total, first, {std::move(step)}, last);
      best_crossing_ = maxima;
      best_link_ = link_of(crossing, topology_);
      best_sent_bytes_ = first.sent_bytes + maxima.sent_bytes + last.sent_bytes;
      best_received_bytes_ = first.received_bytes + maxima.received_bytes + last.received_bytes;
    }
    return maxima.sent_bytes > maxima.received_bytes;
  }

  const Layout& src_;
  const Layout& goal_;
  const PlanOptions& options_;
  const Topology& topology_;
  const CrossingCost cost_;
  const bool may_split_;
  std::vector<int> tensor_dims_;
  CommonRanks common_;
  std::vector<Leg> before_;        // legs from src_ to the crossing
  std::vector<Leg> after_;         // legs from the crossing to goal_ or to a split goal
  std::optional<Cost> best_cost_;  // cost of best_; without a value until a plan is known
  std::vector<Step> best_;         // steps of the best plan so far
  // The best plan without relays.
  StepCounts best_crossing_;         // counts of its crossing
  Link best_link_;                   // link of its crossing
  int64_t best_sent_bytes_ = 0;      // sum over steps of the bytes that the busiest rank sends
  int64_t best_received_bytes_ = 0;  // sum over steps of the bytes that the busiest rank receives
};

}  // namespace

std::vector<Step> cheapest_crossing(const Layout& src, const Layout& goal, const PlanOptions& options,
                                    const Topology& topology, bool may_split) {
  return Crossings(src, goal, options, topology, may_split).cheapest();
}

}  // namespace shardwright
