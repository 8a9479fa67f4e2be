#include "exchange/load.h"

#include <algorithm>
#include <numeric>
#include <queue>

#include "support/error.h"

namespace shardwright {
namespace {

using Amount = __int128;

// Returns the fraction in lowest terms.
Ratio reduced(int64_t numerator, int64_t denominator) {
  const int64_t divisor = std::max<int64_t>(std::gcd(numerator, denominator), 1);
  return {numerator / divisor, denominator / divisor};
}

// A flow network. max_flow() is Dinic's algorithm: blocking flows along shortest paths.
class Network {
 public:
  explicit Network(int nodes) : out_(nodes) {}

  // Adds an edge and returns its index.
  int add_edge(int from, int to, Amount capacity) {
    const auto edge = static_cast<int>(edges_.size());
    out_[from].push_back(edge);
    edges_.push_back({to, capacity});
    out_[to].push_back(static_cast<int>(edges_.size()));
    edges_.push_back({from, 0});
    return edge;
  }

  // Finds a maximum flow and returns its amount. Call it once.
  Amount max_flow(int source, int sink) {
    Amount total = 0;
    while (find_levels(source), level_[sink] >= 0) {
      next_.assign(out_.size(), 0);
      total += push(source, sink, kUnbounded);
    }
    return total;
  }

  // Returns the flow along an edge.
  Amount flow(int edge) const { return edges_[edge ^ 1].left; }

  // Returns true if a node is on the source's side of the minimum cut. Call it after max_flow().
  bool is_reached(int node) const { return level_[node] >= 0; }

  static constexpr Amount kUnbounded = Amount{1} << 120;

 private:
  struct Edge {
    int to;       // node
    Amount left;  // remaining capacity
  };

  // Computes the distance of each node from the source, along edges with remaining capacity; -1 if there is no path.
  void find_levels(int source) {
    level_.assign(out_.size(), -1);
    level_[source] = 0;
    std::queue<int> open({source});
    while (!open.empty()) {
      const int node = open.front();
      open.pop();
      for (const int e : out_[node]) {
        if (edges_[e].left == 0 || level_[edges_[e].to] >= 0) continue;
        level_[edges_[e].to] = level_[node] + 1;
        open.push(edges_[e].to);
      }
    }
  }

  // Pushes up to `limit` from a node to the sink and returns the pushed amount. The recursion is as deep as there are
  // levels.
  Amount push(int node, int sink, Amount limit) {
    if (node == sink) return limit;
    Amount pushed = 0;
    for (size_t& i = next_[node]; i < out_[node].size(); ++i) {
      Edge& edge = edges_[out_[node][i]];
      if (edge.left > 0 && level_[edge.to] == level_[node] + 1) {
        const Amount amount = push(edge.to, sink, std::min(limit - pushed, edge.left));
        edge.left -= amount;
        edges_[out_[node][i] ^ 1].left += amount;
        pushed += amount;
      }
      if (pushed == limit) break;
    }
    return pushed;
  }

  std::vector<std::vector<int>> out_;  // edges by node; an edge and its reverse are neighbors in edges_
  std::vector<Edge> edges_;
  std::vector<int> level_;    // by node: result of find_levels()
  std::vector<size_t> next_;  // by node: index in out_ of the first edge that may carry more
};

// The maximum flow of shared work at some load, through a network with five layers of nodes: a source, jobs, pools,
// teams, a sink. A job's edge from the source has its amount as capacity, and a team's edge to the sink the load times
// the number of its workers. Capacities are multiplied by the load's denominator, so that they are integers.
class WorkNetwork {
 public:
  WorkNetwork(const SharedWork& work, const Ratio& load)
      : work_(work),
        num_jobs_(static_cast<int>(work.jobs.size())),
        num_pools_(static_cast<int>(work.pools.size())),
        source_(num_jobs_ + num_pools_ + static_cast<int>(work.team_sizes.size())),
        sink_(source_ + 1),
        network_(sink_ + 1) {
    for (int j = 0; j < num_jobs_; ++j) {
      network_.add_edge(source_, j, static_cast<Amount>(work.jobs[j].amount) * load.denominator);
      for (const int pool : work.jobs[j].pools) {
        into_pools_.push_back({pool, j, network_.add_edge(j, pool_node(pool), Network::kUnbounded)});
      }
    }
    for (int p = 0; p < num_pools_; ++p) {
      for (const int team : work.pools[p]) {
        out_of_pools_.push_back({p, team, network_.add_edge(pool_node(p), team_node(team), Network::kUnbounded)});
      }
    }
    for (int t = 0; t < static_cast<int>(work.team_sizes.size()); ++t) {
      network_.add_edge(team_node(t), sink_, static_cast<Amount>(work.team_sizes[t]) * load.numerator);
    }
    flow_ = network_.max_flow(source_, sink_);
  }

  // Returns the amount of the maximum flow. The load is possible if and only if this is the amount of all jobs.
  Amount flow() const { return flow_; }

  // Returns the load of the jobs on the source's side of the minimum cut: their amount, divided by the number of
  // workers that may do any of them.
  Ratio load_of_cut() const {
    int64_t amount = 0;
    for (int j = 0; j < num_jobs_; ++j) amount += network_.is_reached(j) ? work_.jobs[j].amount : 0;
    int64_t workers = 0;
    for (int t = 0; t < static_cast<int>(work_.team_sizes.size()); ++t) {
      workers += network_.is_reached(team_node(t)) ? work_.team_sizes[t] : 0;
    }
    check_invariant(workers > 0, "a job with a positive amount has no team");
    return reduced(amount, workers);
  }

  // Returns, by job, the share of each team. A pool's flow into its teams is divided among the pool's jobs in order.
  // The load must be an integer.
  std::vector<std::vector<TeamShare>> shares() const {
    std::vector<std::vector<TeamShare>> by_pool(num_pools_);
    for (const Arc& arc : out_of_pools_) {
      if (const auto amount = static_cast<int64_t>(network_.flow(arc.edge)); amount > 0) {
        by_pool[arc.pool].push_back({arc.other, amount});
      }
    }
    std::vector<std::vector<TeamShare>> by_job(num_jobs_);
    for (const Arc& arc : into_pools_) {
      std::vector<TeamShare>& unassigned = by_pool[arc.pool];
      for (auto amount = static_cast<int64_t>(network_.flow(arc.edge)); amount > 0;) {
        const int64_t share = std::min(amount, unassigned.back().amount);
        by_job[arc.other].push_back({unassigned.back().team, share});
        amount -= share;
        unassigned.back().amount -= share;
        if (unassigned.back().amount == 0) unassigned.pop_back();
      }
    }
    return by_job;
  }

 private:
  int pool_node(int pool) const { return num_jobs_ + pool; }
  int team_node(int team) const { return num_jobs_ + num_pools_ + team; }

  // An edge between a pool and a job or a team.
  struct Arc {
    int pool;
    int other;  // the job or the team
    int edge;   // index in the network
  };

  const SharedWork& work_;
  int num_jobs_;
  int num_pools_;
  int source_;  // nodes: first jobs, then pools, then teams, then the source and the sink
  int sink_;
  Network network_;
  std::vector<Arc> into_pools_;
  std::vector<Arc> out_of_pools_;
  Amount flow_ = 0;
};

// Returns the sum of the amounts of all jobs.
int64_t all_amounts(const SharedWork& work) {
  int64_t all = 0;
  for (const SharedWork::Job& job : work.jobs) all += job.amount;
  return all;
}

}  // namespace

Ratio min_max_load(const SharedWork& work) {
  const int64_t all = all_amounts(work);
  if (all == 0) return {};
  Ratio load = reduced(all, std::accumulate(work.team_sizes.begin(), work.team_sizes.end(), int64_t{0}));
  while (true) {
    const WorkNetwork network(work, load);
    if (network.flow() == static_cast<Amount>(all) * load.denominator) return load;
    load = network.load_of_cut();
  }
}

std::vector<std::vector<TeamShare>> shared_at(const SharedWork& work, int64_t load) {
  const WorkNetwork network(work, {load, 1});
  check_invariant(network.flow() == all_amounts(work), "load ", load, " is below the least load of the work");
  return network.shares();
}

}  // namespace shardwright
