// From times that were measured to the figures of a topology: what a step, a message and a byte cost over a link.
//
// Each part of the job takes part in all-to-alls of several team sizes and lengths. Through their times a line
// `step + peers * message + bytes * byte` is laid by least squares of relative errors, points far off counting less and
// less. All figures are in seconds, of one rank's exchanges, on the slowest rank.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace shardwright {

// An all-to-all among `peers` + 1 ranks that each send `sent_bytes` in all, and what it took.
struct LinkPoint {
  int64_t peers = 1;
  int64_t sent_bytes = 0;
  double seconds = 0;  // above 0
};

struct LinkFit {
  double step = 0;
  double message = 0;
  double byte = 0;
  double error = 0;  // mean over the points of how far off the figures are, relative to what was measured
};

// The figures that explain the points best, none of them negative; with the fixed cost `step` given, if it is.
//
// A byte costs what the largest messages take longer than the next smaller ones, because buffers on the way take in
// some of every message at once, which small ones are made of. The others are fitted to what is left, where bytes are
// less than half of the time. Where all points have as many peers, what a message costs cannot be told from what a step
// costs, and is 0.
//
// Throws UserError where there are no points, or some that took no time.
LinkFit fit_link(const std::vector<LinkPoint>& points, std::optional<double> step = std::nullopt);

struct LinkFits {
  LinkFit inside;
  LinkFit between;
  std::map<std::string, LinkFit> mesh_dims;
};

// All links of a job. `between` is empty on one node, `inside` where nodes have one rank; the one that is missing is
// like the other. `crossing` names the mesh dims along which ranks are on different nodes. The fixed cost is that of
// `inside` everywhere. A mesh dim has the link within or between nodes, unless that is off by much more than one of its
// own: noise is not to decide on plans.
LinkFits fit_links(const std::vector<LinkPoint>& inside, const std::vector<LinkPoint>& between,
                   const std::map<std::string, std::vector<LinkPoint>>& mesh_dims,
                   const std::set<std::string>& crossing);

}  // namespace shardwright
