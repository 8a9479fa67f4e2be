// Products that wait for flags: programs on simulated ranks against sums over global indices, unsupported products, and
// predicted times.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "planning/context.h"
#include "products.h"
#include "products/compile.h"
#include "products/timeline.h"
#include "search/make_plan.h"
#include "simulate/machine.h"

namespace shardwright {
namespace {

using Values = Machine::Payload;

double x_at(int64_t i, int64_t k) { return static_cast<double>((i * 7 + k * 3) % 9 - 4); }
double w_at(int64_t k, int64_t j) { return static_cast<double>((k * 5 + j * 11) % 7 - 3); }

// x is `rows` x `summed`, cut into equal parts by rows. Every rank has columns [rank * columns, ...) of the weight.
struct Problem {
  int64_t ranks = 2;
  int64_t rows = 1024;
  int64_t summed = 8;
  int64_t columns = 8;
  bool is_weight_row_major = false;
  bool keeps_gathered = false;

  Matmul matmul() const {
    const MeshPtr mesh = mesh_of({ranks});
    const auto x = [&](const char* placement) { return layout_on(mesh, {rows, summed}, {placement}, "bfloat16"); };
    const Layout weight = is_weight_row_major ? layout_on(mesh, {summed, ranks * columns}, {"S(1)"}, "bfloat16")
                                              : layout_on(mesh, {ranks * columns, summed}, {"S(0)"}, "bfloat16");
    const char* axes = is_weight_row_major ? "mk,kn->mn" : "mk,nk->mn";
    return GatherMatmul{make_plan(x("S(0)"), x("R"), {}), {{Contraction::parse(axes), weight, false}}, keeps_gathered};
  }

  Values x_rows(int64_t begin, int64_t end) const {
    Values values;
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t k = 0; k < summed; ++k) values.push_back(x_at(i, k));
    }
    return values;
  }

  Values weight_of(int64_t rank) const {
    Values values;
    for (int64_t i = 0; i < summed * columns; ++i) {
      const int64_t k = is_weight_row_major ? i / columns : i % summed;
      const int64_t j = is_weight_row_major ? i % columns : i / summed;
      values.push_back(w_at(k, rank * columns + j));
    }
    return values;
  }

  Values result_of(int64_t rank) const {
    Values values;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < summed; ++k) sum += x_at(i, k) * w_at(k, rank * columns + j);
        values.push_back(sum);
      }
    }
    return values;
  }
};

void check_results(const Problem& problem, int64_t shares) {
  const Matmul matmul = problem.matmul();
  Machine machine;
  const int64_t part = problem.rows / problem.ranks;
  for (int64_t r = 0; r < problem.ranks; ++r) {
    machine.add(Rank{r}, compile(matmul, {Method::kFlags, shares}, Rank{r}),
                {problem.x_rows(r * part, (r + 1) * part), problem.weight_of(r)});
  }
  machine.run();
  for (int64_t r = 0; r < problem.ranks; ++r) {
    EXPECT_EQ(machine.output(Rank{r}), problem.result_of(r)) << "rank " << r;
    if (problem.keeps_gathered) {
      EXPECT_EQ(machine.output(Rank{r}, 1), problem.x_rows(0, problem.rows));
    }
    EXPECT_EQ(machine.received_bytes(Rank{r}), (problem.ranks - 1) * part * problem.summed * 2);
  }
}

TEST(Flagged, MultipliesThePartsOfOtherRanks) {
  check_results({}, 1);
  check_results({}, 2);
  check_results({.is_weight_row_major = true, .keeps_gathered = true}, 2);
  check_results({.ranks = 4, .rows = 1024, .summed = 16}, 1);
  check_results({.ranks = 3, .rows = 1536, .columns = 16, .is_weight_row_major = true}, 2);
}

TEST(Flagged, StartsNothingBetweenFetchAndProduct) {
  const Program program = compile(Problem{}.matmul(), {Method::kFlags, 2}, Rank{1});
  std::vector<std::string> kinds;
  for (const Instruction& instruction : program.instructions) {
    const std::string text = to_string(instruction.operation);
    kinds.push_back(text.substr(0, text.find(' ')));
  }
  EXPECT_EQ(kinds, (std::vector<std::string>{"offer", "copy", "fill", "wait", "fetch", "gemm", "wait"}));
  const auto& gemm = std::get<Gemm>(program.instructions[5].operation);
  EXPECT_EQ(gemm.flags->first, 2);  // of four; the rank's own flag is the first
  EXPECT_NE(program.to_string().find("as flags b3[0:4] are set, from 2"), std::string::npos) << program.to_string();
}

std::string why_not(const Matmul& matmul, const Schedule& schedule = {Method::kFlags, 1}) {
  try {
    check(matmul, schedule);
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

TEST(Flagged, ReportsWhyAProductIsUnsupported) {
  EXPECT_EQ(why_not(Problem{}.matmul()), "");
  EXPECT_NE(why_not(Problem{.rows = 1020}.matmul()).find("multiple of 1 x 256 rows, got 510"), std::string::npos);
  EXPECT_NE(why_not(Problem{.rows = 1023}.matmul()).find("uneven"), std::string::npos);
  EXPECT_NE(why_not(Problem{}.matmul(), {Method::kFlags, 4}).find("multiple of 4 x 256 rows, got"), std::string::npos);
  EXPECT_NE(why_not(Problem{.summed = 12}.matmul())
                .find("the length of the summed axis must be a positive multiple of 8, got 12"),
            std::string::npos);
  EXPECT_NE(
      why_not(Problem{.columns = 4}.matmul()).find("the number of columns must be a positive multiple of 8, got 4"),
      std::string::npos);
  EXPECT_NE(why_not(Problem{}.matmul(), {Method::kFlags, 1, {}, 2}).find("depth must be 1 for method 'flags'"),
            std::string::npos);

  const MeshPtr mesh = mesh_of({2});
  const auto gather = [&](const std::vector<int64_t>& shape, const char* placement, const char* axes,
                          const Layout& weight, PlanOptions options = {}) {
    const auto x = [&](const char* p) { return layout_on(mesh, shape, {p}, weight.dtype().name().c_str()); };
    return GatherMatmul{make_plan(x(placement), x("R"), options), {{Contraction::parse(axes), weight, false}}, false};
  };
  const Layout weight = layout_on(mesh, {8, 16}, {"R"}, "bfloat16");
  EXPECT_NE(why_not(gather({512, 16}, "S(1)", "mk,nk->mn", weight)).find("not consecutive"), std::string::npos);
  EXPECT_NE(why_not(gather({512, 16}, "S(0)", "mk,nk->nm", weight)).find("do not form row-major matrices"),
            std::string::npos);
  EXPECT_NE(why_not(gather({512, 16}, "S(0)", "mk,nk->mn", layout_on(mesh, {8, 16}, {"R"}))).find("float32"),
            std::string::npos);
  EXPECT_NE(why_not(gather({512, 16}, "S(0)", "mk,nk->mn", weight, {.lowering = Lowering::kGloo})).find("gloo"),
            std::string::npos);
  EXPECT_EQ(why_not(gather({1, 512, 16}, "S(1)", "bmk,nk->bmn", weight)), "");
  EXPECT_NE(why_not(gather({2, 512, 16}, "S(1)", "bmk,nk->bmn", weight)).find("not consecutive"), std::string::npos);
  GatherMatmul with_bias = gather({512, 16}, "S(0)", "mk,nk->mn", weight);
  with_bias.products[0].has_bias = true;
  EXPECT_NE(why_not(with_bias).find("a bias is added"), std::string::npos);
  GatherMatmul with_two = gather({512, 16}, "S(0)", "mk,nk->mn", weight);
  with_two.products.push_back(with_two.products[0]);
  EXPECT_NE(why_not(with_two).find("several products"), std::string::npos);
  EXPECT_NE(why_not(MatmulScatter{make_plan(layout_on(mesh, {512, 8}, {"P"}, "bfloat16"),
                                            layout_on(mesh, {512, 8}, {"S(0)"}, "bfloat16"), {}),
                                  {{Contraction::parse("mk,nk->mn"), layout_on(mesh, {512, 16}, {"S(1)"}, "bfloat16"),
                                    layout_on(mesh, {8, 16}, {"S(1)"}, "bfloat16")}}})
                .find("moves its result"),
            std::string::npos);
}

// A product takes 1 ps per flop and processor, a byte 1 ps, and a transfer 100 ps.
TEST(Flagged, PredictedTimeIsThatOfProductOrCopies) {
  const GemmModel model{"test", 10, 64, 64, 1'000'000, 0, 0, 50};
  const auto predicted = [&](int64_t ps_per_byte, int64_t shares) {
    const MeshPtr mesh = mesh_of({2});
    const auto x = [&](const char* placement) { return layout_on(mesh, {5120, 64}, {placement}, "bfloat16"); };
    PlanOptions options;
    options.topology = Topology{"test", 0, 100, 0, {0, 1024 * ps_per_byte}, {0, 1024 * ps_per_byte}, {}};
    const Matmul matmul =
        GatherMatmul{make_plan(x("S(0)"), x("R"), options),
                     {{Contraction::parse("mk,nk->mn"), layout_on(mesh, {64, 64}, {"R"}, "bfloat16"), false}},
                     false};
    return predict(matmul, {Method::kFlags, shares}, model);
  };
  const Timeline fast = predicted(1, 1);
  const int64_t part = 2560 * 64 * 2;
  EXPECT_EQ(fast.communication_ps, 100 + 100 + part);
  // The offer is followed by one product, which no copy slows down.
  ASSERT_GT(fast.gemm_ps / 2, part + 100);
  EXPECT_EQ(fast.total_ps, 100 + fast.gemm_ps);
  // If copies take longer, the last chunk is multiplied after the last copy.
  const Timeline slow = predicted(100, 1);
  EXPECT_EQ(slow.total_ps, 100 + 100 + 100 * part + slow.gemm_ps / 2);
  EXPECT_EQ(predicted(100, 2).total_ps, 100 + 100 + 100 * part + slow.gemm_ps / 4);
  EXPECT_EQ(predicted(100, 1).gemm_ps, fast.gemm_ps);
}

TEST(Flagged, IsNotChosenUnlessRequested) {
  const GemmModel model = GemmModel::named("h100");
  for (const Prediction& one : predictions(Problem{.rows = 65536, .summed = 4096, .columns = 4096}.matmul(), model)) {
    EXPECT_NE(one.schedule.method, Method::kFlags);
  }
  EXPECT_EQ(parse_method("flags"), Method::kFlags);
}

}  // namespace
}  // namespace shardwright
