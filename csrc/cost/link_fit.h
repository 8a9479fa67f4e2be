// Fits the costs of a topology (of a step, a message and a byte over a link) to measured times.
//
// Ranks measure all-to-alls with several numbers of peers and lengths. The model
// `step + peers * message + sent_bytes * byte` is fitted to the times by least squares of relative errors, in passes
// that give outliers less and less weight. All times are in seconds, measured on the slowest rank.
//
// Example:
//   peers           1          3            1            1
//   sent bytes   1,000      1,000    1,000,000    2,000,000
//   seconds     111e-6     131e-6      1,110e-6     2,110e-6
//
//   byte     from the two largest sizes: (2,110e-6 - 1,110e-6) / 1,000,000 = 1e-9
//   others   from the first two points, whose bytes take less than half of the time:
//            step + message = 110e-6 and step + 3 message = 130e-6, so message = 10e-6 and step = 100e-6
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
  double step = 0;     // seconds per collective
  double message = 0;  // seconds per message
  double byte = 0;     // seconds per byte
  double error = 0;    // mean relative error over the points
};

// Returns the non-negative costs that fit the points best. If `step` is given, it is the cost of a step.
//
// The cost of a byte is computed from the two largest sizes, because buffers on the way absorb the first bytes of every
// message, and small messages entirely. The other costs are fitted to the remaining time, with the points whose bytes
// take less than half of the time. If all points have the same number of peers and `step` is not given, the costs of a
// message and of a step cannot be told apart, and the cost of a message is 0. If no two points have the same number of
// peers and different sizes, or more bytes take no longer, the cost of a byte is fitted together with the other costs.
//
// Throws UserError if there are no points, or if the time of a point is not positive.
LinkFit fit_link(const std::vector<LinkPoint>& points, std::optional<double> step = std::nullopt);

// The costs of all links of a job.
struct LinkFits {
  LinkFit inside;
  LinkFit between;
  std::map<std::string, LinkFit> mesh_dims;
};

// Fits all links of a job. `between` has no points if all ranks are on one node, and `inside` has none if nodes have
// one rank each; the link without points gets the costs of the other link. `crossing` names the mesh dims along which
// ranks are on different nodes. All links have the step cost of `inside`. A mesh dim gets its own costs only if the
// costs of the common link (`between` for crossing mesh dims, else `inside`) have an error (LinkFit::error) that is
// larger by more than 0.25, so that noise does not change plans. Throws as fit_link does, if neither `inside` nor
// `between` has points, or if a mesh dim has none.
LinkFits fit_links(const std::vector<LinkPoint>& inside, const std::vector<LinkPoint>& between,
                   const std::map<std::string, std::vector<LinkPoint>>& mesh_dims,
                   const std::set<std::string>& crossing);

}  // namespace shardwright
