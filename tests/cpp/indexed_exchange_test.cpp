// Layouts of ordered and repeated pieces, and of flattened dims: every pair is planned, simulated on all ranks, and
// compared with lists of elements.
#include "exchange/indexed_exchange.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "exchange/bounds.h"
#include "layouts.h"
#include "moves/describe.h"
#include "moves/step_counts.h"
#include "moves/traffic.h"
#include "planning/certified_plan.h"
#include "planning/json.h"
#include "planning/serialize.h"
#include "program/program.h"
#include "random_pieces.h"
#include "search/make_plan.h"
#include "simulate/simulate.h"
#include "support/error.h"

namespace shardwright {
namespace {

using Shape = std::vector<int64_t>;
using Elements = std::vector<int64_t>;

Layout flat(const MeshPtr& mesh, const Shape& shape, const std::string& placements) {
  return Layout(mesh, shape, DType::kFloat32, parse_placements(placements), {}, StridedMeaning::kAuto, 2);
}

// Returns the row-major numbers of the elements that a rank holds, regardless of their order there.
std::set<int64_t> held_by(const Layout& layout, Rank rank) {
  std::set<int64_t> all;
  const std::optional<Position> position = layout.mesh().position_of(rank);
  if (!position) return all;
  std::vector<int64_t> numbers{0};
  const Region region = layout.region(*position);
  for (int t = 0; t < layout.ndim(); ++t) {
    std::vector<int64_t> wider;
    for (const int64_t outer : numbers) {
      for (const Interval& one : region[t]) {
        for (int64_t i = one.begin; i < one.end; ++i) wider.push_back(outer * layout.shape()[t] + i);
      }
    }
    numbers = std::move(wider);
  }
  all.insert(numbers.begin(), numbers.end());
  return all;
}

// Returns the lower bound on what ranks receive: all that they need and lack.
Bound naive_bound(const Layout& src, const Layout& dst) {
  Bound bound;
  for (const Rank rank : dst.mesh().ranks()) {
    const std::set<int64_t> held = held_by(src, rank);
    int64_t bytes = 0;
    for (const int64_t element : held_by(dst, rank)) bytes += held.contains(element) ? 0 : src.dtype().size_bytes();
    bound.bytes_sum += bytes;
    bound.bytes_max = std::max(bound.bytes_max, bytes);
  }
  return bound;
}

// Checks everything except the bound on received bytes.
void check_plan(const CertifiedPlan& certified) {
  const Plan& plan = certified.plan();
  SCOPED_TRACE(to_string(plan));
  SimulationReport report;
  ASSERT_NO_THROW(report = simulate(plan));
  EXPECT_EQ(to_string(from_bytes(to_bytes(plan))), to_string(plan));
  const Certificate& certificate = certified.certificate();
  for (const BoundedValue& bounded : bounded_values(certificate))
    EXPECT_GE(bounded.value, bounded.bound) << bounded.name;
  EXPECT_FALSE(to_json(plan, certificate, certified.remarks()).empty());
  EXPECT_EQ(certificate.traffic.received_bytes_sum, report.received_bytes_sum);
  int64_t peak = 0;
  for (const auto& [rank, bytes] : report.peak_bytes) peak = std::max(peak, bytes);
  EXPECT_EQ(certificate.peak_bytes, peak);
}

void check_pair(const Layout& src, const Layout& dst, const PlanOptions& options) {
  const CertifiedPlan certified(make_plan(src, dst, options));
  check_plan(certified);
  SCOPED_TRACE(to_string(certified.plan()));
  const Certificate& certificate = certified.certificate();
  if (!src.partial_dims().empty() || !dst.partial_dims().empty()) return;
  const Bound bound = naive_bound(src, dst);
  EXPECT_EQ(certificate.received.bytes_sum, bound.bytes_sum);
  EXPECT_EQ(certificate.received.bytes_max, bound.bytes_max);
  EXPECT_EQ(certificate.traffic.received_bytes_max, bound.bytes_max);
}

std::vector<Layout> some_layouts(const MeshPtr& mesh, const Shape& shape, const std::vector<std::string>& placements) {
  std::vector<Layout> all;
  for (const std::string& one : placements) all.push_back(test::layout_of(mesh, shape, one));
  return all;
}

// Checks all pairs. The given objective and lowering alternate with other ones.
void check_all_pairs(const std::vector<Layout>& sources, const std::vector<Layout>& destinations) {
  int64_t pairs = 0;
  for (const Layout& src : sources) {
    for (const Layout& dst : destinations) {
      if (!needs_rearrangement(src, dst)) continue;
      const bool is_even = pairs++ % 2 == 0;
      check_pair(src, dst,
                 {.lowering = is_even ? Lowering::kGloo : Lowering::kNccl,
                  .objective = is_even ? Objective::kTime : Objective::kBytes});
      if (testing::Test::HasFailure()) return;
    }
  }
}

// Zigzag, reversed, repeated, partly repeated, on one rank only, and in plain order.
const std::vector<std::string> kOfSeven{"R",
                                        "S(0)",
                                        "S(1)",
                                        "P",
                                        "Ragged(0,4:3)",
                                        "Pieces(0,0-2+5-7:2-5)",
                                        "Pieces(0,5-7+0-2:4-5+3-4+2-3)",
                                        "Pieces(0,0-7:0-7)",
                                        "Pieces(0,3-7+0-3:)",
                                        "Pieces(0,0-5:6-7+2-6)"};

TEST(Pieces, MoveBetweenAllLayoutsOfOneMeshDim) {
  const MeshPtr mesh = test::mesh_of({2});
  const std::vector<Layout> layouts = some_layouts(mesh, {7, 3}, kOfSeven);
  check_all_pairs(layouts, layouts);
}

TEST(Pieces, MoveBetweenAllLayoutsOfTwoMeshDims) {
  const MeshPtr mesh = test::mesh_of({2, 2}, {3, 1, 0, 2});
  std::vector<std::string> placements;
  for (const std::string a : {"R", "S(0)", "S(1)", "P", "Pieces(0,5-7+0-2:4-5+2-4)", "Pieces(0,0-5:6-7+2-6)"}) {
    for (const std::string b : {"R", "S(0)", "S(1)", "P", "Pieces(1,2-4+0-1:1-3)"}) {
      if (a != "S(1)" || b[0] != 'P' || b == "P") placements.push_back(a + "," + b);
    }
  }
  const std::vector<Layout> layouts = some_layouts(mesh, {7, 4}, placements);
  check_all_pairs(layouts, layouts);
}

TEST(Pieces, NestWithOuterAndInnerCuts) {
  const MeshPtr mesh = test::mesh_of({2, 3});
  const std::vector<Layout> layouts{test::layout_of(mesh, {12}, "Pieces(0,8-12+0-4:4-8+2-4),S(0)"),
                                    test::layout_of(mesh, {12}, "S(0),Pieces(0,4-6:2-5+0-1:0-2)"),
                                    test::layout_of(mesh, {12}, "S(0),Pieces(0,8-12:2-5+0-1:5-8+0-2)", {{0, {1, 0}}}),
                                    test::layout_of(mesh, {12}, "Cyclic(0,2),Pieces(0,4-6:2-5+0-1:0-2)"),
                                    test::layout_of(mesh, {12}, "S(0),R"),
                                    test::layout_of(mesh, {12}, "R,Cyclic(0,1)")};
  for (const Layout& one : layouts) {
    std::set<int64_t> all;
    for (const Rank rank : mesh->ranks()) all.merge(held_by(one, rank));
    EXPECT_EQ(all.size(), 12u) << one.to_string();
  }
  const std::vector<Layout> sources{layouts[0], layouts[4], layouts[5]};
  check_all_pairs(sources, layouts);
}

TEST(Pieces, MoveBetweenMeshes) {
  const MeshPtr two = test::mesh_of({2}, {1, 0});
  const std::vector<Layout> sources = some_layouts(two, {7, 3}, kOfSeven);
  for (const std::vector<int64_t>& ranks : {std::vector<int64_t>{1, 2, 0}, {2, 3, 4}}) {
    const MeshPtr three = test::mesh_of({3}, ranks);
    const std::vector<Layout> destinations =
        some_layouts(three, {7, 3}, {"R", "S(0)", "P", "Pieces(0,5-7:3-5+0-1:1-3)", "Pieces(0,0-7:2-4:6-7+0-2)"});
    check_all_pairs(sources, destinations);
    check_all_pairs(some_layouts(three, {7, 3}, {"R", "S(1)", "P", "Pieces(0,5-7:3-5+0-1:1-3)"}), sources);
  }
}

TEST(Pieces, AreRearrangedOnOneMeshBeforeTheyCross) {
  const Layout src = test::layout_of(test::mesh_of({2}), {12, 8}, "Pieces(0,6-12+0-3:3-6+0-1)");
  const Layout mid = test::layout_of(test::mesh_of({2}), {12, 8}, "R");
  for (const MeshPtr& mesh : {test::mesh_of({2}, {2, 3}), test::mesh_of({2, 2}, {2, 3, 4, 5})}) {
    const Layout dst = test::layout_of(mesh, {12, 8}, mesh->ndim() == 1 ? "S(0)" : "S(0),S(1)");
    const Plan plan = plan_through({src, mid, dst}, PlanOptions());
    EXPECT_EQ(to_string(from_bytes(to_bytes(plan))), to_string(plan));
  }
}

// If groups span single mesh dims, pending sums are reduced dim by dim, and plans to another mesh keep these steps.
TEST(Pieces, AreReducedOverGivenGroups) {
  const MeshPtr mesh = test::mesh_of({2, 2, 2});
  const Layout src = test::layout_of(mesh, {7, 4}, "P,Pieces(0,5-7+0-2:2-5),P");
  const Layout reduced = test::layout_of(mesh, {7, 4}, "R,Pieces(0,5-7+0-2:2-5),R");
  const std::vector<MeshDimSet> own{MeshDimSet::single(0), MeshDimSet::single(1), MeshDimSet::single(2)};
  for (const Lowering& lowering : {Lowering::kGloo, Lowering::kNccl}) {
    const Plan on_own = make_plan(src, reduced, {.lowering = lowering, .groups = own});
    simulate(on_own);
    ASSERT_EQ(on_own.steps.size(), 2u);
    const Layout dst = test::layout_of(test::mesh_of({3}, {8, 9, 10}), {7, 4}, "Pieces(0,5-7:3-5+0-1:1-3)");
    const Plan plan = plan_through({src, on_own.steps[0].after, on_own.steps[1].after, dst}, {.lowering = lowering});
    simulate(plan);
    ASSERT_EQ(plan.steps.size(), 3u);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(plan.steps[i].op, StepOp::kAllReduce);
      EXPECT_EQ(mesh->group_size(plan.steps[i].mesh_dims), 2);
    }
    // A group of both mesh dims is used if it is given.
    const std::vector<MeshDimSet> both{MeshDimSet::single(0) | MeshDimSet::single(2)};
    EXPECT_EQ(make_plan(src, reduced, {.lowering = lowering, .groups = both}).steps.size(), 1u);
  }
  EXPECT_THROW(make_plan(src, reduced, {.groups = {MeshDimSet::single(0)}}), UserError);
  EXPECT_THROW(make_plan(src, test::layout_of(mesh, {7, 4}, "R,S(0),R"), {.groups = own}), UserError);
}

// Sums are scattered only if one move does it, and no move is known for cuts behind uneven nested ones.
TEST(Pieces, AreReducedBehindNestedUnevenCuts) {
  const MeshPtr mesh = test::mesh_of({2, 2, 2});
  for (const char* cut : {"Cyclic(0,1)", "SS(0,2)", "S(0)"}) {
    for (const int64_t n : {12, 16}) {
      const Layout src = test::layout_of(mesh, {n}, concat("P,", cut, ",S(0)"));
      const std::string pieces = concat("Pieces(0,", n / 2, "-", n, "+0-", n / 2, ":)");
      check_pair(src, test::layout_of(mesh, {n}, concat("R,R,", pieces)), {});
      check_pair(src, test::layout_of(mesh, {n}, concat(pieces, ",R,R")), {});
    }
  }
}

TEST(FlattenedDims, MoveToAndFromAllLayouts) {
  const MeshPtr mesh = test::mesh_of({2, 2});
  const Shape shape{3, 4, 2};
  std::vector<Layout> flattened;
  for (const std::string a : {"Ragged(0,5:7)", "S(1)", "R", "P", "Pieces(0,7-12+0-3:2-8)"}) {
    for (const std::string b : {"R", "S(0)", "P"}) {
      flattened.push_back(flat(mesh, shape, a + "," + b));
    }
  }
  std::vector<std::string> plain;
  for (const std::string a : {"R", "S(0)", "S(1)", "S(2)", "P"}) {
    for (const std::string b : {"R", "S(1)", "P"}) plain.push_back(a + "," + b);
  }
  check_all_pairs(flattened, some_layouts(mesh, shape, plain));
  check_all_pairs(some_layouts(mesh, shape, plain), flattened);
  check_all_pairs({flattened[0], flattened[1]}, flattened);
}

TEST(FlattenedDims, MoveBetweenMeshes) {
  const MeshPtr two = test::mesh_of({2});
  const MeshPtr three = test::mesh_of({3}, {1, 2, 3});
  const Shape shape{3, 4, 2};
  check_all_pairs({flat(two, shape, "Ragged(0,5:7)"), flat(two, shape, "P")},
                  {test::layout_of(three, shape, "S(1)"), flat(three, shape, "Ragged(0,1:0:11)")});
  check_all_pairs({test::layout_of(three, shape, "S(2)")}, {flat(two, shape, "Ragged(0,5:7)")});
}

TEST(FlattenedDims, KeepTheShapeOfTheTensor) {
  const MeshPtr mesh = test::mesh_of({2});
  const Layout one = flat(mesh, {3, 4, 2}, "Ragged(0,5:7)");
  EXPECT_EQ(one.tensor_shape(), (Shape{3, 4, 2}));
  EXPECT_EQ(one.shape(), (Shape{12, 2}));
  EXPECT_EQ(one.local_shape(1), (Shape{7, 2}));
  EXPECT_FALSE(one == test::layout_of(mesh, {12, 2}, "Ragged(0,5:7)"));
  EXPECT_THROW(make_plan(one, test::layout_of(mesh, {12, 2}, "R"), {}), UserError);
  EXPECT_THROW(Layout(mesh, {3}, DType::kFloat32, parse_placements("R"), {}, StridedMeaning::kAuto, 2), UserError);
}

std::string error_of(const std::string& placement, const Shape& shape) {
  try {
    test::layout_of(test::mesh_of({2}), shape, placement);
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

TEST(Pieces, ErrorsNameTheWrongInterval) {
  EXPECT_NE(error_of("Pieces(0,0-2:3-7)", {7}).find("got none for [2, 3)"), std::string::npos);
  EXPECT_NE(error_of("Pieces(0,0-2:2-6)", {7}).find("got none for [6, 7)"), std::string::npos);
  EXPECT_NE(error_of("Pieces(0,0-2:2-8)", {7}).find("the number of elements to cut, got 8"), std::string::npos);
  EXPECT_NE(error_of("Pieces(0,0-3+2-4:4-7)", {7}).find("got element 2 twice for coordinate 0"), std::string::npos);
  EXPECT_NE(error_of("Pieces(0,0-3:3-7:)", {7}).find("must be 2, one per coordinate, got 3"), std::string::npos);
  EXPECT_NE(error_of("Pieces(0,3-0:0-7)", {7}).find("got [3, 0) for coordinate 0"), std::string::npos);
  EXPECT_NE(error_of("Pieces(0,x:0-7)", {7}).find("got 'Pieces(0,x:0-7)'"), std::string::npos);
}

TEST(Pieces, AscendingDisjointPiecesArePartitions) {
  EXPECT_TRUE(Placement::parse("Pieces(0,0-2+5-7:2-5)").rule.is_partition());
  EXPECT_FALSE(Placement::parse("Pieces(0,5-7+0-2:2-5)").rule.is_partition());
  EXPECT_FALSE(Placement::parse("Pieces(0,0-3+5-7:2-5)").rule.is_partition());
  const std::string text = "Pieces(0,0-2+5-7::2-5)";
  EXPECT_EQ(Placement::parse(text).to_string(), text);
}

// Ranks 0 and 1 both hold 12 rows. Ranks 4 to 6 need 4 each.
TEST(IndexedExchange, BalancesAllSendersOfAnElement) {
  const Layout src = test::layout_of(test::mesh_of({2}), {12}, "Pieces(0,6-12+0-6:0-12)");
  const Layout dst = test::layout_of(test::mesh_of({3}, {4, 5, 6}), {12}, "S(0)");
  EXPECT_EQ(IndexedExchange(src, dst, ReplicaPolicy::kEvenBytes).maxima().sent_bytes, 6 * 4);
  EXPECT_EQ(IndexedExchange(src, dst, ReplicaPolicy::kWholeMessages).maxima().sent_bytes, 8 * 4);
}

// Rank 9 needs experts that ranks 3 and 11 hold, and receives them from rank 11, which is nearer.
TEST(IndexedExchange, PrefersTheNearestSender) {
  const Layout src = test::layout_of(test::mesh_of({2}, {3, 11}), {4}, "Pieces(0,2-4+0-2:0-4)");
  const Layout dst = test::layout_of(test::mesh_of({2}, {1, 9}), {4}, "R");
  const IndexedExchange exchange(src, dst, ReplicaPolicy::kWholeMessages);
  const std::vector<Exchange::Message> messages = exchange.messages(Rank{9}, Direction::kReceive);
  ASSERT_EQ(messages.size(), 1u);
  EXPECT_EQ(messages[0].peer, Rank{11});
}

// Random pieces on random meshes, alone or with other cuts.
TEST(Pieces, RandomPiecesMoveCorrectly) {
  test::RandomPieces random(20);
  for (int i = 0; i < 150; ++i) {
    const int64_t n = random.pick(1, 20);
    check_pair(random.layout(n), random.layout(n), {.lowering = Lowering::kGloo});
    ASSERT_FALSE(HasFailure()) << "pair " << i;
  }
}

// If several coordinates of one mesh dim hold an element and another mesh dim cuts too, senders are chosen for both
// dims together.
TEST(Pieces, SendersAreBalancedOverTwoCutDims) {
  test::RandomPieces random(21, 40);
  for (int i = 0; i < 100; ++i) {
    const int64_t n = random.pick(20, 100);
    const Layout src = random.layout(n, 2, "S(1)");
    const Layout dst = random.layout(n, 2, i % 2 == 0 ? "S(1)" : "Cyclic(0,3)");
    const PlanOptions options{.lowering = Lowering::kGloo, .objective = Objective::kBytes};
    check_pair(src, dst, options);
    ASSERT_FALSE(HasFailure()) << "pair " << i;
    const ExchangeBound bound = exchange_bound(src, dst);
    const int64_t least = std::max(bound.received_bytes_max, bound.direct_sent_bytes_max);
    const Plan plan = make_plan(src, dst, options);
    ASSERT_LE(totals(plan).sent_bytes_max, least + least / 20) << to_string(plan);
  }
}

// Two ranks have a sequence in zigzag order. Eight others need all of it, in order or in the same zigzag order and four
// times each.
TEST(Pieces, AreSentInStripesToManyReceivers) {
  const Layout src = test::layout_of(test::mesh_of({2}), {1 << 14}, "Pieces(0,0-4096+12288-16384:4096-12288)");
  const MeshPtr mesh = test::mesh_of({2, 4}, {2, 3, 4, 5, 6, 7, 8, 9});
  Topology quick = Topology::named("gloo-local");
  quick.step_ps = quick.inside.message_ps = quick.between.message_ps = 1000;
  for (const char* placements : {"R,R", "Pieces(0,8192-16384+0-8192:0-4096+12288-16384+4096-12288),R"}) {
    const Layout dst = test::layout_of(mesh, {1 << 14}, placements);
    const CertifiedPlan fast(make_plan(src, dst, {.lowering = Lowering::kGloo, .topology = quick}));
    const CertifiedPlan straight(make_plan(src, dst, {.lowering = Lowering::kGloo, .objective = Objective::kBytes}));
    check_plan(fast);
    check_plan(straight);
    EXPECT_EQ(straight.plan().steps.size(), 1u);
    ASSERT_GE(fast.plan().steps.size(), 2u) << to_string(fast.plan());
    EXPECT_LT(4 * step_counts(fast.plan().steps.front(), Lowering::kGloo).sent_bytes,
              straight.traffic().sent_bytes_max + 64);
    EXPECT_EQ(fast.certificate().traffic.received_bytes_max, straight.certificate().traffic.received_bytes_max);
  }
}

// Stripes between random pieces, some of which the receivers already hold.
TEST(Pieces, StripesMoveCorrectly) {
  test::RandomPieces random(22, 40);
  Topology quick = Topology::named("gloo-local");
  quick.step_ps = quick.inside.message_ps = quick.between.message_ps = 1;
  int64_t in_stripes = 0;
  for (int i = 0; i < 100; ++i) {
    const int64_t n = random.pick(20, 100);
    const Layout src = random.layout(n, 1, "R");
    const Layout dst = random.layout(n, 3, "R");
    const CertifiedPlan certified(make_plan(src, dst, {.lowering = Lowering::kGloo, .topology = quick}));
    check_plan(certified);
    ASSERT_FALSE(HasFailure()) << "pair " << i;
    in_stripes += certified.plan().steps.size() > 1;
  }
  EXPECT_GT(in_stripes, 20);
}

TEST(BlockCyclic, ProgramsHaveFewBoxes) {
  const MeshPtr mesh = test::mesh_of({4});
  const Layout src = test::layout_of(mesh, {200003}, "Cyclic(0,1)");
  for (const std::string text : {"R", "S(0)", "Cyclic(0,3)"}) {
    const Program program = compile(make_plan(src, test::layout_of(mesh, {200003}, text), {}), Rank{1});
    size_t boxes = 0;
    for (const Instruction& instruction : program.instructions) {
      if (const Copy* copy = std::get_if<Copy>(&instruction.operation)) boxes += copy->boxes.size();
    }
    EXPECT_LE(boxes, 64u) << text;
  }
}

}  // namespace
}  // namespace shardwright
