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
  Cost to_go;                   // lower bound on the cost from here to the goal
  std::optional<Cost> reached;  // cheapest known cost to reach the node; its last move is `by`, from the node `from`
  MoveTable::Move by{};
  int from = -1;
  bool closed = false;  // expanded: its successors have been tried
};

// A lower bound on the latency of moves that bring a rank the data of several ranks. In steps of m1, m2, ... messages,
// a rank can get the data of at most (m1 + 1)(m2 + 1)... ranks, itself included. So the data of 8 ranks takes one step
// of 7 messages, two steps of 2 messages each, or three steps of 1 message each.
class Latency {
 public:
  Latency(int64_t step_ps, const Link& inside, const Link& between, int64_t node_size)
      : step_ps_(step_ps), inside_(inside), between_(between), node_size_(node_size) {}

  // Returns the bound for `steps` or more moves that bring a rank the data of `ranks` ranks. `needs_other_nodes` is
  // true if some of these ranks are on other nodes.
  int64_t least(int64_t steps, int64_t ranks, bool needs_other_nodes) {
    const auto [entry, is_new] = known_.emplace(std::tuple{steps, ranks, needs_other_nodes}, 0);
    if (is_new) entry->second = compute(steps, ranks, needs_other_nodes);
    return entry->second;
  }

 private:
  // Data from another node may be forwarded within the node. So all factorizations of `ranks` are tried: ranks reached
  // between nodes, times ranks reached within the node.
  int64_t compute(int64_t steps, int64_t ranks, bool needs_other_nodes) const {
    if (!needs_other_nodes) return least_of_any(inside_, steps, ranks);
    int64_t best = least_of_any(between_, steps, ranks);
    for (int64_t inside = 2; inside <= std::min(node_size_, ranks); ++inside) {
      const int64_t between =
          least_of_any(between_, std::max<int64_t>(steps - 1, 1), std::max<int64_t>((ranks + inside - 1) / inside, 2));
      best = std::min(best, between + least_of_any(inside_, 1, inside));
    }
    return best;
  }

  // Returns the bound for `steps` or more steps over one kind of link.
  int64_t least_of_any(const Link& link, int64_t steps, int64_t ranks) const {
    int64_t best = least_of_exactly(link, steps, ranks);
    // More steps than are needed with one message each cannot help.
    for (int64_t reached = int64_t{1} << steps; reached < 2 * ranks; reached *= 2) {
      best = std::min(best, least_of_exactly(link, ++steps, ranks));
    }
    return best;
  }

  // Returns the bound for exactly `steps` steps. The total of messages is least with r - 1 or r of them in each step.
  int64_t least_of_exactly(const Link& link, int64_t steps, int64_t ranks) const {
    int64_t r = steps == 1 ? ranks : 1;
    while (!reaches(r + 1, steps, 0, ranks + 1)) ++r;
    int64_t more = 0;
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
        pending_(src.partial_dims() & goal.partial_dims()),
        links_(links_of(src.mesh(), topology)),
        fastest_(fastest_of(MeshDimSet::from_bits(~0u))),
        fastest_between_(fastest_of(between_nodes_)),
        latency_(topology.step_ps, fastest_, fastest_between_,
                 src.mesh().size() / src.mesh().group_size(between_nodes_)),
        item_(src.dtype().size_bytes()) {
    add_node(table_.state(src.cuts(), src.partial_dims()));
    add_node(table_.state(goal.cuts(), pending_));
    nodes_[kSource].reached = Cost();
  }

  // Returns a lower bound on the picoseconds from source to goal.
  int64_t least() { return least_to_goal(nodes_[kSource].state).first; }

  // Returns the cheapest sequence of steps.
  std::vector<Step> run() {
    if (nodes_[kSource].state == nodes_[kGoal].state) return {};
    if (const auto direct = table_.move(nodes_[kSource].state, nodes_[kGoal].state, options_.groups)) {
      try_move(kSource, kGoal, *direct);
      if (is_local(direct->op) || nodes_[kGoal].reached->first <= least_to_goal(nodes_[kSource].state).first)
        return path();
    }
    make_nodes();
    while (true) {
      const int next = cheapest_open();
      if (next < 0 && !allows_slow_moves_) {
        allow_slow_moves();
        continue;
      }
      if (next < 0) {
        throw UserError(concat("groups must allow a sequence of moves from ", src_.placements_string(), " to ",
                               goal_.placements_string(), " on ", src_.mesh(),
                               ", got none; allow more sets of mesh dims"));
      }
      if (next == kGoal) return path();
      expand(next);
    }
  }

 private:
  static constexpr int kSource = 0;
  static constexpr int kGoal = 1;

  // Returns the mesh dims along which all ranks are on different nodes.
  static MeshDimSet dims_between_nodes(const Mesh& mesh, const Topology& topology) {
    MeshDimSet dims;
    for (int d = 0; d < mesh.ndim(); ++d) {
      if (topology.crosses_nodes(mesh, d)) dims.insert(d);
    }
    return dims;
  }

  static std::vector<Link> links_of(const Mesh& mesh, const Topology& topology) {
    std::vector<Link> links;
    for (int d = 0; d < mesh.ndim(); ++d) links.push_back(topology.link_along(mesh, d));
    return links;
  }

  // Returns the best latency and the best bandwidth of these mesh dims. A move over any subset of them has no better
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
  MeshDimSet dims_to_reduce(const MoveTable::State& state) const { return state.partial_dims - pending_; }
  bool is_for_time() const { return options_.objective == Objective::kTime; }
  // Return the picoseconds of a local copy, and of a transfer over a link.
  int64_t copying(int64_t elements) const { return picoseconds_for(elements * item_, topology_.memory_ps_per_kib); }
  int64_t sending(int64_t elements, const Link& link) const {
    return picoseconds_for(elements * item_, link.ps_per_kib);
  }

  // Returns the slowest link of these mesh dims.
  Link link(MeshDimSet mesh_dims) const {
    Link slowest;
    for (size_t d = 0; d < links_.size(); ++d) {
      if (mesh_dims.contains(static_cast<int>(d))) slowest = slower(slowest, links_[d]);
    }
    return slowest;
  }

  // Returns the cost of a move from its maxima over ranks.
  Cost cost(const MoveTable::Move& move, const StepCounts& maxima) const {
    const bool local = is_local(move.op);
    const int64_t first =
        is_for_time() ? predicted_picoseconds(local, maxima, link(move.mesh_dims), topology_) : maxima.received_bytes;
    return {first, local ? 0 : 1, maxima.messages, 1};
  }

  // Returns a lower bound on the cost of any single move between these states, from their numbers of elements.
  Cost least_of_move(const MoveTable::State& from, const MoveTable::State& to) const {
    const int64_t copies = copying(to.elements);
    if (to.elements <= from.elements && table_.may_be_slice(from, to)) return {is_for_time() ? copies : 0, 0, 0, 1};
    const int64_t missing = std::max<int64_t>(to.elements - from.elements, 0);
    if (!is_for_time()) return {missing * item_, 1, 0, 1};
    return {topology_.step_ps + fastest_.message_ps + sending(missing, fastest_) + copies, 1, 0, 1};
  }

  // Returns a lower bound on the cost of any number of moves from a state to the goal (docs/architecture/search.md).
  Cost least_to_goal(const MoveTable::State& state) {
    const MoveTable::State& goal = nodes_[kGoal].state;
    if (state == goal) return {};
    const MoveTable::Distance distance = table_.distance(state, goal);
    const bool communicates = distance.missing_max > 0 || !table_.may_be_slice(state, goal);
    if (!is_for_time()) return {distance.missing_max * item_, communicates ? 1 : 0, 0, 0};
    const int64_t copies = copying(goal.elements);
    if (!communicates) return {copies, 0, 0, 0};
    // If only one move communicates, all its messages and bytes use the slowest link that it crosses. If several do,
    // some may stay within nodes.
    const Link& link = distance.needs_other_nodes ? fastest_between_ : fastest_;
    const int64_t once = topology_.step_ps +
                         saturating_product(std::max<int64_t>(distance.sources - 1, 1), link.message_ps) +
                         sending(distance.missing_max, link);
    const int64_t inside = std::max<int64_t>(distance.missing_min - distance.from_other_nodes, 0);
    const int64_t sent =
        std::max(sending(distance.missing_max, fastest_),
                 saturating_sum(sending(distance.from_other_nodes, fastest_between_), sending(inside, fastest_)));
    const int64_t several = latency_.least(2, distance.sources, distance.needs_other_nodes) + sent;
    return {saturating_sum(std::min(once, several), copies), 1, 0, 0};
  }

  // Makes the nodes other than source and goal, the bounds of all nodes, and the queue of open nodes.
  void make_nodes() {
    const MeshDimSet all_to_reduce = dims_to_reduce(nodes_[kSource].state);
    const std::vector<MeshDimSet> lefts = left_after_some(all_to_reduce);
    std::vector<MoveTable::State> states = states_between(src_, goal_, MeshDimSet::from_bits(~pending_.bits()), table_);
    nodes_.reserve(2 + states.size() * lefts.size());
    for (MoveTable::State& state : states) {
      for (const MeshDimSet left : lefts) {
        if (!(left & state.cut_dims).empty()) continue;
        state.partial_dims = left | pending_;
        if (state == nodes_[kSource].state || state == nodes_[kGoal].state) continue;
        if (options_.max_held > 0 && state.elements > options_.max_held) continue;
        add_node(state);
      }
    }
    for (Node& node : nodes_) node.to_go = least_to_goal(node.state);
    for (int i = kGoal; i < static_cast<int>(nodes_.size()); ++i) nearest_first_.push_back(i);
    std::stable_sort(nearest_first_.begin(), nearest_first_.end(),
                     [&](int a, int b) { return nodes_[a].to_go < nodes_[b].to_go; });
    open_.push({nodes_[kSource].to_go, kSource});
    if (nodes_[kGoal].reached) open_.push({*nodes_[kGoal].reached, kGoal});
  }

  // Returns the sets of pending reductions that may remain after an allowed reduction, the empty set included.
  std::vector<MeshDimSet> left_after_some(MeshDimSet to_reduce) const {
    std::vector<MeshDimSet> all;
    uint32_t left = 0;
    do {
      const MeshDimSet remaining = MeshDimSet::from_bits(left);
      if (remaining.empty() || may_reduce(to_reduce, to_reduce - remaining)) all.push_back(remaining);
      left = (left - to_reduce.bits()) & to_reduce.bits();
    } while (left != 0);
    return all;
  }

  // Removes and returns the open node with the least bound on the total cost, or -1 if no node is open.
  int cheapest_open() {
    while (!open_.empty()) {
      const auto [total, node] = open_.top();
      open_.pop();
      if (!nodes_[node].closed && *nodes_[node].reached + nodes_[node].to_go == total) return node;
    }
    return -1;
  }

  // Tries the moves from a node to all other nodes that may be on a cheaper path.
  void expand(int from) {
    nodes_[from].closed = true;
    const MoveTable::State& state = nodes_[from].state;
    const Cost so_far = *nodes_[from].reached;
    for (const int to : nearest_first_) {
      Node& target = nodes_[to];
      const std::optional<Cost>& best = nodes_[kGoal].reached;
      if (best && *best <= so_far + target.to_go) break;
      if (target.closed || !could_follow(state, target.state)) continue;
      if (!may_improve(to, so_far + least_of_move(state, target.state)) || is_left_out(from, to)) continue;
      if (const auto move = table_.move(state, target.state, options_.groups)) {
        try_move(from, to, *move);
      }
    }
  }

  // Moves whose counts take long to compute are skipped unless there is no other sequence (allow_slow_moves). Then such
  // moves are allowed if they start with the source's cuts and lead to the goal or keep the cuts.
  bool is_left_out(int from, int to) {
    if (allows_slow_moves_ && holds_as_source(from) && (to == kGoal || holds_as_source(to))) return false;
    return table_.takes_long(nodes_[from].state, nodes_[to].state);
  }

  // Returns true if a node has the source's cuts.
  bool holds_as_source(int node) const { return nodes_[node].state.lists == nodes_[kSource].state.lists; }

  // Called when no open node is left. Reopens the nodes with the source's cuts, and adds the node with these cuts and
  // all reductions done.
  void allow_slow_moves() {
    allows_slow_moves_ = true;
    MoveTable::State reduced = nodes_[kSource].state;
    reduced.partial_dims = pending_;
    const bool is_known =
        std::any_of(nodes_.begin(), nodes_.end(), [&](const Node& node) { return node.state == reduced; });
    if (!is_known) {
      nearest_first_.insert(nearest_first_.begin(), static_cast<int>(nodes_.size()));
      add_node(reduced);
      nodes_.back().to_go = least_to_goal(reduced);
    }
    for (int i = 0; i < static_cast<int>(nodes_.size()); ++i) {
      if (!nodes_[i].reached || !holds_as_source(i)) continue;
      nodes_[i].closed = false;
      open_.push({*nodes_[i].reached + nodes_[i].to_go, i});
    }
  }

  // Returns true if a sequence of moves that reaches a state at this cost is the cheapest so far and may be part of the
  // cheapest sequence to the goal.
  bool may_improve(int to, const Cost& total) const {
    const std::optional<Cost>& reached = nodes_[to].reached;
    const std::optional<Cost>& best = nodes_[kGoal].reached;
    return (!reached || total < *reached) && (!best || total + nodes_[to].to_go < *best);
  }

  // One reduction does all pending reductions. The exception is a first reduction within nodes, which reduces the bytes
  // sent between them. If groups are prescribed, there may be as many reductions as they require.
  bool may_reduce(MeshDimSet to_reduce, MeshDimSet reduced) const {
    if (reduced.empty() || reduced == to_reduce) return true;
    return !options_.ordered && (!options_.groups.empty() || reduced == to_reduce - between_nodes_);
  }

  // A reduction keeps all cuts, and adds either no cuts or cuts by all mesh dims that it reduces.
  bool could_follow(const MoveTable::State& from, const MoveTable::State& to) const {
    const MeshDimSet reduced = from.partial_dims - to.partial_dims;
    if (!(to.partial_dims - from.partial_dims).empty() || !may_reduce(dims_to_reduce(from), reduced)) return false;
    if (reduced.empty()) return true;
    const MeshDimSet added = to.cut_dims - from.cut_dims;
    return (from.cut_dims - to.cut_dims).empty() && (added.empty() || added == reduced);
  }

  // Tries a move between two nodes, for time also with whole messages. Under the objective "bytes" the policy does not
  // change the cost here, so path() chooses it.
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
    target.by = move;
    target.from = from;
    open_.push({total + target.to_go, to});
  }

  // Returns the steps of the cheapest known path to the goal.
  std::vector<Step> path() const {
    std::vector<Step> steps;
    Layout after = goal_;
    for (int at = kGoal; at != kSource; at = nodes_[at].from) {
      Layout before = nodes_[at].from == kSource ? src_ : layout(nodes_[nodes_[at].from].state);
      Step step{nodes_[at].by.op, nodes_[at].by.mesh_dims, before, std::move(after)};
      step.policy = nodes_[at].by.policy;
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
  MeshDimSet between_nodes_;  // mesh dims that lead to other nodes
  MoveTable table_;
  MeshDimSet pending_;       // reductions that are pending in the goal too
  std::vector<Link> links_;  // by mesh dim
  Link fastest_;             // best latency and bandwidth of all mesh dims
  Link fastest_between_;     // best latency and bandwidth of the mesh dims that lead to other nodes
  Latency latency_;
  int64_t item_;  // size of an element in bytes
  std::vector<Node> nodes_;
  bool allows_slow_moves_ = false;    // allow_slow_moves() has been called
  std::vector<int> nearest_first_;    // all nodes but the source, by ascending to_go
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
  return Search(src, goal, options, topology).run();
}

int64_t least_picoseconds(const Layout& src, const Layout& goal, const PlanOptions& options, const Topology& topology) {
  return Search(src, goal, options, topology).least();
}

}  // namespace shardwright
