// Views that move nothing: every rank keeps its elements in their order, and a view is found if some layout has these
// parts.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "indices.h"
#include "layouts.h"
#include "moves/step_counts.h"
#include "random_pieces.h"
#include "support/error.h"
#include "views/move_first.h"
#include "views/view.h"

namespace shardwright {
namespace {

using test::layout_of;
using test::mesh_of;
using Shape = std::vector<int64_t>;

// Returns the elements of the rank at a position, as row-major indices into the full tensor, in local order.
std::vector<int64_t> elements_at(const Layout& layout, int64_t position) {
  std::vector<int64_t> elements;
  for_each_index(layout.region(position), [&](const std::vector<int64_t>& index) {
    int64_t element = 0;
    for (int t = 0; t < layout.ndim(); ++t) element = element * layout.shape()[t] + index[t];
    elements.push_back(element);
  });
  return elements;
}

// Returns the elements of all ranks, by rank, as one list.
std::vector<int64_t> holdings(const Layout& layout) {
  std::vector<int64_t> all;
  for (int64_t position = 0; position < layout.mesh().size(); ++position) {
    const std::vector<int64_t> elements = elements_at(layout, position);
    all.push_back(-1);
    all.insert(all.end(), elements.begin(), elements.end());
  }
  return all;
}

// Returns all shapes with n elements and up to three dims, without dims of one element.
std::vector<Shape> shapes_of(int64_t n) {
  std::vector<Shape> shapes{{n}};
  for (int64_t a = 2; a < n; ++a) {
    if (n % a != 0) continue;
    shapes.push_back({a, n / a});
    for (int64_t b = 2; b < n / a; ++b) {
      if (n / a % b == 0) shapes.push_back({a, b, n / a / b});
    }
  }
  return shapes;
}

// Visits every layout of a shape on a mesh, with rules that have a small number of forms, in every order of cuts.
void for_each_layout(const MeshPtr& mesh, const Shape& shape, bool with_all_rules,
                     const std::function<void(const Layout&)>& visit) {
  std::vector<Placement> placements(mesh->ndim());
  const std::function<void(int)> place = [&](int d) {
    if (d == mesh->ndim()) {
      std::vector<std::vector<int>> by_dim(shape.size());
      for (int m = 0; m < mesh->ndim(); ++m) {
        if (placements[m].is_shard_like()) by_dim[placements[m].dim].push_back(m);
      }
      const std::function<void(size_t, ShardOrder)> order = [&](size_t t, ShardOrder so_far) {
        if (t == shape.size()) {
          visit(Layout(mesh, shape, DType::parse("float32"), placements, so_far, StridedMeaning::kLiteral));
          return;
        }
        if (by_dim[t].empty()) return order(t + 1, so_far);
        std::vector<int> dims = by_dim[t];
        do {
          so_far[static_cast<int64_t>(t)] = dims;
          order(t + 1, so_far);
        } while (std::next_permutation(dims.begin(), dims.end()));
      };
      return order(0, {});
    }
    placements[d] = Placement::replicate();
    place(d + 1);
    for (size_t t = 0; t < shape.size(); ++t) {
      std::vector<CutRule> rules;
      for (int64_t f = 1; f <= shape[t]; ++f) rules.emplace_back(f);
      for (int64_t b = 2; b <= shape[t] && with_all_rules; ++b) {
        rules.push_back(CutRule::blocks(b));
        rules.push_back(CutRule::cyclic(b));
      }
      for (int64_t c = 0; c < mesh->dim_size(d) && with_all_rules; ++c) rules.push_back(CutRule::owned(c));
      for (const CutRule& rule : rules) {
        placements[d] = Placement::cut(static_cast<int64_t>(t), rule);
        place(d + 1);
      }
    }
  };
  place(0);
}

// Returns true if all dims that several mesh dims cut are cut in the order of the mesh.
bool is_in_mesh_order(const Layout& layout) {
  for (const std::vector<Cut>& list : layout.cuts()) {
    for (size_t i = 1; i < list.size(); ++i) {
      if (list[i - 1].mesh_dim > list[i].mesh_dim) return false;
    }
  }
  return true;
}

struct Count {
  int64_t pairs = 0;
  int64_t free = 0;
};

// Compares with all layouts of the other shape, on this mesh and on meshes in which a mesh dim of 4 is 2 x 2.
class Exhaustive {
 public:
  explicit Exhaustive(const std::vector<int64_t>& sizes) : mesh_(mesh_of(sizes)) {}

  void check(const Layout& src, const Shape& dst, Count& count) {
    const auto found = view_of(src, dst);
    const std::vector<int64_t> held = holdings(src);
    ++count.pairs;
    if (const auto* view = std::get_if<Layout>(&found)) {
      ++count.free;
      ASSERT_EQ(view->tensor_shape(), dst);
      ASSERT_EQ(holdings(*view), held) << src.to_string() << " is not " << view->to_string();
    } else {
      ASSERT_EQ(known(dst).count(held), 0u)
          << src.to_string() << " could be (" << join(dst) << "), and was refused: " << std::get<NoView>(found).reason;
    }
  }

  const MeshPtr& mesh() const { return mesh_; }

 private:
  const std::set<std::vector<int64_t>>& known(const Shape& shape) {
    auto [at, is_new] = known_.try_emplace(shape);
    if (is_new) {
      const auto add = [&](const Layout& layout) { at->second.insert(holdings(layout)); };
      for_each_layout(mesh_, shape, true, add);
      if (mesh_->dim_sizes() == Shape{4}) for_each_layout(mesh_of({2, 2}), shape, false, add);
    }
    return at->second;
  }

  MeshPtr mesh_;
  std::map<Shape, std::set<std::vector<int64_t>>> known_;
};

const std::vector<std::vector<int64_t>> kMeshes{{2}, {4}, {2, 2}, {2, 3}};

TEST(View, IsFoundWhereverOneExistsFromChunks) {
  Count even, uneven;
  for (const auto& sizes : kMeshes) {
    for (const int64_t n : {12, 15, 16, 24}) {
      Exhaustive exhaustive(sizes);
      for (const Shape& src_shape : shapes_of(n)) {
        for (const Layout& src : test::all_layouts(exhaustive.mesh(), src_shape, {})) {
          for (const Shape& dst : shapes_of(n)) {
            if (dst == src_shape || src.cut_dims().empty()) continue;
            exhaustive.check(src, dst, src.has_equal_parts() ? even : uneven);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
  std::cout << even.free << " of " << even.pairs << " even pairs and " << uneven.free << " of " << uneven.pairs
            << " uneven ones need no move\n";
  EXPECT_GT(even.free, 1000);
  EXPECT_GT(uneven.free, 1000);
}

// Returns true if the elements of each rank, read in this shape, are a product of one set of indices per dim.
bool are_products(const Layout& layout, const Shape& shape) {
  for (int64_t position = 0; position < layout.mesh().size(); ++position) {
    const std::vector<int64_t> elements = elements_at(layout, position);
    std::vector<std::set<int64_t>> indices(shape.size());
    for (int64_t element : elements) {
      for (size_t d = shape.size(); d-- > 0; element /= shape[d]) indices[d].insert(element % shape[d]);
    }
    size_t product = 1;
    for (const std::set<int64_t>& one : indices) product *= one.size();
    if (product != elements.size()) return false;
  }
  return true;
}

std::map<Rank, std::vector<int64_t>> elements_by_rank(const Layout& layout) {
  std::map<Rank, std::vector<int64_t>> all;
  for (int64_t p = 0; p < layout.mesh().size(); ++p) all[layout.mesh().rank_at(Position{p})] = elements_at(layout, p);
  return all;
}

// Returns true if some layout on a mesh of the same six ranks, of other sizes or in another order, has the same parts.
bool is_on_another_mesh(const Layout& layout, const Shape& shape) {
  const auto held = elements_by_rank(layout);
  bool is_found = false;
  for (const MeshPtr& mesh : {mesh_of({3, 2}), mesh_of({3, 2}, {0, 3, 1, 4, 2, 5}), mesh_of({2, 3}, {0, 2, 4, 1, 3, 5}),
                              mesh_of({2, 3}, {0, 3, 1, 4, 2, 5})}) {
    for_each_layout(mesh, shape, false,
                    [&](const Layout& other) { is_found = is_found || elements_by_rank(other) == held; });
  }
  return is_found;
}

// All even chunks of all tensors of 12 to 24 elements. Any layout requires that each rank's elements are a product. If
// they are and there is no view, another mesh is needed.
TEST(View, MovesNothingOfSmallTensorsWhereRanksHoldProducts) {
  int64_t pairs = 0, free = 0, of_another_mesh = 0;
  const auto check = [&](const Layout& src, const Shape& dst) {
    ++pairs;
    const auto found = view_of(src, dst);
    if (const auto* view = std::get_if<Layout>(&found)) {
      ++free;
      ASSERT_EQ(holdings(*view), holdings(src)) << src.to_string() << " is not " << view->to_string();
    } else if (are_products(src, dst)) {
      ++of_another_mesh;
      ASSERT_TRUE(is_on_another_mesh(src, dst)) << src.to_string() << " as (" << join(dst) << ")";
    }
  };
  for (const auto& sizes : kMeshes) {
    for (int64_t n = 12; n <= 24; ++n) {
      for (const Shape& src_shape : shapes_of(n)) {
        for (const Layout& src : test::all_layouts(mesh_of(sizes), src_shape, {})) {
          if (src.cut_dims().empty() || !src.has_equal_parts() || !is_in_mesh_order(src)) continue;
          for (const Shape& dst : shapes_of(n)) {
            if (dst != src_shape) check(src, dst);
            if (HasFatalFailure()) return;
          }
        }
      }
    }
  }
  EXPECT_EQ(pairs, 5789);
  EXPECT_EQ(free, 3537);
  EXPECT_EQ(of_another_mesh, 90);
}

TEST(View, IsFoundWhereverOneExistsFromAllRules) {
  Count count;
  for (const auto& [sizes, n] : std::vector<std::pair<std::vector<int64_t>, int64_t>>{
           {{2}, 12}, {{2}, 15}, {{4}, 12}, {{4}, 16}, {{2, 2}, 12}}) {
    Exhaustive exhaustive(sizes);
    for (const Shape& src_shape : shapes_of(n)) {
      for_each_layout(exhaustive.mesh(), src_shape, true, [&](const Layout& src) {
        for (const Shape& dst : shapes_of(n)) {
          if (dst == src_shape || HasFatalFailure()) continue;
          exhaustive.check(src, dst, count);
        }
      });
    }
  }
  std::cout << count.free << " of " << count.pairs << " pairs need no move\n";
  EXPECT_GT(count.free, 1000);
}

std::string seen_as(const Layout& layout, const Shape& shape, int flattened = 1) {
  const auto found = view_of(layout, shape, flattened);
  if (const auto* none = std::get_if<NoView>(&found)) return none->reason;
  const auto& view = std::get<Layout>(found);
  EXPECT_EQ(holdings(view), holdings(layout));
  return concat(view.placements_string(), " on ", view.mesh().to_string());
}

TEST(View, ReportsTheLayoutOfTheResult) {
  const MeshPtr two = mesh_of({2}), both = mesh_of({2, 3}), eight = mesh_of({8});
  EXPECT_EQ(seen_as(layout_of(both, {4, 6}, "S(0),S(1)"), {24}), "[S(0), SS(0,2)] on a=2,b=3");
  EXPECT_EQ(seen_as(layout_of(two, {4, 4}, "S(1)"), {2, 8}), "[SS(1,2)] on a=2");
  EXPECT_EQ(seen_as(layout_of(eight, {64}, "S(0)"), {4, 16}), "[S(0), S(1)] on a.0=4,a.1=2");
  EXPECT_EQ(seen_as(layout_of(two, {5, 4}, "S(0)"), {20}), "[Blocks(0,4)] on a=2");
  EXPECT_EQ(seen_as(layout_of(two, {20}, "Blocks(0,4)"), {5, 4}), "[S(0)] on a=2");
  EXPECT_EQ(seen_as(layout_of(two, {4, 5}, "S(1)"), {20}), "[SS(0,4)] on a=2");
  EXPECT_EQ(seen_as(layout_of(two, {20}, "Ragged(0,15:5)"), {4, 5}), "[Ragged(0,3:1)] on a=2");
  EXPECT_EQ(seen_as(layout_of(two, {12, 8}, "Packed(0,8:4)"), {12, 2, 4}), "[Packed(0,8:4)] on a=2");
  EXPECT_EQ(seen_as(layout_of(two, {12}, "Packed(0,8:4)"), {6, 2}), "[Pieces(0,0-2+4-5:2-4+5-6)] on a=2");
  EXPECT_EQ(seen_as(layout_of(both, {16, 32, 9}, "P(sum),S(2)"), {1, 512, 9}), "[P(sum), S(2)] on a=2,b=3");
  EXPECT_EQ(seen_as(layout_of(mesh_of({2, 4}), {1, 16, 32, 8}, "S(1),S(2)"), {512, 8}), "[S(0), SS(0,8)] on a=2,b=4");
  EXPECT_EQ(seen_as(layout_of(two, {8}, "Pieces(0,4-8:0-4)"), {2, 4}), "[Pieces(0,1-2:0-1)] on a=2");
}

// Includes mesh dims of size 1, and mesh dims whose coordinates all hold the same.
TEST(View, KeepsTheOrderOfPieces) {
  const MeshPtr four = mesh_of({4});
  EXPECT_EQ(seen_as(layout_of(mesh_of({1}), {4, 6}, "Pieces(0,3-4+0-1+2-3+1-2)"), {24}),
            "[Pieces(0,18-24+0-6+12-18+6-12)] on a=1");
  const std::string reversed = "3-4+2-3+1-2+0-1";
  EXPECT_EQ(seen_as(layout_of(four, {4, 6}, concat("Pieces(0,", join(std::vector(4, reversed), ":"), ")")), {24}),
            concat("[Pieces(0,", join(std::vector<std::string>(4, "18-24+12-18+6-12+0-6"), ":"), ")] on a=4"));
  test::RandomPieces random(23, 3);
  int64_t found = 0;
  for (int i = 0; i < 300; ++i) {
    const int64_t rows = random.pick(1, 8);
    const std::vector<std::string> others{"R", "S(0)", "S(1)", "Cyclic(0,2)", "Owned(1,0)"};
    const MeshPtr mesh = mesh_of({random.pick(1, 3), random.pick(1, 2)});
    const std::string placements = concat(random.pieces(rows, mesh->dim_size(0)), ",", others[random.pick(0, 4)]);
    const Layout layout = layout_of(mesh, {rows, 6}, placements);
    std::vector<Shape> shapes = shapes_of(rows * 6);
    shapes.insert(shapes.end(), {{rows, 6, 1}, {1, rows, 6}, {rows, 1, 6}});
    for (const Shape& shape : shapes) {
      const auto view = view_of(layout, shape);
      if (!std::holds_alternative<Layout>(view)) continue;
      ++found;
      ASSERT_EQ(holdings(std::get<Layout>(view)), holdings(layout)) << layout.to_string() << " as " << join(shape);
    }
  }
  EXPECT_GT(found, 1000);
}

TEST(View, ReportsWhyThereIsNoView) {
  EXPECT_EQ(seen_as(layout_of(mesh_of({10}), {20}, "S(0)"), {4, 5}),
            "rank 2 holds the elements 4-6 of the 20 that become (4, 5), which are not a product of parts of these "
            "dims");
  EXPECT_EQ(seen_as(layout_of(mesh_of({10}), {20}, "S(0)"), {4, 5}, 2), "[S(0)] on a=10");  // both dims as one
}

TEST(View, KeepsTensorsWithoutElementsOrDims) {
  const MeshPtr mesh = mesh_of({2});
  EXPECT_EQ(seen_as(layout_of(mesh, {0, 4}, "S(1)"), {2, 0}), "[R] on a=2");
  EXPECT_EQ(seen_as(layout_of(mesh, {}, "P(sum)"), {1, 1}), "[P(sum)] on a=2");
  EXPECT_EQ(seen_as(layout_of(mesh, {1, 3}, "S(0)"), {3}), "[Owned(0,0)] on a=2");
  EXPECT_EQ(seen_as(layout_of(mesh, {1, 3}, "S(0)"), {3, 1}), "[S(1)] on a=2");
}

TEST(View, RejectsOtherSizes) {
  const Layout layout = layout_of(mesh_of({2}), {4, 6}, "S(0)");
  EXPECT_THROW(view_of(layout, {5, 5}), UserError);
  EXPECT_THROW(view_of(layout, {-4, -6}), UserError);
  EXPECT_THROW(view_of(layout, {24}, 2), UserError);
  EXPECT_EQ(inferred_shape(layout, {2, -1, 3}), (Shape{2, 4, 3}));
  EXPECT_THROW(inferred_shape(layout, {-1, -1}), UserError);
  EXPECT_THROW(inferred_shape(layout, {-1, 5}), UserError);
}

TEST(View, PermutesDims) {
  const Layout layout = layout_of(mesh_of({2, 2}), {4, 6, 8}, "S(2),S(2)", {{2, {1, 0}}});
  const Layout turned = permuted(layout, {-1, 0, 1});
  EXPECT_EQ(turned.to_string(), "float32[8, 4, 6] on a=2,b=2 as [S(0)#1, S(0)#0]");
  const Layout flat(mesh_of({2}), {2, 3, 4, 5}, DType::parse("float32"), {Placement::shard(1)}, {},
                    StridedMeaning::kAuto, 2);
  EXPECT_EQ(permuted(flat, {0, 1, 3, 2}).placements_string(), "[S(2)]");
  EXPECT_EQ(permuted(flat, {0, 1, 3, 2}).shape(), (Shape{6, 5, 4}));
  EXPECT_THROW(permuted(flat, {1, 0, 2, 3}), UserError);
  EXPECT_THROW(permuted(layout, {0, 0, 1}), UserError);
}

// The cheapest redistribute among all that keep other tensor dims, found by planning each.
TEST(View, NamesTheCheapestMove) {
  const PlanOptions options;
  for (const auto& [src, dst] :
       std::vector<std::pair<Layout, Shape>>{{layout_of(mesh_of({10}), {20, 30}, "S(0)"), {4, 5, 30}},
                                             {layout_of(mesh_of({2, 2}), {5, 10}, "S(0),S(0)"), {2, 25}},
                                             {layout_of(mesh_of({4, 2}), {6, 8, 5}, "S(0),S(2)"), {4, 12, 5}}}) {
    const auto found = view_of(src, dst);
    ASSERT_TRUE(std::holds_alternative<NoView>(found));
    const NoView& none = std::get<NoView>(found);
    const MoveFirst first = cheapest_move(src, dst, 1, none, options);
    const Layout& to = first.plan->plan().dst;
    EXPECT_EQ(holdings(to), holdings(first.view));
    for (const Layout& other : test::all_layouts(src.mesh_ptr(), src.shape(), {})) {
      bool keeps_others = true;
      for (int d = 0; d < src.mesh().ndim(); ++d) {
        keeps_others = keeps_others && (none.mesh_dims.contains(d) || other.placements()[d] == src.placements()[d]);
      }
      if (!keeps_others || !std::holds_alternative<Layout>(view_of(other, dst))) continue;
      const int64_t time =
          predicted_picoseconds(plan_cache().get({src, other, PlanningContext::make(options)})->plan());
      EXPECT_GE(time, predicted_picoseconds(first.plan->plan())) << other.to_string();
    }
    EXPECT_NE(move_first_text(src, dst, none, first).find("; redistribute to ["), std::string::npos);
  }
}

TEST(View, CheapestMoveMayChangeSeveralDims) {
  const MeshPtr mesh = mesh_of({2, 2});
  const struct {
    Shape src, dst;
    ViewsFor views_for;
  } cases[] = {
      {{6, 6}, {3, 2, 3, 2}, ViewsFor::kAnyone},
      {{6, 5, 4}, {3, 2, 20}, ViewsFor::kDTensor},  // the second mesh dim leaves blocks of 4, which DTensor lacks
  };
  for (const auto& one : cases) {
    const Layout src = layout_of(mesh, one.src, "S(0),S(1)");
    const auto found = view_of(src, one.dst);
    ASSERT_TRUE(std::holds_alternative<NoView>(found));
    const MoveFirst first = cheapest_move(src, one.dst, 1, std::get<NoView>(found), PlanOptions{}, one.views_for);
    EXPECT_EQ(holdings(first.plan->plan().dst), holdings(first.view));
  }
}

// There are up to 625 destinations.
TEST(View, FindsTheCheapestMoveAmongManyWithFewPlans) {
  const struct {
    Shape mesh, src, dst;
    const char* placements;
    ViewsFor views_for;
  } cases[] = {
      {{2, 2, 2}, {5, 6, 7, 3}, {630}, "S(0),S(1),S(2)", ViewsFor::kDTensor},
      {{4, 4, 4}, {6, 10, 14}, {840}, "S(0),S(1),S(2)", ViewsFor::kAnyone},
      {{2, 2, 2, 2}, {5, 5, 7, 9}, {1575}, "S(0),S(1),S(2),S(3)", ViewsFor::kAnyone},
      {{2, 2, 2, 2}, {5, 5, 7, 9}, {1575}, "S(0),S(1),S(2),S(3)", ViewsFor::kDTensor},
  };
  for (const auto& one : cases) {
    const Layout src = layout_of(mesh_of(one.mesh), one.src, one.placements);
    const auto found = one.views_for == ViewsFor::kDTensor ? dtensor_view_of(src, one.dst) : view_of(src, one.dst);
    ASSERT_TRUE(std::holds_alternative<NoView>(found));
    const MoveFirst first = cheapest_move(src, one.dst, 1, std::get<NoView>(found), PlanOptions{}, one.views_for);
    EXPECT_EQ(holdings(first.plan->plan().dst), holdings(first.view));
    std::cout << first.views << " views and " << first.plans << " plans to " << first.plan->plan().dst.to_string()
              << '\n';
    EXPECT_LE(first.views, kMaxViewsBeforeMove);
    EXPECT_LE(first.plans, 16);
  }
}

TEST(View, NamesTheViewThatDTensorCannotExpress) {
  const Layout src = layout_of(mesh_of({8}), {64}, "S(0)");
  const auto found = dtensor_view_of(src, {4, 16});
  ASSERT_TRUE(std::holds_alternative<NoView>(found));
  const NoView& none = std::get<NoView>(found);
  ASSERT_TRUE(none.on_parts.has_value());
  EXPECT_EQ(none.on_parts->to_string(), "float32[4, 16] on a.0=4,a.1=2 as [S(0), S(1)]");
  const MoveFirst first = cheapest_move(src, {4, 16}, 1, none, PlanOptions{}, ViewsFor::kDTensor);
  EXPECT_NE(move_first_text(src, {4, 16}, none, first).find("shardwright.views.view(x.to_local(), [4, 16], layout)"),
            std::string::npos);
}

TEST(View, SizesMayOverflowTheirProduct) {
  const Layout empty = layout_of(mesh_of({2}), {0, 4}, "S(0)");
  const int64_t large = int64_t{1} << 32;
  EXPECT_EQ(inferred_shape(empty, {large, large, -1}), (Shape{large, large, 0}));
  EXPECT_THROW(inferred_shape(layout_of(mesh_of({2}), {6}, "S(0)"), {large, large, -1}), UserError);
}

}  // namespace
}  // namespace shardwright
