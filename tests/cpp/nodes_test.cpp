// Compares the bytes that enter nodes, counted rank by rank, with the lower bound of any plan.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <set>

#include "layouts.h"
#include "moves/describe.h"
#include "moves/plan.h"
#include "moves/step_exchange.h"
#include "moves/traffic.h"
#include "search/make_plan.h"

namespace shardwright {
namespace {

struct Setting {
  std::vector<int64_t> mesh;
  std::vector<int64_t> shape;
};

int64_t node_of(int64_t position) { return position / 8; }

std::vector<int64_t> ranks_of(int64_t node) {
  std::vector<int64_t> ranks;
  for (int64_t p = 8 * node; p < 8 * (node + 1); ++p) ranks.push_back(p);
  return ranks;
}

struct Before {
  static std::vector<int64_t> flat(const Region& region) {
    std::vector<int64_t> ends;
    for (const IntervalList& list : region) {
      for (const Interval& interval : list) ends.insert(ends.end(), {interval.begin, interval.end});
      ends.push_back(-1);
    }
    return ends;
  }
  bool operator()(const Region& a, const Region& b) const { return flat(a) < flat(b); }
};

// Returns the distinct parts on a node. Parts of one size are equal or disjoint.
std::set<Region, Before> parts_of(const Layout& layout, int64_t node) {
  std::set<Region, Before> parts;
  for (const int64_t p : ranks_of(node)) parts.insert(layout.region(p));
  return parts;
}

int64_t bytes_that_must_enter(const Layout& src, const Layout& dst, int64_t node) {
  int64_t elements = 0;
  for (const Region& needed : parts_of(dst, node)) {
    elements += num_elements(needed);
    for (const Region& held : parts_of(src, node)) elements -= shared_elements(held, needed);
  }
  return elements * src.dtype().size_bytes();
}

int64_t bytes_that_enter(const Plan& plan, int64_t node) {
  int64_t elements = 0;
  for (const Step& step : plan.steps) {
    if (is_local(step.op)) continue;
    for (const int64_t p : ranks_of(node)) {
      const MeshExchange exchange = mesh_exchange_of(step);
      for (const int64_t from : step.before.mesh().group(p, step.mesh_dims)) {
        if (node_of(from) != node) elements += exchange.elements_between(from, p);
      }
    }
  }
  return elements * plan.src.dtype().size_bytes();
}

class Nodes : public testing::TestWithParam<Setting> {};

// There are 64 nodes of 8 ranks, and all ranks of a node need the same part.
TEST_P(Nodes, GathersToReplicasEnterEachNodeOnce) {
  const MeshPtr mesh = test::mesh_of(GetParam().mesh);
  ASSERT_EQ(mesh->size(), 512);
  const PlanOptions options{Lowering::kNccl, Objective::kTime, false, Topology::named("64x8")};
  MeshDimSet inside;
  for (int d = 0; d < mesh->ndim(); ++d) {
    if (!options.topology->crosses_nodes(*mesh, d)) inside.insert(d);
  }
  const std::vector<Layout> all = test::all_layouts(mesh, GetParam().shape, {});
  int gathers = 0;
  int hierarchical = 0;
  for (const Layout& src : all) {
    for (const Layout& dst : all) {
      if (!(dst.cut_dims() - src.cut_dims()).empty() || !(dst.cut_dims() & inside).empty()) continue;
      const Plan plan = make_plan(src, dst, options);
      if (totals(plan).steps == 0) continue;
      ++gathers;
      hierarchical += totals(plan).steps > 1;
      for (const int64_t node : {int64_t{0}, int64_t{27}, int64_t{63}}) {
        const int64_t bound = bytes_that_must_enter(src, dst, node);
        const int64_t entering = bytes_that_enter(plan, node);
        ASSERT_GE(entering, bound);
        EXPECT_LE(entering * 100, bound * 105) << to_string(plan) << "\nnode " << node;
      }
    }
  }
  std::printf("%d gathers to replicas, %d in several steps\n", gathers, hierarchical);
  EXPECT_GT(hierarchical, 0);
}

INSTANTIATE_TEST_SUITE_P(Planner, Nodes,
                         testing::Values(Setting{{64, 8}, {16384, 16384}}, Setting{{64, 8}, {4096, 4096}},
                                         Setting{{64, 4, 2}, {16384, 16384}}, Setting{{8, 8, 8}, {16384, 16384}}));

}  // namespace
}  // namespace shardwright
