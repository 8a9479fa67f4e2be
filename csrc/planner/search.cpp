// A* over layouts.
//
// On meshes of up to three dims the states are all layouts: every order of cuts, and with every cut the split factors
// that mesh dims gathered, or not yet cut, before it leave. On larger meshes they are the layouts that can be read off
// the two ends: on each mesh dim a state cuts as the source does, as the goal does, as neither (another tensor dim,
// innermost), or not at all. Either way each reduction that is due is done or not.
//
// search_test.cpp compares the result with a search that has no bounds. Most plans are one move, and are seen to be
// cheapest before any state is made.
#include "planner/search.h"

#include <algorithm>
#include <optional>
#include <set>

#include "layout/error.h"
#include "planner/cost.h"
#include "planner/move_table.h"

namespace shardwright {
namespace {

constexpr int kMaxDimsWithAllStates = 3;
// Beyond these the states would be too many: mesh dims then cut as an end does or not at all, and states stop.
constexpr int kMaxDimsWithOtherCuts = 4;
constexpr size_t kMaxStates = 20'000;
// Strided cuts of more pieces are left out: they take long to reason about, and longer to pack.
constexpr int64_t kMaxPieces = 1024;

// What a state does on one mesh dim.
struct Role {
  enum Kind { kNone, kAsSource, kAsGoal, kOther } kind = kNone;
  int tensor_dim = -1;  // kOther
};

class States {
 public:
  States(const Layout& src, const Layout& goal, MoveTable& table) : src_(src), goal_(goal), table_(table) {}

  // `free`: mesh dims that may cut. Cuts of all states, each once, in an order that depends on the ends alone.
  std::vector<MoveTable::State> all(MeshDimSet free) {
    const Mesh& mesh = src_.mesh();
    std::vector<int> dims;
    for (int d = 0; d < mesh.ndim(); ++d) {
      if (free.contains(d) && mesh.dim_size(d) > 1) dims.push_back(d);
    }
    choose_tensor_dims();
    if (static_cast<int>(dims.size()) <= kMaxDimsWithAllStates) {
      for (const int t : tensor_dims_) {
        lists_.emplace_back();
        list_all(t, {}, dims);
        // Of states that cost the same the first is taken: rather one that cuts the first tensor dims, into runs.
        std::stable_sort(lists_.back().begin(), lists_.back().end(),
                         [&](int a, int b) { return table_.dims_of(t, a).count() > table_.dims_of(t, b).count(); });
      }
      MoveTable::State state{std::vector<int>(src_.ndim()), {}, {}, 1};
      for (int t = 0; t < src_.ndim(); ++t) {
        state.lists[t] = table_.number(t, {});
        state.elements *= table_.first_length(t, state.lists[t]);
      }
      combine(state, 0);
    } else {
      may_cut_elsewhere_ = static_cast<int>(dims.size()) <= kMaxDimsWithOtherCuts;
      roles_.assign(mesh.ndim(), Role());
      choose(dims, 0);
    }
    return std::move(found_);
  }

 private:
  // Those that an end cuts, and the largest other one: cutting further ones is cutting it by another name.
  void choose_tensor_dims() {
    int other = -1;
    for (int t = 0; t < src_.ndim(); ++t) {
      if (!src_.cuts(t).empty() || !goal_.cuts(t).empty()) {
        tensor_dims_.push_back(t);
      } else if (other < 0 || src_.shape()[t] > src_.shape()[other]) {
        other = t;
      }
    }
    if (other >= 0) tensor_dims_.push_back(other);
  }

  // Every list of cuts of a tensor dim that begins with `cuts`.
  void list_all(int t, const std::vector<Cut>& cuts, const std::vector<int>& unused) {
    const int number = table_.number(t, cuts);
    if (std::find(lists_.back().begin(), lists_.back().end(), number) == lists_.back().end()) {
      lists_.back().push_back(number);
    }
    for (const int d : unused) {
      std::vector<int> rest;
      for (const int other : unused) {
        if (other != d) rest.push_back(other);
      }
      for (const int64_t factor : factors_behind(cuts, d)) {
        std::vector<Cut> longer = cuts;
        longer.push_back({d, factor});
        list_all(t, longer, rest);
      }
    }
  }

  // Every way to give the chosen tensor dims, from one on, lists that share no mesh dim.
  void combine(const MoveTable::State& state, size_t at) {
    if (at == tensor_dims_.size()) return found_.push_back(state);
    const int t = tensor_dims_[at];
    for (const int list : lists_[at]) {
      const MeshDimSet dims = table_.dims_of(t, list);
      if (!(dims & state.cut_dims).empty()) continue;
      MoveTable::State next = state;
      next.elements =
          next.elements == 0 ? 0 : next.elements / table_.first_length(t, next.lists[t]) * table_.first_length(t, list);
      next.lists[t] = list;
      next.cut_dims = next.cut_dims | dims;
      combine(next, at + 1);
    }
  }

  // Products of sizes of mesh dims that do not cut before: those that may have been gathered, or are still to come.
  std::vector<int64_t> factors_behind(const std::vector<Cut>& list, int mesh_dim) const {
    const Mesh& mesh = src_.mesh();
    MeshDimSet others;
    for (int d = 0; d < mesh.ndim(); ++d) {
      if (d != mesh_dim && mesh.dim_size(d) > 1) others.insert(d);
    }
    for (const Cut& c : list) others.erase(c.mesh_dim);
    std::vector<int64_t> factors{1};
    for (const int d : others.to_vector()) {
      const size_t count = factors.size();
      for (size_t i = 0; i < count; ++i) factors.push_back(factors[i] * mesh.dim_size(d));
    }
    std::sort(factors.begin(), factors.end());
    factors.erase(std::unique(factors.begin(), factors.end()), factors.end());
    factors.erase(std::upper_bound(factors.begin(), factors.end(), kMaxPieces), factors.end());
    return factors;
  }

  static int tensor_dim_cut(const Layout& layout, int mesh_dim) {
    for (int t = 0; t < layout.ndim(); ++t) {
      for (const Cut& c : layout.cuts(t)) {
        if (c.mesh_dim == mesh_dim) return t;
      }
    }
    return -1;
  }

  void choose(const std::vector<int>& dims, size_t at) {
    if (found_.size() >= kMaxStates) return;
    if (at == dims.size()) return add();
    const int d = dims[at];
    roles_[d] = {};
    choose(dims, at + 1);
    const int source = tensor_dim_cut(src_, d);
    const int goal = tensor_dim_cut(goal_, d);
    if (source >= 0) {
      roles_[d] = {Role::kAsSource, source};
      choose(dims, at + 1);
    }
    if (goal >= 0) {
      roles_[d] = {Role::kAsGoal, goal};
      choose(dims, at + 1);
    }
    for (const int t : may_cut_elsewhere_ ? tensor_dims_ : std::vector<int>()) {
      roles_[d] = {Role::kOther, t};
      choose(dims, at + 1);
    }
    roles_[d] = {};
  }

  void add() {
    for (const bool source_first : {true, false}) {
      if (!source_first && !mixes()) return;
      Cuts cuts(src_.ndim());
      for (int t = 0; t < src_.ndim(); ++t) {
        if (source_first) append(cuts[t], src_, t, Role::kAsSource);
        append(cuts[t], goal_, t, Role::kAsGoal);
        if (!source_first) append(cuts[t], src_, t, Role::kAsSource);
        for (int d = 0; d < src_.mesh().ndim(); ++d) {
          if (roles_[d].kind == Role::kOther && roles_[d].tensor_dim == t) cuts[t].push_back({d, 1});
        }
      }
      remember(cuts);
    }
  }

  bool has(Role::Kind kind, int t) const {
    return std::any_of(roles_.begin(), roles_.end(),
                       [&](const Role& role) { return role.kind == kind && role.tensor_dim == t; });
  }

  // Some tensor dim is cut by mesh dims of both ends, so that it matters which come first.
  bool mixes() const {
    for (int t = 0; t < src_.ndim(); ++t) {
      if (has(Role::kAsSource, t) && has(Role::kAsGoal, t)) return true;
    }
    return false;
  }

  // The cuts of one end that the state has, in that end's order; what is missing before them becomes a split factor.
  void append(std::vector<Cut>& cuts, const Layout& end, int t, Role::Kind kind) const {
    int64_t factor = 1;
    for (const Cut& c : end.cuts(t)) {
      const Role& role = roles_[c.mesh_dim];
      if (role.kind == kind) {
        cuts.push_back({c.mesh_dim, c.split_factor * factor});
      } else {
        factor *= end.mesh().dim_size(c.mesh_dim);
      }
    }
  }

  void remember(const Cuts& cuts) {
    MoveTable::State state = table_.state(cuts, {});
    if (seen_.insert(state.lists).second) found_.push_back(std::move(state));
  }

  const Layout& src_;
  const Layout& goal_;
  MoveTable& table_;
  bool may_cut_elsewhere_ = true;
  std::vector<int> tensor_dims_;
  std::vector<std::vector<int>> lists_;  // numbers, by chosen tensor dim
  std::vector<Role> roles_;
  std::vector<MoveTable::State> found_;
  std::set<std::vector<int>> seen_;
};

struct Node {
  MoveTable::State state;
  std::optional<int64_t> missing;  // elements that have yet to come
  std::optional<Cost> reached;
  MoveTable::Move by{};
  int from = -1;
  bool closed = false;
};

class Search {
 public:
  Search(const Layout& src, const Layout& goal, const PlanOptions& options, const Topology& topology)
      : src_(src),
        goal_(goal),
        options_(options),
        topology_(topology),
        table_(src, options.backend, options.ordered),
        pending_(src.partial_dims() & goal.partial_dims()) {
    message_ps_ = std::min(topology.inside.message_ps, topology.between.message_ps);
    ps_per_kib_ = std::min(topology.inside.ps_per_kib, topology.between.ps_per_kib);
    item_ = src.dtype().size_bytes();
    for (int d = 0; d < src.mesh().ndim(); ++d) {
      if (topology.crosses_nodes(src.mesh(), d)) between_nodes_.insert(d);
    }
    nodes_.push_back({table_.state(src.cuts(), src.partial_dims()), {}, Cost(), {}, -1, false});
    nodes_.push_back({table_.state(goal.cuts(), pending_), {}, {}, {}, -1, false});
  }

  std::vector<Step> run() {
    if (nodes_[kSource].state == nodes_[kGoal].state) return {};
    if (const auto direct = table_.move(nodes_[kSource].state, nodes_[kGoal].state, options_.groups)) {
      const StepFigures worst = table_.figures(nodes_[kSource].state, nodes_[kGoal].state, *direct);
      relax(kSource, kGoal, *direct, cost(*direct, worst));
      if (is_cheapest(*direct, worst)) return path();
    }
    make_nodes();
    while (true) {
      const int next = cheapest_open();
      check_user(next >= 0, "groups: no sequence of moves over the allowed sets of mesh dims leads from ",
                 src_.placements_string(), " to ", goal_.placements_string(), " on ", src_.mesh().to_string(),
                 "; allow more");
      if (next == kGoal) return path();
      expand(next);
    }
  }

 private:
  static constexpr int kSource = 0;
  static constexpr int kGoal = 1;

  MeshDimSet due(const MoveTable::State& state) const { return state.partial_dims - pending_; }
  int64_t goal_elements() const { return nodes_[kGoal].state.elements; }

  Link link(MeshDimSet mesh_dims) const {
    return (mesh_dims & between_nodes_).empty() ? topology_.inside : topology_.between;
  }

  Cost cost(const MoveTable::Move& move, const StepFigures& worst) const {
    const bool local = is_local(move.op);
    const int64_t first = options_.objective == Objective::kTime
                              ? predicted_picoseconds(local, worst, link(move.mesh_dims), topology_)
                              : worst.received_bytes;
    return {first, local ? 0 : 1, worst.messages, 1};
  }

  // A way that communicates once receives no less than the direct move, and has as many sources at least; if that one
  // sends no more than it receives it is not beaten. A way that communicates twice receives no less in sum.
  bool is_cheapest(const MoveTable::Move& direct, const StepFigures& worst) const {
    if (is_local(direct.op)) return true;
    if (direct.op != StepOp::kExchange) return false;
    if (options_.objective == Objective::kBytes) return true;
    if (worst.sent_bytes > worst.received_bytes) return false;
    const int64_t twice = 2 * (topology_.step_ps + message_ps_) + scaled(worst.received_bytes, ps_per_kib_) +
                          scaled(worst.touched_bytes, topology_.memory_ps_per_kib);
    return nodes_[kGoal].reached->first <= twice;
  }

  // Of any one move between states that hold so much.
  Cost least_of_move(int64_t from, int64_t to, bool may_be_local) const {
    const int64_t copies = scaled(to * item_, topology_.memory_ps_per_kib);
    const bool is_time = options_.objective == Objective::kTime;
    if (may_be_local && to <= from) return {is_time ? copies : 0, 0, 0, 1};
    const int64_t missing = std::max<int64_t>(to - from, 0);
    const int64_t messages = from > 0 ? std::max<int64_t>((missing + from - 1) / from, 1) : 0;
    if (!is_time) return {missing * item_, 1, messages, 1};
    return {topology_.step_ps + messages * message_ps_ + scaled(missing * item_, ps_per_kib_) + copies, 1, messages, 1};
  }

  // From a state to the goal by any number of moves. What is missing must come; m messages a step make at most m + 1
  // times as much of what is held; and due reductions take a collective.
  Cost least_to_goal(Node& node) {
    if (&node == &nodes_[kGoal]) return {};
    if (!node.missing) node.missing = table_.missing(node.state, nodes_[kGoal].state);
    const int64_t held = node.state.elements;
    const int64_t missing = *node.missing;
    const bool communicates = missing > 0 || !table_.may_be_slice(node.state, nodes_[kGoal].state);
    if (options_.objective == Objective::kBytes) return {missing * item_, communicates ? 1 : 0, 0, 0};
    const int64_t copies = scaled(goal_elements() * item_, topology_.memory_ps_per_kib);
    if (!communicates) return {copies, 0, 0, 0};
    int64_t latency = topology_.step_ps + message_ps_;
    if (goal_elements() > held && held > 0) {
      const int64_t ratio = goal_elements() / held;
      latency = topology_.step_ps + std::max<int64_t>(ratio - 1, 1) * message_ps_;
      for (int64_t steps = 2; steps * topology_.step_ps < latency; ++steps) {
        int64_t root = 1;
        while (power_at_most(root + 1, steps, ratio)) ++root;
        latency = std::min(latency, steps * (topology_.step_ps + (root - 1) * message_ps_));
      }
    }
    return {saturating_sum(latency, saturating_sum(scaled(missing * item_, ps_per_kib_), copies)), 0, 0, 0};
  }

  static bool power_at_most(int64_t base, int64_t exponent, int64_t limit) {
    int64_t power = 1;
    for (int64_t i = 0; i < exponent; ++i) {
      power *= base;
      if (power > limit) return false;
    }
    return true;
  }

  void make_nodes() {
    const MeshDimSet all_due = due(nodes_[kSource].state);
    for (MoveTable::State& state : States(src_, goal_, table_).all(MeshDimSet::from_bits(~pending_.bits()))) {
      for (const MeshDimSet left : subsets(all_due - state.cut_dims)) {
        state.partial_dims = left | pending_;
        if (state == nodes_[kSource].state || state == nodes_[kGoal].state) continue;
        nodes_.push_back({state, {}, {}, {}, -1, false});
      }
    }
  }

  static std::vector<MeshDimSet> subsets(MeshDimSet set) {
    std::vector<MeshDimSet> all{MeshDimSet()};
    for (const int d : set.to_vector()) {
      const size_t count = all.size();
      for (size_t i = 0; i < count; ++i) {
        all.push_back(all[i]);
        all.back().insert(d);
      }
    }
    return all;
  }

  int cheapest_open() {
    int best = -1;
    std::optional<Cost> best_cost;
    for (size_t i = 0; i < nodes_.size(); ++i) {
      Node& node = nodes_[i];
      if (!node.reached || node.closed) continue;
      const Cost total = *node.reached + least_to_goal(node);
      if (!best_cost || total < *best_cost) {
        best = static_cast<int>(i);
        best_cost = total;
      }
    }
    return best;
  }

  void expand(int from) {
    nodes_[from].closed = true;
    const MoveTable::State& state = nodes_[from].state;
    for (int to = 1; to < static_cast<int>(nodes_.size()); ++to) {
      Node& target = nodes_[to];
      if (target.closed || !could_follow(state, target.state)) continue;
      const Cost least = *nodes_[from].reached +
                         least_of_move(state.elements, target.state.elements, table_.may_be_slice(state, target.state));
      if (target.reached && *target.reached <= least) continue;
      if (nodes_[kGoal].reached && *nodes_[kGoal].reached <= least + least_to_goal(target)) continue;
      if (const auto move = table_.move(state, target.state, options_.groups)) {
        relax(from, to, *move, cost(*move, table_.figures(state, target.state, *move)));
      }
    }
  }

  // One reduction does all that is due; only one within nodes may go ahead of it, to send less between them. With
  // groups prescribed there may be as many as they need.
  bool may_reduce(MeshDimSet due, MeshDimSet reduced) const {
    if (reduced.empty() || reduced == due) return true;
    return !options_.ordered && (!options_.groups.empty() || reduced == due - between_nodes_);
  }

  // A reduction keeps all cuts, and adds none or those of all mesh dims it reduces.
  bool could_follow(const MoveTable::State& from, const MoveTable::State& to) const {
    const MeshDimSet reduced = from.partial_dims - to.partial_dims;
    if (!(to.partial_dims - from.partial_dims).empty() || !may_reduce(due(from), reduced)) return false;
    if (reduced.empty()) return true;
    const MeshDimSet added = to.cut_dims - from.cut_dims;
    return (from.cut_dims - to.cut_dims).empty() && (added.empty() || added == reduced);
  }

  void relax(int from, int to, const MoveTable::Move& move, const Cost& cost) {
    const Cost total = *nodes_[from].reached + cost;
    Node& target = nodes_[to];
    if (target.reached && *target.reached <= total) return;
    target.reached = total;
    target.by = move;
    target.from = from;
  }

  std::vector<Step> path() const {
    std::vector<Step> steps;
    Layout after = goal_;
    for (int at = kGoal; at != kSource; at = nodes_[at].from) {
      Layout before = nodes_[at].from == kSource ? src_ : layout(nodes_[nodes_[at].from].state);
      Step step{nodes_[at].by.op, nodes_[at].by.mesh_dims, before, std::move(after)};
      step.ordered = options_.ordered && (step.op == StepOp::kAllReduce || step.op == StepOp::kReduceScatter);
      if (options_.objective == Objective::kBytes) step = spread_if_it_helps(std::move(step), options_.groups);
      steps.push_back(named_by_collective(std::move(step)));
      after = std::move(before);
    }
    std::reverse(steps.begin(), steps.end());
    return steps;
  }

  Layout layout(const MoveTable::State& state) const {
    std::vector<Placement> partials(src_.mesh().ndim(), Placement::replicate());
    for (const int d : state.partial_dims.to_vector()) partials[d] = src_.placements()[d];
    return src_.with(table_.cuts(state), partials);
  }

  const Layout& src_;
  const Layout& goal_;
  const PlanOptions& options_;
  const Topology& topology_;
  MoveTable table_;
  MeshDimSet pending_;  // stays so to the end
  MeshDimSet between_nodes_;
  int64_t message_ps_ = 0;
  int64_t ps_per_kib_ = 0;
  int64_t item_ = 0;
  std::vector<Node> nodes_;
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

}  // namespace shardwright
