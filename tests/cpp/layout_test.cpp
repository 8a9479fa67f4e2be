#include "layout/layout.h"

#include <gtest/gtest.h>

#include <type_traits>

#include "layouts.h"
#include "naive.h"
#include "support/error.h"
#include "support/utf8.h"

namespace shardwright {
namespace {

using test::layout_of;
using test::mesh_of;

std::vector<int64_t> elements(const IntervalList& list) {
  std::vector<int64_t> out;
  for (const Interval& interval : list) {
    for (int64_t i = interval.begin; i < interval.end; ++i) out.push_back(i);
  }
  return out;
}

void expect_refused(const std::function<void()>& call, const std::vector<std::string>& mentions) {
  try {
    call();
    FAIL() << "was accepted";
  } catch (const UserError& error) {
    for (const std::string& mention : mentions) {
      EXPECT_NE(std::string(error.what()).find(mention), std::string::npos) << error.what() << " lacks " << mention;
    }
  }
}

TEST(Layout, RegionsMatchAnElementwiseOracle) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{2}, {3}, {2, 2}, {2, 3}, {2, 2, 2}, {1, 2}}) {
    for (const auto& shape : std::vector<std::vector<int64_t>>{{7, 5}, {5, 3}, {1, 1}, {0, 3}, {8, 8}}) {
      const MeshPtr mesh = mesh_of(sizes);
      for (const Layout& layout : test::all_layouts(mesh, shape, {})) {
        for (int64_t p = 0; p < mesh->size(); ++p) {
          const Region region = layout.region(p);
          for (size_t t = 0; t < shape.size(); ++t) {
            std::vector<int64_t> expected = naive::iota(shape[t]);
            for (const Cut& c : layout.cuts(static_cast<int>(t))) {
              expected = naive::chunk(expected, mesh->dim_size(c.mesh_dim), mesh->coordinate(p, c.mesh_dim));
            }
            ASSERT_EQ(elements(region[t]), expected) << layout.to_string() << " at " << p;
          }
        }
      }
    }
  }
}

TEST(Layout, NestedShardingIsNotShardingOnceOverTheProduct) {
  // 5 rows on 2x2: 2/1/1/1, where one mesh dim of 4 gives 2/2/1/0.
  const Layout nested = layout_of(mesh_of({2, 2}), {5, 3}, "S(0),S(0)");
  const Layout flat = layout_of(mesh_of({4}), {5, 3}, "S(0)");
  std::vector<int64_t> nested_rows;
  std::vector<int64_t> flat_rows;
  for (int64_t p = 0; p < 4; ++p) {
    nested_rows.push_back(nested.local_shape(p)[0]);
    flat_rows.push_back(flat.local_shape(p)[0]);
  }
  EXPECT_EQ(nested_rows, (std::vector<int64_t>{2, 1, 1, 1}));
  EXPECT_EQ(flat_rows, (std::vector<int64_t>{2, 2, 1, 0}));
}

TEST(Layout, SplitFactorsDecodeToTheOrderOfCuts) {
  // FSDP on top of tensor parallelism: the second mesh dim cuts first.
  const Layout strided = layout_of(mesh_of({2, 2}), {8, 8}, "SS(0,2),S(0)");
  EXPECT_EQ(strided, layout_of(mesh_of({2, 2}), {8, 8}, "S(0),S(0)", {{0, {1, 0}}}));
  // From torch's documentation of the conversion: mesh (4,3,2), order (2, 0, 1).
  const Layout three = layout_of(mesh_of({4, 3, 2}), {48, 2}, "SS(0,2),SS(0,2),S(0)");
  EXPECT_EQ(three, layout_of(mesh_of({4, 3, 2}), {48, 2}, "S(0),S(0),S(0)", {{0, {2, 0, 1}}}));
}

TEST(Layout, SplitFactorsThatEncodeNoOrderAreLiteral) {
  const Layout literal = layout_of(mesh_of({2}), {8, 1}, "SS(0,2)");
  EXPECT_EQ(elements(literal.region(1)[0]), (std::vector<int64_t>{2, 3, 6, 7}));
  expect_refused(
      [] {
        Layout(mesh_of({2}), {8, 1}, DType::parse("float32"), parse_placements("SS(0,2)"), {}, StridedMeaning::kOrder);
      },
      {"placements", "SS(0,2)", "literal"});
}

TEST(Layout, RanksOutsideTheMeshHoldNothing) {
  const Layout layout = layout_of(mesh_of({2}, {3, 5}), {4, 2}, "S(0)");
  EXPECT_EQ(layout.local_shape_of_rank(Rank{5}), (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(layout.local_shape_of_rank(Rank{0}), (std::vector<int64_t>{0}));
}

TEST(Layout, EveryRankHoldsZeroDimTensors) {
  const Layout layout = layout_of(mesh_of({2, 2}), {}, "R,P");
  EXPECT_EQ(layout.local_shape(3), (std::vector<int64_t>{}));
  EXPECT_EQ(num_elements(layout.region(3)), 1);
}

TEST(Layout, OrdersMayLeaveOutMeshDimsOfSizeOne) {
  const MeshPtr mesh = mesh_of({2, 1, 2});
  const Layout layout = layout_of(mesh, {8}, "S(0),S(0),S(0)", {{0, {2, 0}}});
  EXPECT_EQ(layout, layout_of(mesh, {8}, "S(0),S(0),S(0)", {{0, {2, 1, 0}}}));
  EXPECT_EQ(elements(layout.region(1)[0]), (std::vector<int64_t>{4, 5}));
  expect_refused([&] { layout_of(mesh, {8}, "S(0),S(0),S(0)", {{0, {2}}}); }, {"shard_order", "(2)", "(0, 1, 2)"});
  expect_refused([&] { layout_of(mesh, {8}, "S(0),R,S(0)", {{0, {2, 1, 0}}}); }, {"shard_order", "(0, 2)"});
}

TEST(Layout, NegativeDimsCountFromTheEnd) {
  EXPECT_EQ(layout_of(mesh_of({2}), {4, 2}, "S(-1)"), layout_of(mesh_of({2}), {4, 2}, "S(1)"));
}

TEST(Layout, ErrorsNameTheArgument) {
  const MeshPtr mesh = mesh_of({2, 2});
  expect_refused([&] { layout_of(mesh, {4, 4}, "S(0)"); }, {"placements must have one item per mesh dim, 2", "got 1"});
  expect_refused([&] { layout_of(mesh, {4, 4}, "S(2),R"); }, {"placements", "S(2)", "'a'", "in [-2, 1], got 2"});
  expect_refused([&] { layout_of(mesh, {}, "S(0),R"); }, {"placements", "S(0)"});
  expect_refused([&] { layout_of(mesh, {4}, "P(sum),P(max)"); }, {"P(sum)", "P(max)"});
  expect_refused([&] { layout_of(mesh, {4}, "P(norm 2),P(sum)"); }, {"P(norm 2)", "P(sum)"});
  expect_refused([&] { layout_of(mesh, {4}, "P(sum),R", {}, "float8_e4m3fn"); }, {"dtype", "float8_e4m3fn", "sum"});
  expect_refused([&] { layout_of(mesh, {4}, "P(band),R"); }, {"dtype", "float32", "band"});
  expect_refused([&] { layout_of(mesh, {4}, "SS(0,0),R"); }, {"split factor of SS(0,0)", "in [1, 1048576], got 0"});
  expect_refused([&] { layout_of(mesh, {4}, "SS(0,4611686018427387904),R"); }, {"in [1, 1048576], got 4611686018"});
  expect_refused([&] { layout_of(mesh, {-4}, "R,R"); }, {"shape", "-4"});
  expect_refused([&] { layout_of(mesh, {1 << 30, 1 << 24}, "R,R"); }, {"shape", "float32 on 4 ranks", "2^57 bytes"});
  expect_refused([&] { Layout(mesh, {4}, DType::parse("float32"), {Placement::partial(ReduceOp::kNorm, 0), {}}); },
                 {"placements: norm power of", "got 0"});
  expect_refused([&] { layout_of(mesh, {4}, "S(0),S(0)", {{0, {0}}}); }, {"shard_order", "(0)", "(0, 1)"});
  expect_refused([&] { layout_of(mesh, {4}, "S(0),R", {{1, {0}}}); }, {"shard_order: tensor dim", "in [0, 0], got 1"});
  expect_refused([&] { layout_of(mesh, {4}, "Q,R"); }, {"'Q'", "SS(dim,split_factor)"});
  expect_refused([&] { layout_of(mesh, {4}, "P(mean),R"); }, {"P(mean)"});
  expect_refused([&] { layout_of(mesh, {4}, "R,R", {}, "float33"); }, {"dtype", "float33", "float32"});
  expect_refused([] { mesh_of({2, 0}); }, {"mesh: size of dim 'b'", "at least 1, got 0"});
  expect_refused([] { mesh_of({2}, {1, 1}); }, {"mesh: ranks must be distinct, got 1 twice"});
  expect_refused([] { mesh_of({2}, {1}); }, {"mesh: number of ranks must be 2", "got 1"});
  expect_refused([] { Mesh({"a", "a"}, {2, 2}); }, {"mesh: dim names must be distinct", "got ('a', 'a')"});
  expect_refused([] { Mesh({"a\xff"}, {2}); }, {"mesh: dim name", "'a\\xff'", "UTF-8"});
}

TEST(Mesh, HasAMillionRanksAtMost) {
  EXPECT_EQ(mesh_of({1024, 1024})->size(), Mesh::kMaxSize);
  for (const std::vector<int64_t>& sizes :
       std::vector<std::vector<int64_t>>{{1024, 1025}, {Mesh::kMaxSize + 1}, {INT64_MAX}, {INT64_MAX, 2, INT64_MAX}}) {
    expect_refused([&] { mesh_of(sizes); }, {"mesh must have at most 1048576 ranks, got sizes ("});
  }
}

TEST(Utf8, FollowsTheStandard) {
  for (const std::string text :
       {"", "dp", "\u00e4", "\u20ac", "\U0001f600", "\u0080", "\u07ff", "\u0800", "\uffff", "\U0010ffff"}) {
    EXPECT_TRUE(is_utf8(text)) << text;
  }
  // A lone continuation byte, a sequence that ends too early, overlong forms of '/', a surrogate, a code point beyond
  // U+10FFFF, bytes that never begin a character.
  for (const std::string bytes :
       {"\x80", "a\xc3", "\xe2\x82", "\xf0\x9f\x98", "\xc0\xaf", "\xe0\x80\xaf", "\xf0\x80\x80\xaf", "\xed\xa0\x80",
        "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff", "\xc3("}) {
    EXPECT_FALSE(is_utf8(bytes)) << bytes.size() << " bytes from " << static_cast<int>(bytes[0]);
  }
}

TEST(Placement, TextsOfTorchAreParsed) {
  const std::vector<std::pair<std::string, std::string>> pairs{{"Replicate()", "R"},
                                                               {" Replicate( ) ", "R"},
                                                               {"Shard(0)", "S(0)"},
                                                               {"Shard( dim = -1 )", "S(-1)"},
                                                               {"Partial()", "P(sum)"},
                                                               {"Partial(max)", "P(max)"},
                                                               {"Partial(reduce_op=band)", "P(band)"},
                                                               {"_StridedShard(dim=1, sf=4)", "SS(1,4)"},
                                                               {"_StridedShard(1, split_factor=4)", "SS(1,4)"},
                                                               {"_S(1, 4)", "SS(1,4)"},
                                                               {"_NormPartial(0.5)", "P(norm 0.5)"},
                                                               {"_NormP(2)", "P(norm 2)"}};
  for (const auto& [printed, ours] : pairs) EXPECT_EQ(Placement::parse(printed), Placement::parse(ours)) << printed;
  for (const char* wrong : {"Shard()", "Shard", "Shard(op=0)", "Shard(0, 1)", "Replicate(0)", "Partial(0)", "_S(1)",
                            "StridedShard(4)", "_NormP()", "shard(0)", "Shard(dim=)", "Shard(0"}) {
    expect_refused([&] { Placement::parse(wrong); }, {"placements", wrong, "Shard(dim=0)"});
  }
}

TEST(DType, ShortNamesAreAliasesOfLongNames) {
  const std::vector<std::pair<std::string, std::string>> pairs{
      {"bf16", "bfloat16"}, {"torch.half", "float16"}, {"f32", "float32"},     {"double", "float64"},
      {"i8", "int8"},       {"long", "int64"},         {"cfloat", "complex64"}};
  for (const auto& [alias, name] : pairs) EXPECT_EQ(DType::parse(alias).name(), name);
  for (const std::string& name : DType::known_names()) EXPECT_EQ(DType::parse(name).name(), name);
}

TEST(Placement, TextsRoundTrip) {
  for (const std::string text :
       {"R", "S(0)", "S(12)", "SS(1,4)", "P(sum)", "P(avg)", "P(min)", "P(max)", "P(product)", "P(band)", "P(bor)",
        "P(bxor)", "P(norm 2)", "P(norm 1.5)", "P(norm 0.1234567891)", "P(norm 1e-320)"}) {
    EXPECT_EQ(Placement::parse(text).to_string(), text);
  }
  EXPECT_EQ(Placement::parse("P"), Placement::partial(ReduceOp::kSum));
  EXPECT_EQ(parse_placements(" SS(0, 2) , R").size(), 2u);
}

// Rank and Position do not convert to each other, and plain numbers convert to neither.
TEST(Mesh, RanksAndPositionsAreDistinctTypes) {
  static_assert(!std::is_convertible_v<int64_t, Rank> && !std::is_convertible_v<Rank, int64_t>);
  static_assert(!std::is_convertible_v<int64_t, Position> && !std::is_convertible_v<Position, Rank>);
  const MeshPtr mesh = mesh_of({2}, {3, 5});
  EXPECT_EQ(mesh->rank_at(Position{1}), Rank{5});
  EXPECT_EQ(mesh->position_of(Rank{5}), Position{1});
  EXPECT_FALSE(mesh->position_of(Rank{1}).has_value());
  EXPECT_EQ(mesh_of({2})->position_of(Rank{2}), std::nullopt);
  EXPECT_EQ(concat(Rank{5}, " of ", join(mesh->ranks())), "5 of 3, 5");
}

TEST(Mesh, GroupsAscendByRankForAnyRankOrder) {
  const MeshPtr mesh = mesh_of({2, 2, 2}, {7, 6, 5, 4, 3, 2, 1, 0});
  MeshDimSet outer_and_inner;
  outer_and_inner.insert(0);
  outer_and_inner.insert(2);
  EXPECT_EQ(to_ints(mesh->ranks_at(mesh->group(3, outer_and_inner))), (std::vector<int64_t>{0, 1, 4, 5}));
}

}  // namespace
}  // namespace shardwright
