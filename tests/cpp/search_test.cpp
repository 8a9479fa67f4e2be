// Compares the planner's choice with a search without shortcuts: all layouts, all moves between them, no bounds.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <set>

#include "cost/cost.h"
#include "layouts.h"
#include "moves/describe.h"
#include "moves/move.h"
#include "moves/move_table.h"
#include "moves/plan.h"
#include "moves/step_counts.h"
#include "search/make_plan.h"
#include "search/search.h"
#include "search/states.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max() / 4;

// Returns every layout, identified by its parts: every order of cuts, each cut with every split factor that gathered
// mesh dims can leave. Layouts that differ only by name are one state.
std::vector<Layout> all_states(const MeshPtr& mesh, const std::vector<int64_t>& shape) {
  std::vector<Layout> states;
  std::set<std::vector<int64_t>> seen;
  const auto add = [&](const Layout& layout) {
    std::vector<int64_t> key{static_cast<int64_t>(layout.partial_dims().bits())};
    for (int64_t p = 0; p < mesh->size(); ++p) {
      for (const IntervalList& list : layout.region(p)) {
        key.push_back(-1);
        for (const Interval& interval : list) key.insert(key.end(), {interval.begin, interval.end});
      }
    }
    if (seen.insert(std::move(key)).second) states.push_back(layout);
  };
  const std::vector<Layout> plain = test::all_layouts(mesh, shape, {Placement::partial(ReduceOp::kSum)});
  for (const Layout& layout : plain) add(layout);
  for (const Layout& layout : plain) {
    std::vector<std::vector<std::vector<Cut>>> choices{std::vector<std::vector<Cut>>(layout.ndim())};
    for (int t = 0; t < layout.ndim(); ++t) {
      MeshDimSet before;
      for (const Cut& c : layout.cuts(t)) {
        before.insert(c.mesh_dim);
        std::vector<int64_t> factors{1};
        for (int d = 0; d < mesh->ndim(); ++d) {
          const size_t count = before.contains(d) ? 0 : factors.size();
          for (size_t i = 0; i < count; ++i) factors.push_back(factors[i] * mesh->dim_size(d));
        }
        std::vector<std::vector<std::vector<Cut>>> longer;
        for (const auto& choice : choices) {
          for (const int64_t factor : factors) {
            longer.push_back(choice);
            longer.back()[t].push_back({c.mesh_dim, factor});
          }
        }
        choices = std::move(longer);
      }
    }
    for (auto& cuts : choices) add(layout.with(std::move(cuts), layout.placements()));
  }
  return states;
}

bool has_same_regions(const Layout& a, const Layout& b) {
  for (int64_t p = 0; p < a.mesh().size(); ++p) {
    if (a.region(p) != b.region(p)) return false;
  }
  return true;
}

struct Edge {
  std::optional<Step> step;
  StepCounts counts;
  std::optional<std::pair<Step, StepCounts>> policy;
};

// Returns the step with whole messages shared among senders, if parts have equal size and this helps.
std::optional<Step> sending_whole_messages(const Step& step) {
  if (!step.before.has_equal_parts() || !step.after.has_equal_parts()) return std::nullopt;
  const Step shared = with_policy_if_cheaper(step, ReplicaPolicy::kWholeMessages, {});
  return shared.policy == ReplicaPolicy::kAligned ? std::nullopt : std::optional(shared);
}

class BruteForce {
 public:
  BruteForce(std::vector<Layout> states, Lowering lowering) : states_(std::move(states)), edges_(states_.size()) {
    for (size_t a = 0; a < states_.size(); ++a) {
      for (const Layout& after : states_) {
        Edge edge{move_between(states_[a], after), {}, {}};
        if (edge.step) edge.counts = step_counts(*edge.step, lowering);
        const std::optional<Step> policy = edge.step ? sending_whole_messages(*edge.step) : std::nullopt;
        if (policy) edge.policy = {*policy, step_counts(*policy, lowering)};
        edges_[a].push_back(std::move(edge));
      }
    }
  }

  size_t size() const { return states_.size(); }

  // Returns the state of this layout, which may have another name.
  size_t find(const Layout& layout) const {
    for (size_t s = 0; s < states_.size(); ++s) {
      if (states_[s].partial_dims() == layout.partial_dims() && has_same_regions(states_[s], layout)) return s;
    }
    return states_.size();
  }

  // Computes shortest distances between all states by Floyd and Warshall.
  std::vector<std::vector<int64_t>> distances(const Topology& topology) {
    const size_t n = states_.size();
    const Mesh& mesh = states_[0].mesh();
    MeshDimSet inside;
    for (int d = 0; d < mesh.ndim(); ++d) {
      if (!topology.crosses_nodes(mesh, d)) inside.insert(d);
    }
    std::vector<std::vector<int64_t>> distance(n, std::vector<int64_t>(n, kNever));
    for (size_t a = 0; a < n; ++a) {
      distance[a][a] = 0;
      for (size_t b = 0; b < n; ++b) {
        const Edge& edge = edges_[a][b];
        if (!edge.step) continue;
        const MeshDimSet pending = states_[a].partial_dims();
        const MeshDimSet reduced = pending - states_[b].partial_dims();
        if (!reduced.empty() && !(reduced == pending) && !(reduced == (pending & inside))) continue;
        distance[a][b] = predicted_picoseconds(*edge.step, edge.counts, topology);
        if (edge.policy) {
          const auto& [step, counts] = *edge.policy;
          distance[a][b] = std::min(distance[a][b], predicted_picoseconds(step, counts, topology));
        }
      }
    }
    direct_ = distance;
    for (size_t via = 0; via < n; ++via) {
      for (size_t a = 0; a < n; ++a) {
        if (distance[a][via] == kNever) continue;
        for (size_t b = 0; b < n; ++b) {
          distance[a][b] = std::min(distance[a][b], distance[a][via] + distance[via][b]);
        }
      }
    }
    return distance;
  }

  // Returns one shortest path as a string.
  std::string route(const std::vector<std::vector<int64_t>>& distances, size_t from, size_t to) const {
    std::string text = "a shorter way: " + states_[from].placements_string();
    while (from != to) {
      for (size_t via = 0; via < states_.size(); ++via) {
        if (via == from || direct_[from][via] + distances[via][to] != distances[from][to]) continue;
        const Edge& edge = edges_[from][via];
        text += concat("\n  ", step_op_name(edge.step->op), " over ", states_[0].mesh().names_of(edge.step->mesh_dims),
                       " to ", states_[via].placements_string(), ": ", direct_[from][via], " ps, ",
                       edge.counts.received_bytes, " B, ", edge.counts.messages, " messages");
        from = via;
        break;
      }
    }
    return text;
  }

 private:
  std::vector<std::vector<int64_t>> direct_;
  std::vector<Layout> states_;
  std::vector<std::vector<Edge>> edges_;
};

struct Setting {
  std::vector<int64_t> mesh;
  std::vector<int64_t> shape;
  Lowering lowering;
  size_t stride;  // only every stride-th pair is checked
};

void PrintTo(const Setting& setting, std::ostream* out) {
  *out << "mesh " << join(setting.mesh, "x") << ", shape " << join(setting.shape, "x");
}

class AgainstBruteForce : public testing::TestWithParam<Setting> {};

TEST_P(AgainstBruteForce, NoSequenceOfMovesIsFaster) {
  const Setting& setting = GetParam();
  const MeshPtr mesh = test::mesh_of(setting.mesh);
  const std::vector<Layout> ends = test::all_layouts(mesh, setting.shape, {Placement::partial(ReduceOp::kSum)});
  BruteForce brute(all_states(mesh, setting.shape), setting.lowering);
  std::vector<size_t> state_of;
  for (const Layout& end : ends) state_of.push_back(brute.find(end));
  int64_t compared = 0;
  int64_t of_several_moves = 0;
  for (const std::string& name : Topology::names()) {
    Topology topology = Topology::named(name);
    if (topology.ranks_per_node > 0) topology.ranks_per_node = setting.mesh.back();  // gives small meshes nodes
    const auto distances = brute.distances(topology);
    for (size_t pair = 0; pair < ends.size() * ends.size(); pair += setting.stride) {
      const size_t a = pair / ends.size();
      const size_t b = pair % ends.size();
      if (a == b || !ends[b].partial_dims().empty()) continue;
      const Plan plan = make_plan(ends[a], ends[b], {setting.lowering, Objective::kTime, false, topology});
      const int64_t fastest = distances[state_of[a]][state_of[b]];
      // The names of mesh dims may decide whether unequal parts are one move apart. Brute force has one choice of
      // names.
      const bool may_be_faster = !ends[a].has_equal_parts() || !ends[b].has_equal_parts();
      const bool is_as_fast = predicted_picoseconds(plan) == fastest;
      ASSERT_TRUE(is_as_fast || (may_be_faster && predicted_picoseconds(plan) < fastest))
          << name << ": " << predicted_picoseconds(plan) << " against " << fastest << "\n"
          << to_string(plan) << "\n"
          << brute.route(distances, state_of[a], state_of[b]);
      ++compared;
      of_several_moves += plan.steps.size() > 1;
    }
  }
  std::printf("%zu states, compared %lld plans, %lld of several moves\n", brute.size(),
              static_cast<long long>(compared), static_cast<long long>(of_several_moves));
  EXPECT_GT(compared, 0);
}

// 16 KiB, 4 MiB and 1 GiB.
const std::vector<std::vector<int64_t>> kShapes{{64, 64}, {1024, 1024}, {16384, 16384}};

// The three shapes differ only in the balance of latency and bandwidth, so one shape per mesh is enough for each
// change; meshes alternate. test::is_exhaustive() runs all three.
std::vector<Setting> settings() {
  std::vector<Setting> all{{{3, 2}, {7, 5}, Lowering::kNccl, 1}};
  for (size_t s = 0; s < kShapes.size(); ++s) {
    const std::vector<int64_t>& shape = kShapes[s];
    const Lowering of_cube = shape[0] == 1024 ? Lowering::kGloo : Lowering::kNccl;
    const std::vector<Setting> meshes{{{4}, shape, Lowering::kNccl, 1},      {{2, 2}, shape, Lowering::kGloo, 1},
                                      {{2, 4}, shape, Lowering::kNccl, 1},   {{8, 4}, shape, Lowering::kNccl, 1},
                                      {{8, 8}, shape, Lowering::kNccl, 1},   {{2, 2, 2}, shape, of_cube, 1},
                                      {{4, 2, 4}, shape, Lowering::kNccl, 7}};
    for (size_t m = 0; m < meshes.size(); ++m) {
      if (test::is_exhaustive() || m % kShapes.size() == s) all.push_back(meshes[m]);
    }
  }
  all.push_back({{4, 4, 4}, kShapes[1], Lowering::kNccl, 31});
  all.push_back({{2, 3, 2}, {12, 24}, Lowering::kNccl, 7});
  all.push_back({{2, 2, 2}, {16, 8, 32}, Lowering::kNccl, 301});
  all.push_back({{2, 2, 2}, {7, 5}, Lowering::kNccl, 31});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Search, AgainstBruteForce, testing::ValuesIn(settings()), [](const auto& info) {
  return "mesh_" + join(info.param.mesh, "x") + "_shape_" + join(info.param.shape, "x") + "_" +
         std::string(info.param.lowering.name);
});

// The costs of all moves between the cuts of the two ends take long to compute, and a sum is pending.
TEST(Search, FindsAPlanForUnequalPartsInVeryManyPieces) {
  const MeshPtr mesh = test::mesh_of({64, 128, 128});
  for (const Lowering lowering : {Lowering::kNccl, Lowering::kGloo}) {
    for (const auto& [src, dst] : std::vector<std::pair<const char*, const char*>>{
             {"P,R,SS(0,128)", "R,S(0),R"}, {"P,P,SS(0,64)", "R,S(0),S(0)"}, {"P,SS(0,64),R", "R,R,R"}}) {
      const Layout from = test::layout_of(mesh, {4097}, src);
      const Layout to = test::layout_of(mesh, {4097}, dst);
      const Plan plan = make_plan(from, to, {lowering});
      ASSERT_GE(plan.steps.size(), 2u);
      EXPECT_EQ(plan.steps.front().before, from);
      EXPECT_EQ(plan.steps.back().after, to);
    }
  }
}

// Each of 14 mesh dims may cut either tensor dim as in one end or not at all, so there are 2^14 lists of cuts for each.
TEST(Search, LimitsTheListsOfCutsOnManyMeshDims) {
  const MeshPtr mesh = test::mesh_of(std::vector<int64_t>(14, 2));
  const auto layout_by = [&](int64_t tensor_dim) {
    const std::vector<Placement> placements(14, Placement::shard(tensor_dim));
    return Layout(mesh, {1 << 14, 1 << 14}, DType::kFloat32, placements);
  };
  const Layout src = layout_by(0);
  const Layout goal = layout_by(1);
  MoveTable table(src, Lowering::kNccl);
  EXPECT_LE(states_between(src, goal, src.cut_dims(), table).size(), 20'000u);
  for (int t = 0; t < 2; ++t) EXPECT_LT(table.lists().size(t), 520u);
}

}  // namespace
}  // namespace shardwright
