// A* search. A node is a layout (states.h) with a set of pending reductions.
//
// Many plans are one move that costs exactly its lower bound. They are returned before any state is made.
// search_test.cpp compares the results with a search that uses no bounds.
#include "search/search.h"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <queue>
#include <tuple>

#include "cost/cost.h"
#include "moves/move.h"
#include "moves/move_table.h"
#include "search/states.h"
#include "support/error.h"

namespace shardwright {
namespace {

// A node of the search, with the cheapest known path to it.
struct Node {
  MoveTable::State state;
  Cost bound_to_goal;           // lower bound on the cost from here to the goal
  std::optional<Cost> reached;  // cost of the cheapest known path to the node; empty: no path is known
  MoveTable::Move last_move{};  // the last move of this path
  int previous = -1;            // the node before the last move
  bool is_expanded = false;     // the moves from this node have been tried
};

// Lower bounds on the latency of moves that bring a rank the data of several ranks. In steps of m1, m2, ... messages, a
// rank can get the data of at most (m1 + 1)(m2 + 1)... ranks, itself included.
//
// Example: the data of 8 ranks takes one step of 7 messages, two steps of 2 messages each (3 x 3 >= 8), or three steps
// of 1 message each (2 x 2 x 2 = 8). At 12 us per step and 1 us per message these take 19, 28 and 39 us. So the bound
// is 19 us for one or more steps, and 28 us for two or more.
class LatencyBound {
 public:
  // `inside` has the best values of all links, and `between` those of links between nodes. `node_size` is the number of
  // ranks along all mesh dims within nodes.
  LatencyBound(int64_t step_ps, const Link& inside, const Link& between, int64_t node_size)
      : step_ps_(step_ps), inside_(inside), between_(between), node_size_(node_size) {}

  // Returns the bound, in picoseconds, for `steps` or more moves that bring a rank the data of `ranks` ranks.
  // `needs_other_nodes` is true if some of these ranks are on other nodes.
  int64_t lower_bound(int64_t steps, int64_t ranks, bool needs_other_nodes) {
    const auto [entry, is_new] = known_.emplace(std::tuple{steps, ranks, needs_other_nodes}, 0);
    if (is_new) entry->second = compute(steps, ranks, needs_other_nodes);
    return entry->second;
  }

 private:
  // Data from another node may be forwarded within the node. So this function tries all ways to write `ranks`, rounded
  // up, as a number of ranks reached between nodes times a number of ranks reached within a node.
  int64_t compute(int64_t steps, int64_t ranks, bool needs_other_nodes) const {
    if (!needs_other_nodes) return at_least_steps(inside_, steps, ranks);
    int64_t best = at_least_steps(between_, steps, ranks);
    for (int64_t inside = 2; inside <= std::min(node_size_, ranks); ++inside) {
      const int64_t between = at_least_steps(between_, std::max<int64_t>(steps - 1, 1),
                                             std::max<int64_t>((ranks + inside - 1) / inside, 2));
      best = std::min(best, between + at_least_steps(inside_, 1, inside));
    }
    return best;
  }

  // Returns the bound for `steps` or more steps over one kind of link.
  int64_t at_least_steps(const Link& link, int64_t steps, int64_t ranks) const {
    int64_t best = exactly_steps(link, steps, ranks);
    // More steps than are needed with one message each cannot help.
    for (int64_t reached = int64_t{1} << steps; reached < 2 * ranks; reached *= 2) {
      best = std::min(best, exactly_steps(link, ++steps, ranks));
    }
    return best;
  }

  // Returns the bound for exactly `steps` steps over one kind of link. A step of m messages multiplies the number of
  // ranks by m + 1. The sum of the messages is smallest if every step multiplies by r or r + 1, where r is the largest
  // number with r^steps <= ranks.
  int64_t exactly_steps(const Link& link, int64_t steps, int64_t ranks) const {
    int64_t r = steps == 1 ? ranks : 1;
    while (!reaches(r + 1, steps, 0, ranks + 1)) ++r;
    int64_t more = 0;  // number of steps that multiply by r + 1
    while (!reaches(r, steps - more, more, ranks)) ++more;
    const int64_t messages = std::max(steps * (r - 1) + more, steps);
    return steps * step_ps_ + saturating_product(messages, link.message_ps);
  }

  // Returns true if r^low * (r + 1)^high is at least `ranks`.
  static bool reaches(int64_t r, int64_t low, int64_t high, int64_t ranks) {
    int64_t product = 1;
    for (int64_t i = 0; i < low + high && product < ranks; ++i) product *= i < low ? r : r + 1;
    return product >= ranks;
  }

  int64_t step_ps_;
  Link inside_;
  Link between_;
  int64_t node_size_;
  std::map<std::tuple<int64_t, int64_t, bool>, int64_t> known_;
};

// One search. Source and goal are its first nodes. Others are made only if the direct move is not proved optimal.
class Search {
 public:
  Search(const Layout& src, const Layout& goal, const PlanOptions& options, const Topology& topology)
      : src_(src),
        goal_(goal),
        options_(options),
        topology_(topology),
        between_nodes_(dims_between_nodes(src.mesh(), topology)),
        table_(src, options.lowering, options.ordered, between_nodes_),
        goal_partials_(src.partial_dims() & goal.partial_dims()),
        links_(links_of(src.mesh(), topology)),
        fastest_(fastest_of(MeshDimSet::from_bits(~0u))),
        fastest_between_(fastest_of(between_nodes_)),
        latency_(topology.step_ps, fastest_, fastest_between_,
                 src.mesh().size() / src.mesh().group_size(between_nodes_)),
        item_bytes_(src.dtype().size_bytes()) {
    add_node(table_.state(src.cuts(), src.partial_dims()));
    add_node(table_.state(goal.cuts(), goal_partials_));
    nodes_[kSource].reached = Cost();
  }

  // Returns a lower bound on Cost::first from source to goal: picoseconds, or bytes under the objective "bytes".
  int64_t lower_bound() { return lower_bound_to_goal(nodes_[kSource].state).first; }

  // Returns the cheapest sequence of steps.
  std::vector<Step> cheapest_steps() {
    if (nodes_[kSource].state == nodes_[kGoal].state) return {};
    if (const auto direct = table_.move(nodes_[kSource].state, nodes_[kGoal].state, options_.groups)) {
      try_move(kSource, kGoal, *direct);
      if (is_local(direct->op) || nodes_[kGoal].reached->first <= lower_bound_to_goal(nodes_[kSource].state).first)
        return path();
    }
    make_nodes();
    while (true) {
      const int next = pop_cheapest_open();
      if (next < 0 && !allows_slow_moves_) {
        allow_slow_moves();
        continue;
      }
      if (next < 0) {
        throw UserError(concat("groups must allow a sequence of moves from ", src_.placements_string(), " to ",
                               goal_.placements_string(), " on ", src_.mesh(),
                               ", but they allow none; add sets of mesh dims, or leave groups out"));
      }
      if (next == kGoal) return path();
      expand(next);
    }
  }

 private:
  // Indices in nodes_.
  static constexpr int kSource = 0;
  static constexpr int kGoal = 1;

  // Returns the mesh dims along which some ranks are on different nodes. Moves over them use the link between nodes.
  static MeshDimSet dims_between_nodes(const Mesh& mesh, const Topology& topology) {
    MeshDimSet dims;
    for (int d = 0; d < mesh.ndim(); ++d) {
      if (topology.crosses_nodes(mesh, d)) dims.insert(d);
    }
    return dims;
  }

  // Returns the link of each mesh dim.
  static std::vector<Link> links_of(const Mesh& mesh, const Topology& topology) {
    std::vector<Link> links;
    for (int d = 0; d < mesh.ndim(); ++d) links.push_back(topology.link_along(mesh, d));
    return links;
  }

  // Returns the best latency and the best bandwidth of these mesh dims' links. No move over some of them has better
  // values.
  Link fastest_of(MeshDimSet mesh_dims) const {
    std::optional<Link> fastest;
    for (size_t d = 0; d < links_.size(); ++d) {
      if (!mesh_dims.contains(static_cast<int>(d))) continue;
      if (!fastest) fastest = links_[d];
      fastest->message_ps = std::min(fastest->message_ps, links_[d].message_ps);
      fastest->ps_per_kib = std::min(fastest->ps_per_kib, links_[d].ps_per_kib);
    }
    return fastest.value_or(Link());
  }

  void add_node(MoveTable::State state) { nodes_.push_back({std::move(state), {}, {}, {}, -1, false}); }

  // Returns the mesh dims whose pending reductions must be done before the goal.
  MeshDimSet dims_to_reduce(const MoveTable::State& state) const { return state.partial_dims - goal_partials_; }
  bool is_for_time() const { return options_.objective == Objective::kTime; }
  // Return the time of a local copy of elements, and of their transfer over a link.
  int64_t copy_picoseconds(int64_t elements) const {
    return picoseconds_for(elements * item_bytes_, topology_.memory_ps_per_kib);
  }
  int64_t transfer_picoseconds(int64_t elements, const Link& link) const {
    return picoseconds_for(elements * item_bytes_, link.ps_per_kib);
  }

  // Returns the slowest link of these mesh dims.
  Link slowest_link(MeshDimSet mesh_dims) const {
    Link slowest;
    for (size_t d = 0; d < links_.size(); ++d) {
      if (mesh_dims.contains(static_cast<int>(d))) slowest = slower(slowest, links_[d]);
    }
    return slowest;
  }

  // Returns the cost of a move from its maxima over ranks.
  Cost cost(const MoveTable::Move& move, const StepCounts& maxima) const {
    const bool local = is_local(move.op);
    const int64_t first = is_for_time() ? predicted_picoseconds(local, maxima, slowest_link(move.mesh_dims), topology_)
                                        : maxima.received_bytes;
    return {first, local ? 0 : 1, maxima.messages, 1};
  }

  // Returns a lower bound on the cost of any single move between these states, from their numbers of elements.
  Cost move_lower_bound(const MoveTable::State& from, const MoveTable::State& to) const {
    const int64_t copies = copy_picoseconds(to.elements);
    if (to.elements <= from.elements && table_.may_be_slice(from, to)) return {is_for_time() ? copies : 0, 0, 0, 1};
    const int64_t missing = std::max<int64_t>(to.elements - from.elements, 0);
    if (!is_for_time()) return {missing * item_bytes_, 1, 0, 1};
    return {topology_.step_ps + fastest_.message_ps + transfer_picoseconds(missing, fastest_) + copies, 1, 0, 1};
  }

  // Returns a lower bound on the cost of any number of moves from a state to the goal (docs/architecture/search.md).
  Cost lower_bound_to_goal(const MoveTable::State& state) {
    const MoveTable::State& goal = nodes_[kGoal].state;
    if (state == goal) return {};
    const MoveTable::Distance distance = table_.distance(state, goal);
    const bool communicates = distance.missing_max > 0 || !table_.may_be_slice(state, goal);
    if (!is_for_time()) return {distance.missing_max * item_bytes_, communicates ? 1 : 0, 0, 0};
    const int64_t copies = copy_picoseconds(goal.elements);
    if (!communicates) return {copies, 0, 0, 0};
    // If only one move communicates, all its messages and bytes use the slowest link that it crosses. If several do,
    // some may stay within nodes.
    const Link& link = distance.needs_other_nodes ? fastest_between_ : fastest_;
    const int64_t once = topology_.step_ps +
                         saturating_product(std::max<int64_t>(distance.sources - 1, 1), link.message_ps) +
                         transfer_picoseconds(distance.missing_max, link);
    const int64_t inside = std::max<int64_t>(distance.missing_min - distance.from_other_nodes, 0);
    const int64_t sent = std::max(transfer_picoseconds(distance.missing_max, fastest_),
                                  saturating_sum(transfer_picoseconds(distance.from_other_nodes, fastest_between_),
                                                 transfer_picoseconds(inside, fastest_)));
    const int64_t several = latency_.lower_bound(2, distance.sources, distance.needs_other_nodes) + sent;
    return {saturating_sum(std::min(once, several), copies), 1, 0, 0};
  }

  // Makes the nodes other than source and goal, the bounds of all nodes, and the queue of open nodes.
  void make_nodes() {
    const MeshDimSet all_to_reduce = dims_to_reduce(nodes_[kSource].state);
    const std::vector<MeshDimSet> remainders = possible_remainders(all_to_reduce);
    std::vector<MoveTable::State> states =
        states_between(src_, goal_, MeshDimSet::from_bits(~goal_partials_.bits()), table_);
    nodes_.reserve(2 + states.size() * remainders.size());
    for (MoveTable::State& state : states) {
      for (const MeshDimSet remaining : remainders) {
        if (!(remaining & state.cut_dims).empty()) continue;
        state.partial_dims = remaining | goal_partials_;
        if (state == nodes_[kSource].state || state == nodes_[kGoal].state) continue;
        if (options_.max_held > 0 && state.elements > options_.max_held) continue;
        add_node(state);
      }
    }
    for (Node& node : nodes_) node.bound_to_goal = lower_bound_to_goal(node.state);
    for (int i = kGoal; i < static_cast<int>(nodes_.size()); ++i) nearest_first_.push_back(i);
    std::stable_sort(nearest_first_.begin(), nearest_first_.end(),
                     [&](int a, int b) { return nodes_[a].bound_to_goal < nodes_[b].bound_to_goal; });
    open_.push({nodes_[kSource].bound_to_goal, kSource});
    if (nodes_[kGoal].reached) open_.push({*nodes_[kGoal].reached, kGoal});
  }

  // Returns the sets of mesh dims that may still be pending after an allowed reduction, the empty set included.
  std::vector<MeshDimSet> possible_remainders(MeshDimSet to_reduce) const {
    std::vector<MeshDimSet> all;
    uint32_t left = 0;  // goes through all subsets of the bits of to_reduce
    do {
      const MeshDimSet remaining = MeshDimSet::from_bits(left);
      if (remaining.empty() || may_reduce(to_reduce, to_reduce - remaining)) all.push_back(remaining);
      left = (left - to_reduce.bits()) & to_reduce.bits();
    } while (left != 0);
    return all;
  }

  // Removes and returns the open node with the least bound on the total cost, or -1 if no node is open. Skips entries
  // of the queue that a cheaper path to their node has replaced.
  int pop_cheapest_open() {
    while (!open_.empty()) {
      const auto [total, node] = open_.top();
      open_.pop();
      if (!nodes_[node].is_expanded && *nodes_[node].reached + nodes_[node].bound_to_goal == total) return node;
    }
    return -1;
  }

  // Tries the moves from a node to all other nodes that may be on a cheaper path.
  void expand(int from) {
    nodes_[from].is_expanded = true;
    const MoveTable::State& state = nodes_[from].state;
    const Cost so_far = *nodes_[from].reached;
    for (const int to : nearest_first_) {
      Node& target = nodes_[to];
      const std::optional<Cost>& best = nodes_[kGoal].reached;
      if (best && *best <= so_far + target.bound_to_goal) break;
      if (target.is_expanded || !is_possible_move(state, target.state)) continue;
      if (!may_improve(to, so_far + move_lower_bound(state, target.state)) || is_skipped(from, to)) continue;
      if (const auto move = table_.move(state, target.state, options_.groups)) {
        try_move(from, to, *move);
      }
    }
  }

  // Returns true if a move is skipped because its counts take long to compute. If no other sequence of moves was found
  // (allow_slow_moves), slow moves from the source's cuts to the goal or to the same cuts are not skipped.
  bool is_skipped(int from, int to) {
    if (allows_slow_moves_ && has_source_cuts(from) && (to == kGoal || has_source_cuts(to))) return false;
    return table_.takes_long(nodes_[from].state, nodes_[to].state);
  }

  // Returns true if a node has the source's cuts.
  bool has_source_cuts(int node) const { return nodes_[node].state.lists == nodes_[kSource].state.lists; }

  // Permits slow moves; called when no open node is left. Reopens the nodes with the source's cuts, and adds the node
  // with these cuts and all reductions done.
  void allow_slow_moves() {
    allows_slow_moves_ = true;
    MoveTable::State reduced = nodes_[kSource].state;
    reduced.partial_dims = goal_partials_;
    const bool is_known =
        std::any_of(nodes_.begin(), nodes_.end(), [&](const Node& node) { return node.state == reduced; });
    if (!is_known) {
      nearest_first_.insert(nearest_first_.begin(), static_cast<int>(nodes_.size()));
      add_node(reduced);
      nodes_.back().bound_to_goal = lower_bound_to_goal(reduced);
    }
    for (int i = 0; i < static_cast<int>(nodes_.size()); ++i) {
      if (!nodes_[i].reached || !has_source_cuts(i)) continue;
      nodes_[i].is_expanded = false;
      open_.push({*nodes_[i].reached + nodes_[i].bound_to_goal, i});
    }
  }

  // Returns true if a path to the node `to` at this cost is cheaper than the known path, and may be part of a path to
  // the goal that is cheaper than the known one.
  bool may_improve(int to, const Cost& total) const {
    const std::optional<Cost>& reached = nodes_[to].reached;
    const std::optional<Cost>& best = nodes_[kGoal].reached;
    return (!reached || total < *reached) && (!best || total + nodes_[to].bound_to_goal < *best);
  }

  // Returns true if one step may reduce the mesh dims `reduced` out of `to_reduce`: all of them, or first those within
  // nodes, so that fewer bytes are sent between nodes. If groups are prescribed, it may reduce any of them.
  bool may_reduce(MeshDimSet to_reduce, MeshDimSet reduced) const {
    if (reduced.empty() || reduced == to_reduce) return true;
    return !options_.ordered && (!options_.groups.empty() || reduced == to_reduce - between_nodes_);
  }

  // Returns false if no move leads from one state to the other. A reduction keeps all cuts, and adds either no cuts or
  // cuts by all mesh dims that it reduces.
  bool is_possible_move(const MoveTable::State& from, const MoveTable::State& to) const {
    const MeshDimSet reduced = from.partial_dims - to.partial_dims;
    if (!(to.partial_dims - from.partial_dims).empty() || !may_reduce(dims_to_reduce(from), reduced)) return false;
    if (reduced.empty()) return true;
    const MeshDimSet added = to.cut_dims - from.cut_dims;
    return (from.cut_dims - to.cut_dims).empty() && (added.empty() || added == reduced);
  }

  // Tries a move between two nodes; under the objective "time" also with shared whole messages. Under "bytes" the
  // policy does not change the cost, so path() chooses it.
  void try_move(int from, int to, const MoveTable::Move& move) {
    const MoveTable::State& before = nodes_[from].state;
    const MoveTable::State& after = nodes_[to].state;
    if (const auto least = table_.counts_lower_bound(before, after, move)) {
      if (!may_improve(to, *nodes_[from].reached + cost(move, *least))) return;
    }
    relax(from, to, move, cost(move, table_.step_counts(before, after, move)));
    if (!is_for_time()) return;
    if (const auto policy = table_.sending_whole_messages(before, after, move, options_.groups)) {
      relax(from, to, *policy, cost(*policy, table_.step_counts(before, after, *policy)));
    }
  }

  // Records a move if it makes the cheapest known path to node `to`.
  void relax(int from, int to, const MoveTable::Move& move, const Cost& cost) {
    const Cost total = *nodes_[from].reached + cost;
    Node& target = nodes_[to];
    if (target.reached && *target.reached <= total) return;
    target.reached = total;
    target.last_move = move;
    target.previous = from;
    open_.push({total + target.bound_to_goal, to});
  }

  // Returns the steps of the cheapest known path to the goal.
  std::vector<Step> path() const {
    std::vector<Step> steps;
    Layout after = goal_;
    for (int at = kGoal; at != kSource; at = nodes_[at].previous) {
      Layout before = nodes_[at].previous == kSource ? src_ : layout(nodes_[nodes_[at].previous].state);
      Step step{nodes_[at].last_move.op, nodes_[at].last_move.mesh_dims, before, std::move(after)};
      step.policy = nodes_[at].last_move.policy;
      step.ordered = options_.ordered && (step.op == StepOp::kAllReduce || step.op == StepOp::kReduceScatter);
      if (options_.objective == Objective::kBytes) {
        step = with_policy_if_cheaper(std::move(step), ReplicaPolicy::kEvenBytes, options_.groups);
      }
      steps.push_back(named_by_collective(std::move(step)));
      after = std::move(before);
    }
    std::reverse(steps.begin(), steps.end());
    return steps;
  }

  // Returns the layout of a state.
  Layout layout(const MoveTable::State& state) const {
    std::vector<Placement> partials(src_.mesh().ndim(), Placement::replicate());
    for (const int d : state.partial_dims.to_vector()) partials[d] = src_.placements()[d];
    return src_.with(table_.cuts(state), partials);
  }

  const Layout& src_;
  const Layout& goal_;
  const PlanOptions& options_;
  const Topology& topology_;
  MeshDimSet between_nodes_;  // mesh dims along which some ranks are on different nodes
  MoveTable table_;
  MeshDimSet goal_partials_;  // mesh dims that are pending in source and goal
  std::vector<Link> links_;   // by mesh dim
  Link fastest_;              // best latency and bandwidth of all mesh dims
  Link fastest_between_;      // best latency and bandwidth of the mesh dims that lead to other nodes
  LatencyBound latency_;
  int64_t item_bytes_;  // size of an element in bytes
  std::vector<Node> nodes_;
  bool allows_slow_moves_ = false;    // allow_slow_moves() has been called
  std::vector<int> nearest_first_;    // all nodes but the source, by ascending bound_to_goal
  using Open = std::pair<Cost, int>;  // bound on the total cost, node
  std::priority_queue<Open, std::vector<Open>, std::greater<>> open_;
};

}  // namespace

Cost Cost::operator+(const Cost& other) const {
  return {saturating_sum(first, other.first), steps + other.steps, messages + other.messages,
          all_steps + other.all_steps};
}

std::vector<Step> cheapest_moves(const Layout& src, const Layout& goal, const PlanOptions& options,
                                 const Topology& topology) {
  return Search(src, goal, options, topology).cheapest_steps();
}

int64_t least_first_cost(const Layout& src, const Layout& goal, const PlanOptions& options, const Topology& topology) {
  return Search(src, goal, options, topology).lower_bound();
}

}  // namespace shardwright
