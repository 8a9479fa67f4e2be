// Fits the figures of a topology to measured times: what a step, a message and a byte cost over a link.
//
// Ranks measure all-to-alls of several team sizes and lengths. The model `step + peers * message + bytes * byte` is
// fitted to the times by least squares of relative errors, in passes that give outliers less and less weight. All times
// are in seconds, and are those of the slowest rank.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace shardwright {

// A measured all-to-all among `peers` + 1 ranks, each of which sends `sent_bytes` in total.
struct LinkPoint {
  int64_t peers = 1;
  int64_t sent_bytes = 0;
  double seconds = 0;  // above 0
};

struct LinkFit {
  double step = 0;
  double message = 0;
  double byte = 0;
  double error = 0;  // mean relative error over the points
};

// Returns the non-negative figures that fit the points best. The fixed cost `step` may be given.
//
// The cost of a byte comes from the difference between the two largest sizes, because buffers on the way absorb some of
// every message at once, and all of a small one. The other figures are fitted to what remains, using the points whose
// bytes take less than half of the time. If all points have the same number of peers and `step` is not given, the cost
// of a message cannot be told apart from that of a step, and is 0.
//
// Throws UserError if there are no points, or if one took no time.
LinkFit fit_link(const std::vector<LinkPoint>& points, std::optional<double> step = std::nullopt);

struct LinkFits {
  LinkFit inside;
  LinkFit between;
  std::map<std::string, LinkFit> mesh_dims;
};

// Fits all links of a job. `between` is empty on one node, and `inside` is empty if nodes have one rank; the link that
// was not measured gets the other's figures. `crossing` names the mesh dims along which ranks are on different nodes.
// The fixed cost of `inside` is used everywhere. A mesh dim gets a link of its own only if the link within or between
// nodes fits its points much worse, so that noise does not change plans.
LinkFits fit_links(const std::vector<LinkPoint>& inside, const std::vector<LinkPoint>& between,
                   const std::map<std::string, std::vector<LinkPoint>>& mesh_dims,
                   const std::set<std::string>& crossing);

}  // namespace shardwright
