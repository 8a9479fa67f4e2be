#include "crossing/load.h"

#include <algorithm>
#include <numeric>
#include <queue>

#include "support/error.h"

namespace shardwright {
namespace {

using Amount = __int128;

Ratio reduced(int64_t numerator, int64_t denominator) {
  const int64_t divisor = std::max<int64_t>(std::gcd(numerator, denominator), 1);
  return {numerator / divisor, denominator / divisor};
}

// Dinic's algorithm: blocking flows along shortest paths.
class Network {
 public:
  explicit Network(int nodes) : out_(nodes) {}

  void add_edge(int from, int to, Amount capacity) {
    out_[from].push_back(static_cast<int>(edges_.size()));
    edges_.push_back({to, capacity});
    out_[to].push_back(static_cast<int>(edges_.size()));
    edges_.push_back({from, 0});
  }

  Amount max_flow(int source, int sink) {
    Amount total = 0;
    while (find_levels(source), level_[sink] >= 0) {
      next_.assign(out_.size(), 0);
      total += push(source, sink, kUnbounded);
    }
    return total;
  }

  // Returns whether a node can still be reached from the source, that is on which side of the minimum cut it is.
  bool is_reached(int node) const { return level_[node] >= 0; }

  static constexpr Amount kUnbounded = Amount{1} << 120;

 private:
  struct Edge {
    int to;
    Amount left;
  };

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

  // Pushes up to `limit` from a node to the sink and returns how much. The recursion is as deep as there are levels.
  Amount push(int node, int sink, Amount limit) {
    if (node == sink) return limit;
    Amount pushed = 0;
    for (size_t& i = next_[node]; i < out_[node].size(); ++i) {
      Edge& edge = edges_[out_[node][i]];
      if (edge.left > 0 && level_[edge.to] == level_[node] + 1) {
        const Amount one = push(edge.to, sink, std::min(limit - pushed, edge.left));
        edge.left -= one;
        edges_[out_[node][i] ^ 1].left += one;
        pushed += one;
      }
      if (pushed == limit) break;
    }
    return pushed;
  }

  std::vector<std::vector<int>> out_;  // edges by node; an edge and its reverse are neighbours in edges_
  std::vector<Edge> edges_;
  std::vector<int> level_;
  std::vector<size_t> next_;
};

}  // namespace

Ratio least_worst_load(const SharedWork& work) {
  int64_t all = 0;
  for (const SharedWork::Job& job : work.jobs) all += job.amount;
  if (all == 0) return {};
  const int jobs = static_cast<int>(work.jobs.size());
  const int pools = static_cast<int>(work.pools.size());
  const int teams = static_cast<int>(work.team_sizes.size());
  const int source = jobs + pools + teams;
  Ratio load = reduced(all, std::accumulate(work.team_sizes.begin(), work.team_sizes.end(), int64_t{0}));
  while (true) {
    Network network(source + 2);
    for (int j = 0; j < jobs; ++j) {
      network.add_edge(source, j, static_cast<Amount>(work.jobs[j].amount) * load.denominator);
      for (const int pool : work.jobs[j].pools) network.add_edge(j, jobs + pool, Network::kUnbounded);
    }
    for (int p = 0; p < pools; ++p) {
      for (const int team : work.pools[p]) network.add_edge(jobs + p, jobs + pools + team, Network::kUnbounded);
    }
    for (int t = 0; t < teams; ++t) {
      network.add_edge(jobs + pools + t, source + 1, static_cast<Amount>(work.team_sizes[t]) * load.numerator);
    }
    if (network.max_flow(source, source + 1) == static_cast<Amount>(all) * load.denominator) return load;
    int64_t amount = 0;
    for (int j = 0; j < jobs; ++j) amount += network.is_reached(j) ? work.jobs[j].amount : 0;
    int64_t workers = 0;
    for (int t = 0; t < teams; ++t) workers += network.is_reached(jobs + pools + t) ? work.team_sizes[t] : 0;
    check_invariant(workers > 0, "a job that nobody may do");
    load = reduced(amount, workers);
  }
}

}  // namespace shardwright
