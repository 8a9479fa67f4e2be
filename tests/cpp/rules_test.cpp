// Layouts whose mesh dims cut by sizes, by blocks, cyclically, or not at all, among plain ones. Every pair is planned,
// simulated and compared with a walk over elements.
#include <gtest/gtest.h>

#include <iostream>
#include <map>
#include <optional>
#include <set>

#include "layouts.h"
#include "moves/collectives.h"
#include "moves/describe.h"
#include "moves/step_counts.h"
#include "moves/traffic.h"
#include "naive.h"
#include "planning/serialize.h"
#include "products/product_problem.h"
#include "program/program.h"
#include "rank_maxima.h"
#include "search/make_plan.h"
#include "simulate/simulate.h"
#include "support/error.h"

namespace shardwright {
namespace {

using Shape = std::vector<int64_t>;
using Elements = std::vector<int64_t>;

std::vector<int64_t> numbers_in(const std::string& text) {
  std::vector<int64_t> numbers;
  for (size_t at = 0; at < text.size();) {
    size_t end = at;
    while (end < text.size() && std::isdigit(static_cast<unsigned char>(text[end])) != 0) ++end;
    if (end > at) numbers.push_back(std::stoll(text.substr(at, end - at)));
    at = end + 1;
  }
  return numbers;
}

// Returns the part of a list for one coordinate, from the text of the placement.
Elements naive_part(const std::string& placement, const Elements& list, int64_t k, int64_t c) {
  const std::string head = placement.substr(0, placement.find('('));
  std::vector<int64_t> numbers = numbers_in(placement);
  numbers.erase(numbers.begin());  // the tensor dim
  if (head == "S") return naive::chunk(list, k, c);
  if (head == "SS") return naive::strided_chunk(list, numbers[0], k, c);
  if (head == "Ragged") return naive::ragged(list, numbers, c);
  if (head == "Packed") {
    const bool has_unit = placement.find(',') != placement.rfind(',');
    const int64_t unit = has_unit ? numbers.back() : 1;
    if (has_unit) numbers.pop_back();
    return naive::packed(list, numbers, k, c, unit);
  }
  if (head == "Pieces") return naive::pieces(list, placement.substr(placement.find(',') + 1), c);
  if (head == "Blocks") return naive::blocks(list, numbers[0], k, c);
  if (head == "Cyclic") return naive::cyclic(list, numbers[0], k, c);
  if (head == "Owned") return c == numbers[0] ? list : Elements();
  throw std::logic_error(placement);
}

// Returns elements by tensor dim.
std::vector<Elements> naive_region(const Layout& layout, int64_t position) {
  std::vector<Elements> region;
  for (int t = 0; t < layout.ndim(); ++t) {
    Elements list = naive::iota(layout.shape()[t]);
    for (const Cut& c : layout.cuts(t)) {
      list = naive_part(layout.placements()[c.mesh_dim].to_string(), list, layout.mesh().dim_size(c.mesh_dim),
                        layout.mesh().coordinate(position, c.mesh_dim));
    }
    region.push_back(list);
  }
  return region;
}

// Returns the bytes that all ranks together, and the worst rank, must receive, element by element.
Bound naive_bound(const Layout& src, const Layout& dst) {
  Bound bound;
  for (int64_t p = 0; p < src.mesh().size(); ++p) {
    const std::vector<Elements> held = naive_region(src, p);
    const std::vector<Elements> needed = naive_region(dst, p);
    int64_t all = 1;
    int64_t own = 1;
    for (size_t t = 0; t < held.size(); ++t) {
      all *= static_cast<int64_t>(needed[t].size());
      own *= std::count_if(needed[t].begin(), needed[t].end(), [&](int64_t element) {
        return std::find(held[t].begin(), held[t].end(), element) != held[t].end();
      });
    }
    const int64_t bytes = (all - own) * src.dtype().size_bytes();
    bound.bytes_sum += bytes;
    bound.bytes_max = std::max(bound.bytes_max, bytes);
  }
  return bound;
}

bool moves_data_alone(const Plan& plan) { return plan.src.partial_dims().empty() && plan.dst.partial_dims().empty(); }

void check_layout(const Layout& layout) {
  size_t most = 0;
  for (int64_t p = 0; p < layout.mesh().size(); ++p) {
    const std::vector<Elements> expected = naive_region(layout, p);
    const Region region = layout.region(p);
    size_t count = 1;
    for (size_t t = 0; t < region.size(); ++t) {
      Elements found;
      for (const Interval& interval : region[t]) {
        for (int64_t i = interval.begin; i < interval.end; ++i) found.push_back(i);
      }
      ASSERT_EQ(found, expected[t]) << layout.to_string() << " at " << p;
      count *= found.size();
    }
    most = std::max(most, count);
  }
  EXPECT_EQ(layout.largest_part_elements(), static_cast<int64_t>(most)) << layout.to_string();
}

void check_counts(const Plan& plan) {
  test::check_traffic(plan);
  test::check_peak(plan, true);
}

void check_pair(const Layout& src, const Layout& dst, const PlanOptions& options, bool with_counts) {
  const Plan plan = make_plan(src, dst, options);
  SimulationReport report;
  ASSERT_NO_THROW(report = simulate(plan)) << to_string(plan);
  if (moves_data_alone(plan)) {
    const Bound bound = naive_bound(src, dst);
    const Bound found = lower_bound(src, dst);
    EXPECT_EQ(found.bytes_sum, bound.bytes_sum) << to_string(plan);
    EXPECT_EQ(found.bytes_max, bound.bytes_max) << to_string(plan);
    if (options.objective == Objective::kBytes) {
      EXPECT_EQ(report.received_bytes_sum, bound.bytes_sum) << to_string(plan);
    }
  }
  EXPECT_GE(report.received_bytes_sum, lower_bound(src, dst).bytes_sum) << to_string(plan);
  EXPECT_EQ(to_string(from_bytes(to_bytes(plan))), to_string(plan));
  if (with_counts) check_counts(plan);
}

// Returns the layouts of these placements that the shape allows.
std::vector<Layout> layouts_of(const MeshPtr& mesh, const Shape& shape, const std::vector<std::string>& texts) {
  std::vector<Layout> layouts;
  for (const std::string& text : texts) {
    try {
      layouts.push_back(
          Layout(mesh, shape, DType::parse("float32"), parse_placements(text), {}, StridedMeaning::kLiteral));
    } catch (const UserError&) {
      continue;
    }
    check_layout(layouts.back());
  }
  return layouts;
}

void check_all_pairs(const std::vector<Layout>& layouts, bool with_counts) {
  int64_t pairs = 0;
  for (const Layout& src : layouts) {
    for (const Layout& dst : layouts) {
      const Lowering lowering = pairs++ % 2 == 0 ? Lowering::kNccl : Lowering::kGloo;
      for (const Objective objective : {Objective::kTime, Objective::kBytes}) {
        check_pair(src, dst, {lowering, objective}, with_counts);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
  std::cout << layouts.size() << " layouts, " << pairs << " pairs\n";
}

const std::vector<std::string> kOnOneDim{"R",
                                         "S(0)",
                                         "S(1)",
                                         "SS(0,2)",
                                         "P",
                                         "Ragged(0,3:1:4)",
                                         "Ragged(0,0:8:0)",
                                         "Ragged(0,2:3)",
                                         "Ragged(0,0:5)",
                                         "Ragged(0,6:2)",
                                         "Ragged(0,4:4)",
                                         "Ragged(1,5:1)",
                                         "Ragged(1,2:2:2)",
                                         "Ragged(1,0:1:2)",
                                         "Ragged(0,0:0)",
                                         "Ragged(0,0:0:0)",
                                         "Blocks(0,1)",
                                         "Blocks(0,2)",
                                         "Blocks(0,3)",
                                         "Blocks(1,128)",
                                         "Cyclic(0,1)",
                                         "Cyclic(0,2)",
                                         "Cyclic(1,1)",
                                         "Owned(0)",
                                         "Owned(1)",
                                         "Owned(1,1)",
                                         "Packed(0,4:2:2)",
                                         "Packed(0,4:4)",
                                         "Packed(0,3:0:2)",
                                         "Packed(0,4:4,2)",
                                         "Packed(0,6:2,3)",
                                         "Pieces(0,0-2+5-8:2-5)",
                                         "Pieces(0,1-3:0-1+3-5)",
                                         "Pieces(0,0-1+6-8::1-6)",
                                         "Packed(1,1:2)",
                                         "Packed(1,3:3)"};

TEST(Rules, EveryPairOnOneMeshDimIsCorrectAndMovesTheMinimum) {
  for (const int64_t size : {2, 3}) {
    for (const Shape& shape : std::vector<Shape>{{8, 6}, {5, 3}, {0, 3}, {8, 1}}) {
      const std::vector<Layout> layouts = layouts_of(test::mesh_of({size}), shape, kOnOneDim);
      EXPECT_GE(layouts.size(), 14U);
      check_all_pairs(layouts, true);
      if (HasFatalFailure()) return;
    }
  }
}

const std::vector<std::string> kOnTwoDims{"R,R",
                                          "S(0),S(1)",
                                          "S(0),S(0)",
                                          "R,S(0)",
                                          "P,S(0)",
                                          "SS(0,2),S(0)",
                                          "P,P",
                                          "Ragged(0,3:5),R",
                                          "Ragged(0,3:4),S(0)",
                                          "Ragged(0,5:3),S(0)",
                                          "Ragged(0,5:3),S(1)",
                                          "Ragged(0,0:8),Cyclic(0,1)",
                                          "Ragged(0,8:0),Owned(1)",
                                          "Ragged(0,4:4),Ragged(0,1:3)",
                                          "Ragged(0,4:4),Packed(0,2:2)",
                                          "R,Ragged(0,1:6)",
                                          "R,Ragged(0,1:7)",
                                          "R,Ragged(0,1:6:1)",
                                          "R,Ragged(0,2:0:5)",
                                          "S(0),Ragged(1,4:2)",
                                          "S(0),Ragged(1,0:2:3)",
                                          "S(0),Ragged(0,1:3)",
                                          "S(0),Ragged(0,0:4:0)",
                                          "P,Ragged(0,6:1)",
                                          "P,Ragged(0,6:1:1)",
                                          "Ragged(0,2:6),P",
                                          "Blocks(0,3),S(0)",
                                          "S(0),Blocks(0,2)",
                                          "Cyclic(0,1),S(0)",
                                          "Cyclic(0,2),Cyclic(0,1)",
                                          "S(1),Cyclic(0,1)",
                                          "Owned(1),S(0)",
                                          "Owned(0),Owned(1)",
                                          "S(0),Owned(1)",
                                          "Owned(1,1),P",
                                          "R,Owned(1)",
                                          "Packed(0,4:2:2),R",
                                          "Packed(0,4:2:2),S(0)",
                                          "P,Packed(0,3:2:2)",
                                          "Packed(0,3:2:2),Cyclic(0,1)",
                                          "Pieces(0,0-2+5-8:2-5),S(0)",
                                          "S(0),Pieces(0,1-2:0-1+2-4)",
                                          "Packed(0,3:4,2),P",
                                          "S(1),Packed(0,5:3)"};

TEST(Rules, EveryPairOnTwoMeshDimsIsCorrectAndMovesTheMinimum) {
  for (const Shape& mesh : std::vector<Shape>{{2, 2}, {2, 3}}) {
    for (const Shape& shape : std::vector<Shape>{{8, 6}, {7, 5}, {0, 3}}) {
      const std::vector<Layout> layouts = layouts_of(test::mesh_of(mesh), shape, kOnTwoDims);
      EXPECT_GE(layouts.size(), 15U);
      check_all_pairs(layouts, shape[0] == 7);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Rules, PlansOnManyMeshDimsAndShuffledRanksAreCorrect) {
  const std::vector<std::string> on_four{
      "Ragged(0,9:3),S(0),R,S(1)", "S(1),R,Ragged(0,2:10),S(0)", "R,R,R,R",
      "P,Owned(1),Cyclic(1,1),R",  "S(0),S(0),Packed(1,3:4),R",  "R,P,P,Ragged(0,1:11)",
      "Ragged(0,9:3),R,S(1),S(0)"};
  for (const MeshPtr& mesh : {test::mesh_of({2, 2, 2, 2}), test::mesh_of({2, 1, 2, 2})}) {
    check_all_pairs(layouts_of(mesh, {12, 7}, on_four), false);
  }
  const std::vector<std::string> on_two{"Ragged(0,3:5),R", "R,Owned(0)", "P,Cyclic(0,1)",
                                        "S(0),S(0)",       "R,R",        "Ragged(0,7:1),Ragged(1,2:4)"};
  check_all_pairs(layouts_of(test::mesh_of({2, 2}, {6, 1, 4, 3}), {8, 6}, on_two), true);
}

TEST(Rules, OrdersOfCutsAreKept) {
  const MeshPtr mesh = test::mesh_of({2, 3});
  const Layout inner_first = test::layout_of(mesh, {9, 2}, "S(0),Ragged(0,4:0:5)", {{0, {1, 0}}});
  const Layout plain = test::layout_of(mesh, {9, 2}, "S(0),S(0)");
  check_layout(inner_first);
  for (const Objective objective : {Objective::kTime, Objective::kBytes}) {
    check_pair(inner_first, plain, {Lowering::kNccl, objective}, true);
    check_pair(plain, inner_first, {Lowering::kNccl, objective}, true);
  }
}

// Reading back a plan works although an intermediate layout has a plain name for parts that the source cuts by a rule.
TEST(Rules, EqualListsHaveOneNameWithAndWithoutLaterUnequalCuts) {
  const MeshPtr mesh = test::mesh_of({2, 4, 5});
  const Layout src = test::layout_of(mesh, {103, 20, 1}, "Cyclic(1,5),S(1),S(2)", {}, "int64");
  const Layout dst = test::layout_of(mesh, {103, 20, 1}, "R,R,S(0)", {}, "int64");
  const Layout between = test::layout_of(mesh, {103, 20, 1}, "Cyclic(1,5),R,S(2)", {}, "int64");
  Topology topology = Topology::named("64x8");
  topology.ranks_per_node = 8;
  topology.step_ps = 3000;
  topology.inside = {1000000, 1};
  topology.between = {0, 3000000000};
  for (const Layout& to : {dst, between})
    check_pair(src, to, {Lowering::kNccl, Objective::kTime, false, topology}, true);
  const std::vector<Step> steps = make_plan(src, between, {Lowering::kNccl}).steps;
  ASSERT_EQ(steps.size(), 1U);
  EXPECT_EQ(steps[0].mesh_dims, MeshDimSet::single(1));
}

// If the rule of one mesh dim is unchanged, data moves only along the other one.
TEST(Rules, MeshDimsWithUnchangedCutsAreNotSpanned) {
  const MeshPtr mesh = test::mesh_of({2, 3});
  const auto steps_of = [&](const std::string& src, const std::string& dst) {
    return make_plan(test::layout_of(mesh, {8, 6}, src), test::layout_of(mesh, {8, 6}, dst), {Lowering::kNccl}).steps;
  };
  for (const std::string outer : {"Ragged(0,3:5)", "Cyclic(0,3)", "Blocks(0,3)", "Packed(0,3:5)"}) {
    const std::vector<Step> steps = steps_of(outer + ",S(0)", outer + ",R");
    ASSERT_EQ(steps.size(), 1U);
    EXPECT_EQ(steps[0].op, StepOp::kAllGather);
    EXPECT_EQ(steps[0].mesh_dims, MeshDimSet::single(1));
    EXPECT_EQ(steps_of(outer + ",P", outer + ",S(1)")[0].mesh_dims, MeshDimSet::single(1));
  }
}

// S(0) under other names: nothing moves, and zero-filling for partials is local.
TEST(Rules, EqualPartsUnderAnotherNameNeedNoMove) {
  const MeshPtr mesh = test::mesh_of({2, 3});
  const auto plan_of = [&](const std::string& src, const std::string& dst) {
    return make_plan(test::layout_of(mesh, {12, 6}, src), test::layout_of(mesh, {12, 6}, dst), {Lowering::kNccl});
  };
  for (const std::string name : {"Ragged(0,4:4:4)", "Blocks(0,2)", "Blocks(0,4)", "Cyclic(0,4)", "Packed(0,12)"}) {
    EXPECT_TRUE(plan_of("R,S(0)", "R," + name).steps.empty()) << name;
    EXPECT_TRUE(plan_of("R," + name, "R,S(0)").steps.empty()) << name;
  }
  for (const std::string name : {"Ragged(0,1:7:4)", "Owned(2)", "Cyclic(0,1)", "Packed(0,5:7)"}) {
    const Plan plan = plan_of("R," + name, "R,P");
    ASSERT_EQ(plan.steps.size(), 1U) << to_string(plan);
    EXPECT_EQ(plan.steps[0].op, StepOp::kZeroFill);
    simulate(plan);
  }
}

// The first rank does not have the largest part.
TEST(Rules, TheWorstRankIsFoundWhereverItIs) {
  const MeshPtr mesh = test::mesh_of({4, 2});
  const Layout owned = test::layout_of(mesh, {16, 4}, "Owned(2),R");
  const Layout ragged = test::layout_of(mesh, {16, 4}, "Ragged(0,1:2:12:1),S(1)");
  const Layout all = test::layout_of(mesh, {16, 4}, "R,R");
  EXPECT_EQ(owned.largest_part_elements(), 64);
  EXPECT_EQ(ragged.largest_part_elements(), 24);
  for (const Layout& src : {owned, ragged}) {
    for (const Layout& dst : {owned, ragged, all}) {
      const Plan plan = make_plan(src, dst, {Lowering::kNccl});
      check_counts(plan);
      for (const Step& step : plan.steps) {
        const StepCounts found = step_counts(step, plan.lowering);
        const TrafficTotals all = totals(step, plan.lowering);
        EXPECT_EQ(found.received_bytes, all.received_bytes_max) << to_string(plan);
        EXPECT_EQ(found.sent_bytes, all.sent_bytes_max) << to_string(plan);
        EXPECT_EQ(found.touched_bytes, step.after.largest_part_bytes()) << to_string(plan);
        Step in_rounds = step;
        if (can_run_in_rounds(step, plan.lowering)) in_rounds.rounds = 2;
        EXPECT_EQ(step_counts(in_rounds, plan.lowering).received_bytes, all.received_bytes_max) << to_string(plan);
        EXPECT_EQ(step_counts(in_rounds, plan.lowering).touched_bytes, found.touched_bytes) << to_string(plan);
        Plan rounds = plan;
        rounds.steps = {in_rounds};
        if (step.before == src && step.after == dst) check_counts(rounds);
      }
    }
  }
}

std::string error_of(const MeshPtr& mesh, const Shape& shape, const std::string& placements) {
  try {
    Layout(mesh, shape, DType::parse("float32"), parse_placements(placements));
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

TEST(Rules, ErrorsNameTheRuleAndTheMeshDim) {
  const MeshPtr mesh = test::mesh_of({2, 3});
  EXPECT_EQ(
      error_of(mesh, {8, 6}, "R,Ragged(0,3:1:5)"),
      "placements: sum of the sizes of Ragged(0,3:1:5) on mesh dim 'b' must be 8, the number of elements to cut, got 9 "
      "(tensor dim 0)");
  EXPECT_EQ(
      error_of(mesh, {7, 6}, "S(0),Ragged(0,1:1:2)"),
      "placements: sum of the sizes of Ragged(0,1:1:2) on mesh dim 'b' must be 3, the number of elements to cut, got 4 "
      "(tensor dim 0, the part at a=1)");
  EXPECT_EQ(error_of(mesh, {8, 6}, "Ragged(0,3:1:4),R"),
            "placements: number of sizes of Ragged(0,3:1:4) on mesh dim 'a' must be 2, one per coordinate, got 3");
  EXPECT_EQ(error_of(mesh, {8, 6}, "Owned(2),R"),
            "placements: coordinate of Owned(0,2) on mesh dim 'a' must be in [0, 1], got 2");
  EXPECT_EQ(error_of(mesh, {8, 6}, "Ragged(5,4:4),R"),
            "placements: tensor dim of Ragged(5,4:4) on mesh dim 'a' must be in [-2, 1], got 5");
  EXPECT_NE(error_of(mesh, {int64_t{1} << 30, 6}, "Cyclic(0,1),R").find("must be at most 2^20"), std::string::npos);
  for (const char* text : {"Ragged(0)", "Ragged(0,3:)", "Ragged(0,:3)", "Ragged(0,a)", "Blocks(0,1:2)", "Cyclic(0)",
                           "Owned()", "Packed(0,)", "Ragged", "Shares(0,1)"}) {
    const std::string error = error_of(mesh, {8, 6}, std::string(text) + ",R");
    EXPECT_EQ(error.find("placements must be one of R, S(dim)"), 0u) << text;
    EXPECT_NE(error.find(concat("got '", text, "'")), std::string::npos) << text;
  }
}

TEST(Rules, TextsRoundTrip) {
  const std::map<std::string, std::string> texts{{"Ragged(0,3:1:4)", "Ragged(0,3:1:4)"},
                                                 {" Ragged( dim=-1, 3 : 5 ) ", "Ragged(-1,3:5)"},
                                                 {"Blocks(0,128)", "Blocks(0,128)"},
                                                 {"Cyclic(1,2)", "Cyclic(1,2)"},
                                                 {"Owned(1)", "Owned(0,1)"},
                                                 {"Owned(2,1)", "Owned(2,1)"},
                                                 {"Packed(0,8:4:4)", "Packed(0,8:4:4)"}};
  for (const auto& [text, shown] : texts) {
    EXPECT_EQ(Placement::parse(text).to_string(), shown);
    EXPECT_EQ(Placement::parse(shown), Placement::parse(text));
  }
}

TEST(Rules, LayoutsWithDifferentCutsAreDifferent) {
  const MeshPtr mesh = test::mesh_of({2});
  std::set<size_t> hashes;
  const std::vector<std::string> texts{
      "S(0)",          "SS(0,2)",     "Ragged(0,4:4)", "Ragged(0,3:5)",   "Ragged(0,5:3)",
      "Packed(0,3:5)", "Blocks(0,3)", "Blocks(0,4)",   "Cyclic(0,3)",     "Cyclic(0,4)",
      "Owned(0)",      "Owned(1)",    "Packed(0,8)",   "Packed(0,5:0:3)", "R"};
  const std::vector<Layout> layouts = layouts_of(mesh, {8, 2}, texts);
  ASSERT_EQ(layouts.size(), texts.size());
  for (size_t i = 0; i < layouts.size(); ++i) {
    hashes.insert(layouts[i].hash());
    for (size_t j = 0; j < layouts.size(); ++j) EXPECT_EQ(layouts[i] == layouts[j], i == j);
  }
  EXPECT_EQ(hashes.size(), layouts.size());
}

TEST(Rules, PlansBetweenMeshesAreCorrect) {
  const MeshPtr four = test::mesh_of({2, 2});
  const MeshPtr three = test::mesh_of({3}, {2, 3, 4});
  const std::vector<Layout> sources = layouts_of(
      four, {8, 6},
      {"S(0),Ragged(0,1:3)", "Ragged(0,3:5),S(0)", "Owned(1),R", "P,Cyclic(0,1)", "S(1),Packed(0,5:3)", "P,R"});
  const std::vector<Layout> destinations = layouts_of(
      three, {8, 6}, {"Ragged(0,1:0:7)", "Blocks(0,3)", "Cyclic(1,1)", "Owned(2)", "Packed(0,4:4)", "P", "R"});
  EXPECT_EQ(sources.size() * destinations.size(), 42U);
  for (const Layout& src : sources) {
    for (const Layout& dst : destinations) {
      const Plan there = make_plan(src, dst, {Lowering::kNccl});
      ASSERT_NO_THROW(simulate(there)) << to_string(there);
      if (!src.partial_dims().empty()) continue;
      const Plan back = make_plan(dst, src, {Lowering::kGloo});
      ASSERT_NO_THROW(simulate(back)) << to_string(back);
    }
  }
}

TEST(Rules, LayoutsOfEqualPartsNeedNoStep) {
  const MeshPtr mesh = test::mesh_of({2, 2});
  const auto steps = [&](const std::vector<int64_t>& shape, const char* from, const char* to) {
    const Plan plan = make_plan(test::layout_of(mesh, shape, from), test::layout_of(mesh, shape, to));
    simulate(plan);
    EXPECT_EQ(to_bytes(from_bytes(to_bytes(plan))), to_bytes(plan));
    return plan.steps.size();
  };
  for (const char* same : {"Ragged(0,4:4)", "Blocks(0,1)", "Packed(0,8)", "Pieces(0,0-4:4-8)", "Cyclic(0,4)"}) {
    EXPECT_EQ(steps({8}, concat(same, ",R").c_str(), "S(0),R"), 0u) << same;
    EXPECT_EQ(steps({8}, "S(0),P", concat(same, ",P").c_str()), 0u) << same;
    EXPECT_GT(steps({8}, concat(same, ",R").c_str(), "R,S(0)"), 0u) << same;
  }
  EXPECT_EQ(steps({7}, "Ragged(0,7:0),S(0)", "Owned(0,0),Blocks(0,4)"), 0u);
  EXPECT_EQ(steps({8}, "Pieces(0,0-8:0-8),R", "R,R"), 0u);
  EXPECT_GT(steps({8}, "Pieces(0,4-8+0-4:0-8),R", "R,R"), 0u);
}

TEST(Rules, ProductsRejectRepeatedElements) {
  const MeshPtr mesh = test::mesh_of({2});
  const auto error_of_product = [](const Layout& operand, const Layout& weight, const Layout& result) {
    try {
      check(ProductProblem{{"ab,bc->ac"}, operand, {weight}, {std::nullopt}, {result}});
    } catch (const UserError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const Layout plain = test::layout_of(mesh, {4, 4}, "S(0)");
  const Layout pieces = test::layout_of(mesh, {4, 4}, "Pieces(0,0-3:1-4)");
  for (const char* allowed : {"S(0)", "Ragged(0,1:3)", "Cyclic(1,1)", "Pieces(0,0-1+2-3:1-2+3-4)"}) {
    const Layout one = test::layout_of(mesh, {4, 4}, allowed);
    EXPECT_EQ(error_of_product(one, one, one), "");
  }
  for (int which = 0; which < 3; ++which) {
    const std::string error =
        error_of_product(which == 0 ? pieces : plain, which == 1 ? pieces : plain, which == 2 ? pieces : plain);
    EXPECT_NE(error.find("Pieces(0,0-3:1-4)]. First redistribute the tensor"), std::string::npos) << error;
  }
}

// The mesh is too large to list all coordinates; classes of ranks give the costs.
TEST(Rules, LargeMeshesArePlanned) {
  const MeshPtr mesh = test::mesh_of({8, 512});
  Elements sizes(512, 3);
  sizes[77] = 100;
  sizes[400] = 0;
  const std::string ragged = concat("Ragged(0,", join(sizes, ":"), ")");
  const int64_t n = 3 * 510 + 100;
  const Layout src = test::layout_of(mesh, {n, 64}, "S(1)," + ragged);
  EXPECT_EQ(src.largest_part_elements(), 100 * 8);
  for (const std::string dst : {"S(1),R", "R,R", "S(1),S(0)", "R,Owned(5)", "R,S(1)", "P,Blocks(0,4)"}) {
    const Plan plan = make_plan(src, test::layout_of(mesh, {n, 64}, dst), {Lowering::kNccl});
    EXPECT_GE(totals(plan).received_bytes_max, plan.dst.partial_dims().empty() ? 1 : 0) << to_string(plan);
    EXPECT_GT(peak_bytes(plan), 0);
  }
}

}  // namespace
}  // namespace shardwright
