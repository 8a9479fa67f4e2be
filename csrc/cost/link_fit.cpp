#include "cost/link_fit.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "support/error.h"

namespace shardwright {
namespace {

constexpr double kOwnLinkGain = 0.25;  // a mesh dim gets its own costs if they reduce LinkFit::error by more than this

constexpr int kPasses = 20;  // number of passes of the fit
// Each pass weights a point by 1 / max(its relative error in the pass before, kMinWeightedError).
constexpr double kMinWeightedError = 0.02;

// The parameters of the model, by index: the costs of a step, a message and a byte.
constexpr int kStep = 0, kMessage = 1, kByte = 2, kNumParameters = 3;
using Parameters = std::array<double, kNumParameters>;

// The equation of one point, divided by its measured time: the sum of coefficient x parameter should be `target`.
struct Equation {
  Parameters coefficients;
  double target;
  double weight = 1;

  // Returns the absolute residual.
  double residual(const Parameters& parameters) const {
    double sum = -target;
    for (int i = 0; i < kNumParameters; ++i) sum += coefficients[i] * parameters[i];
    return std::abs(sum);
  }
};

// Returns the mean error over the points, relative to the measured times.
double mean_error(const std::vector<LinkPoint>& points, const LinkFit& fit) {
  double sum = 0;
  for (const LinkPoint& p : points) {
    const double predicted =
        fit.step + static_cast<double>(p.peers) * fit.message + static_cast<double>(p.sent_bytes) * fit.byte;
    sum += std::abs(predicted - p.seconds) / p.seconds;
  }
  return sum / static_cast<double>(points.size());
}

// Returns the median of at least one value.
double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// Returns the cost of a byte: the median, over the numbers of peers, of the difference in seconds between the two
// largest sizes, divided by their difference in bytes. Returns 0 if the median is negative, or if no number of peers
// has two sizes.
double seconds_per_byte(const std::vector<LinkPoint>& points) {
  std::map<int64_t, std::vector<std::pair<int64_t, double>>> by_peers;
  for (const LinkPoint& p : points) by_peers[p.peers].emplace_back(p.sent_bytes, p.seconds);
  std::vector<double> slopes;
  for (auto& [peers, sizes] : by_peers) {
    if (sizes.size() < 2) continue;
    std::sort(sizes.begin(), sizes.end());
    const auto& [large, large_seconds] = sizes.back();
    const auto& [small, small_seconds] = sizes[sizes.size() - 2];
    if (large > small) slopes.push_back((large_seconds - small_seconds) / static_cast<double>(large - small));
  }
  return slopes.empty() ? 0 : std::max(median(slopes), 0.0);
}

// Solves for the chosen parameters by weighted least squares; all other parameters are 0. Returns nullopt if the
// equations do not determine the chosen parameters.
std::optional<Parameters> least_squares(const std::vector<Equation>& equations, const std::vector<int>& chosen) {
  // Normal equations with columns scaled to length 1, because the parameters differ by many orders of magnitude.
  const size_t n = chosen.size();
  std::vector<double> scale(n, 0);
  for (const Equation& e : equations) {
    for (size_t i = 0; i < n; ++i) scale[i] += e.weight * e.coefficients[chosen[i]] * e.coefficients[chosen[i]];
  }
  for (double& s : scale) {
    if (s <= 0) return std::nullopt;
    s = 1 / std::sqrt(s);
  }
  std::vector<std::vector<double>> rows(n, std::vector<double>(n + 1, 0));
  for (const Equation& e : equations) {
    for (size_t i = 0; i < n; ++i) {
      const double left = e.weight * e.coefficients[chosen[i]] * scale[i];
      for (size_t j = 0; j < n; ++j) rows[i][j] += left * e.coefficients[chosen[j]] * scale[j];
      rows[i][n] += left * e.target;
    }
  }
  for (size_t i = 0; i < n; ++i) {  // the matrix is positive definite, so no pivoting is needed
    if (rows[i][i] < 1e-13) return std::nullopt;
    for (size_t k = 0; k < n; ++k) {
      if (k == i) continue;
      const double factor = rows[k][i] / rows[i][i];
      for (size_t j = i; j <= n; ++j) rows[k][j] -= factor * rows[i][j];
    }
  }
  Parameters parameters{};
  for (size_t i = 0; i < n; ++i) parameters[chosen[i]] = rows[i][n] / rows[i][i] * scale[i];
  return parameters;
}

// Returns the least-squares solution without negative parameters; parameters that are not in `is_free` are 0. Solves
// for each non-empty set of free parameters (at most seven), and takes the solution with the smallest weighted sum of
// squares.
Parameters non_negative_least_squares(const std::vector<Equation>& equations,
                                      const std::array<bool, kNumParameters>& is_free) {
  Parameters best{};
  double least = std::numeric_limits<double>::infinity();
  for (unsigned set = 1; set < (1U << kNumParameters); ++set) {
    std::vector<int> chosen;
    bool is_allowed = true;
    for (int i = 0; i < kNumParameters; ++i) {
      if ((set >> i & 1U) == 0) continue;
      chosen.push_back(i);
      is_allowed = is_allowed && is_free[i];
    }
    const std::optional<Parameters> parameters = is_allowed ? least_squares(equations, chosen) : std::nullopt;
    if (!parameters ||
        std::any_of(parameters->begin(), parameters->end(), [](double parameter) { return parameter < 0; }))
      continue;
    double squares = 0;
    for (const Equation& e : equations) squares += e.weight * e.residual(*parameters) * e.residual(*parameters);
    if (squares < least) {
      least = squares;
      best = *parameters;
    }
  }
  return best;
}

}  // namespace

LinkFit fit_link(const std::vector<LinkPoint>& points, std::optional<double> step) {
  check_argument(!points.empty(), "points", "a list of at least one measured all-to-all", "none");
  const double byte = seconds_per_byte(points);
  std::vector<Equation> all, mostly_latency;
  bool has_several_peer_counts = false;
  for (const LinkPoint& p : points) {
    check_argument(p.seconds > 0, "points: seconds of an all-to-all", "above 0", p.seconds);
    has_several_peer_counts = has_several_peer_counts || p.peers != points.front().peers;
    const double byte_seconds = byte * static_cast<double>(p.sent_bytes);
    const Equation equation{
        {1 / p.seconds, static_cast<double>(p.peers) / p.seconds, static_cast<double>(p.sent_bytes) / p.seconds},
        1 - (step.value_or(0) + byte_seconds) / p.seconds};
    all.push_back(equation);
    if (byte_seconds < p.seconds / 2) mostly_latency.push_back(equation);
  }
  std::vector<Equation>& equations = byte > 0 && !mostly_latency.empty() ? mostly_latency : all;
  const std::array<bool, kNumParameters> is_free{!step, step || has_several_peer_counts, byte == 0};
  Parameters parameters{};
  for (int pass = 0; pass < kPasses; ++pass) {
    parameters = non_negative_least_squares(equations, is_free);
    for (Equation& e : equations) e.weight = 1 / std::max(e.residual(parameters), kMinWeightedError);
  }
  LinkFit fit{step.value_or(parameters[kStep]), parameters[kMessage], byte > 0 ? byte : parameters[kByte]};
  fit.error = mean_error(points, fit);
  return fit;
}

LinkFits fit_links(const std::vector<LinkPoint>& inside, const std::vector<LinkPoint>& between,
                   const std::map<std::string, std::vector<LinkPoint>>& mesh_dims,
                   const std::set<std::string>& crossing) {
  LinkFits fits;
  fits.inside = fit_link(inside.empty() ? between : inside);
  fits.between = inside.empty() || between.empty() ? fits.inside : fit_link(between, fits.inside.step);
  for (const auto& [name, points] : mesh_dims) {
    LinkFit common = crossing.contains(name) ? fits.between : fits.inside;
    common.error = mean_error(points, common);
    const LinkFit own = fit_link(points, fits.inside.step);
    fits.mesh_dims[name] = own.error + kOwnLinkGain < common.error ? own : common;
  }
  return fits;
}

}  // namespace shardwright
