// Fits links to points made with known parameters: exact ones, noisy ones, and ones with the effect of buffers.
#include "cost/link_fit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "support/error.h"

namespace shardwright {
namespace {

using Points = std::vector<LinkPoint>;

Points points_of(double step, double message, double byte, const std::vector<int64_t>& peers) {
  Points points;
  for (const int64_t count : peers) {
    for (const int64_t size : {1 << 10, 1 << 14, 1 << 17, 1 << 20}) {
      points.push_back({count, size, step + static_cast<double>(count) * message + static_cast<double>(size) * byte});
    }
  }
  return points;
}

void expect_parameters(const LinkFit& found, double step, double message, double byte, double relative) {
  EXPECT_NEAR(found.step, step, relative * step);
  EXPECT_NEAR(found.message, message, relative * message + 1e-15);
  EXPECT_NEAR(found.byte, byte, relative * byte);
}

TEST(LinkFit, RecoversTheParameters) {
  const LinkFit found = fit_link(points_of(5e-4, 4e-5, 1e-9, {1, 3, 7}));
  expect_parameters(found, 5e-4, 4e-5, 1e-9, 1e-6);
  EXPECT_NEAR(found.error, 0, 1e-9);
}

TEST(LinkFit, IgnoresOutliers) {
  Points points = points_of(5e-4, 4e-5, 1e-9, {1, 3, 7});
  points[5].seconds *= 20;
  const LinkFit found = fit_link(points);
  expect_parameters(found, 5e-4, 4e-5, 1e-9, 0.1);
  EXPECT_GT(found.error, 0.05) << "what was left out still counts as an error";
}

TEST(LinkFit, IsNotMisledByBuffersThatAbsorbSmallMessages) {
  Points points;
  for (const int64_t size : {1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22}) {
    points.push_back({1, size, 2e-4 + static_cast<double>(std::max<int64_t>(size - (1 << 17), 0)) * 8e-9});
  }
  const LinkFit found = fit_link(points);
  EXPECT_NEAR(found.byte, 8e-9, 1e-14);
  EXPECT_NEAR(found.step, 2e-4, 2e-5);
}

TEST(LinkFit, UsesAGivenStepCost) {
  expect_parameters(fit_link(points_of(5e-4, 4e-5, 1e-9, {1}), 5e-4), 5e-4, 4e-5, 1e-9, 1e-6);
}

TEST(LinkFit, AddsMessageCostToStepsWithOneNumberOfPeers) {
  expect_parameters(fit_link(points_of(5e-4, 4e-5, 1e-9, {3})), 5e-4 + 3 * 4e-5, 0, 1e-9, 1e-6);
}

TEST(LinkFit, IsNeverNegative) {
  const Points points = {{1, 1 << 10, 1e-3}, {1, 1 << 20, 9e-4}, {3, 1 << 10, 8e-4}, {3, 1 << 20, 7e-4}};
  for (const LinkFit& found : {fit_link(points), fit_link(points, 2e-3)}) {
    EXPECT_GE(std::min({found.step, found.message, found.byte}), 0);
  }
}

TEST(LinkFit, RejectsMissingAndZeroTimes) {
  EXPECT_THROW(fit_link({}), UserError);
  EXPECT_THROW(fit_link({{1, 1 << 10, 0.0}}), UserError);
}

TEST(LinkFits, OneNodeHasOneLink) {
  const LinkFits found = fit_links(points_of(5e-4, 4e-5, 1e-9, {1, 3}), {}, {}, {});
  expect_parameters(found.between, 5e-4, 4e-5, 1e-9, 1e-6);
  EXPECT_TRUE(found.mesh_dims.empty());
}

TEST(LinkFits, NodesOfOneRankUseTheLinkBetweenNodes) {
  const LinkFits found = fit_links({}, points_of(5e-4, 4e-5, 1e-9, {1, 3}), {}, {});
  expect_parameters(found.inside, 5e-4, 4e-5, 1e-9, 1e-6);
  expect_parameters(found.between, 5e-4, 4e-5, 1e-9, 1e-6);
}

TEST(LinkFits, AMeshDimHasItsOwnLinkOnlyIfItDiffersMuch) {
  const Points inside = points_of(1e-4, 1e-5, 1e-9, {1, 3}), between = points_of(1e-4, 1e-4, 8e-9, {1, 3});
  const LinkFits found = fit_links(inside, between,
                                   {{"near", points_of(1.1e-4, 1.1e-5, 1.1e-9, {1})},
                                    {"across", points_of(1.1e-4, 1.1e-4, 8.5e-9, {1})},
                                    {"slow", points_of(1e-4, 1e-3, 4e-8, {1})}},
                                   {"across"});
  expect_parameters(found.mesh_dims.at("near"), 1e-4, 1e-5, 1e-9, 1e-6);
  expect_parameters(found.mesh_dims.at("across"), 1e-4, 1e-4, 8e-9, 1e-6);
  expect_parameters(found.mesh_dims.at("slow"), 1e-4, 1e-3, 4e-8, 1e-6);
  EXPECT_GT(found.mesh_dims.at("near").error, 0.05) << "the error is that over its own points";
}

}  // namespace
}  // namespace shardwright
