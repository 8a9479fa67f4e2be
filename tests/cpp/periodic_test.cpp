// Layouts of very many repeating intervals. The sizes of plans, certificates and programs must not grow with their
// number.
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <variant>
#include <vector>

#include "exchange/indexed_exchange.h"
#include "layouts.h"
#include "moves/describe.h"
#include "moves/traffic.h"
#include "naive.h"
#include "planning/certificate.h"
#include "planning/memory_limit.h"
#include "program/program.h"
#include "search/make_plan.h"
#include "simulate/simulate.h"
#include "support/error.h"

namespace shardwright {
namespace {

using test::layout_of;
using test::mesh_of;

struct Case {
  std::vector<int64_t> src_mesh;
  const char* src;
  std::vector<int64_t> dst_mesh;
  const char* dst;
  int64_t first;  // first rank of the destination; 0 with equal sizes means the same mesh
};

const std::vector<Case> kCases{
    {{8}, "Cyclic(0,1)", {8}, "S(0)", 0},
    {{8}, "Cyclic(0,1)", {8}, "Cyclic(0,2)", 0},
    {{4, 2}, "Cyclic(0,1),S(0)", {4, 2}, "S(0),Cyclic(0,3)", 0},
    {{8}, "SS(0,100000)", {8}, "S(0)", 0},
    {{8}, "Cyclic(0,1)", {8}, "Cyclic(0,1)", 8},
    {{8}, "Cyclic(0,1)", {6}, "Cyclic(0,2)", 8},
    {{8}, "Cyclic(0,1)", {6}, "S(0)", 8},
    {{8}, "Cyclic(0,1)", {6}, "R", 8},
    {{8}, "Cyclic(0,1)", {6}, "Cyclic(0,2)", 4},
    {{8}, "SS(0,100000)", {6}, "Cyclic(0,2)", 8},
    {{4, 2}, "Cyclic(0,1),Cyclic(0,1)", {4, 2}, "Cyclic(0,2),S(0)", 8},
};

std::vector<int64_t> ranks_from(int64_t first, int64_t count) {
  std::vector<int64_t> ranks = naive::iota(count);
  for (int64_t& rank : ranks) rank += first;
  return ranks;
}

Plan plan_of(const Case& one, int64_t n) {
  int64_t ranks = 1;
  for (const int64_t size : one.dst_mesh) ranks *= size;
  return make_plan(layout_of(mesh_of(one.src_mesh), {n, 4}, one.src),
                   layout_of(mesh_of(one.dst_mesh, ranks_from(one.first, ranks)), {n, 4}, one.dst));
}

size_t boxes_of(const Plan& plan) {
  size_t boxes = 0;
  for (const Rank rank : ranks_of(plan)) {
    for (const Instruction& one : compile(plan, rank).instructions) {
      if (const auto* copy = std::get_if<Copy>(&one.operation)) boxes += copy->boxes.size();
    }
  }
  return boxes;
}

// Programs for a million rows have about as many boxes as those for a few thousand, which MovesEveryElement simulates.
TEST(Periodic, ProgramsDoNotGrowWithTheNumberOfIntervals) {
  for (const Case& one : kCases) {
    const Plan large = plan_of(one, 1'000'003);
    SCOPED_TRACE(to_string(large));
    EXPECT_LE(boxes_of(large), 4'000u);
  }
}

TEST(Periodic, MovesEveryElement) {
  for (const Case& one : kCases) {
    for (const int64_t n : {997, 4'003}) {
      const Plan plan = plan_of(one, n);
      SCOPED_TRACE(to_string(plan));
      simulate(plan);
    }
  }
}

// The certificate's received bytes equal the rows that a rank lacks, found by a walk over rows.
TEST(Periodic, CertificatesCountEveryRow) {
  constexpr int64_t n = 300'007;
  const std::vector<int64_t> rows = naive::iota(n);
  const Plan plan = plan_of({{8}, "Cyclic(0,1)", {6}, "Cyclic(0,2)", 4}, n);
  for (int64_t c = 0; c < 6; ++c) {
    const std::vector<int64_t> needed = naive::cyclic(rows, 2, 6, c);
    int64_t lacking = 0;
    for (const int64_t row : needed) lacking += c + 4 < 8 && row % 8 == c + 4 ? 0 : 1;
    EXPECT_EQ(traffic_at(plan, Rank{c + 4}).received_bytes, lacking * 16) << "rank " << c + 4;
  }
}

// The limit is generous, because machines are busy and builds may have sanitizers. With lists of all intervals, four
// million rows take more than ten times as long.
TEST(Periodic, PlansOfMillionsOfRowsAreQuick) {
  for (const Case& one : kCases) {
    const auto begin = std::chrono::steady_clock::now();
    const Plan plan = plan_of(one, 4'000'003);
    const Certificate certificate = certify(plan, max_peak_bytes(plan));
    EXPECT_GT(certificate.predicted_ps, 0);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10)) << to_string(plan);
  }
}

// Moves of rows of four elements between two layouts, one of which flattens them.
struct Rearranged {
  std::vector<int64_t> src_mesh;
  const char* src;
  int src_flattened;
  std::vector<int64_t> dst_mesh;
  const char* dst;
  int dst_flattened;
  int64_t first;
};

const std::vector<Rearranged> kRearranged{
    {{8}, "Cyclic(0,3)", 2, {4, 2}, "S(0),S(1)", 1, 0},
    {{8}, "S(1)", 1, {8}, "Cyclic(0,6)", 2, 0},
    {{8}, "S(0)", 2, {8}, "S(1)", 1, 0},
    {{4, 2}, "Cyclic(0,2),S(1)", 1, {8}, "S(0)", 2, 0},
    {{4, 2}, "Cyclic(0,2),S(1)", 1, {6}, "Cyclic(0,5)", 2, 8},
    {{8}, "Cyclic(0,3)", 2, {3, 2}, "Cyclic(0,1),R", 1, 4},
};

Plan plan_of(const Rearranged& one, int64_t n) {
  const auto layout = [&](const std::vector<int64_t>& mesh, const char* placements, int flattened, int64_t first) {
    int64_t ranks = 1;
    for (const int64_t size : mesh) ranks *= size;
    return Layout(mesh_of(mesh, ranks_from(first, ranks)), {n, 4}, DType::kFloat32, parse_placements(placements), {},
                  StridedMeaning::kAuto, flattened);
  };
  return make_plan(layout(one.src_mesh, one.src, one.src_flattened, 0),
                   layout(one.dst_mesh, one.dst, one.dst_flattened, one.first));
}

// The first ranks hold all rows in another order, and the others every third row: a list that does not ascend next to
// lists that repeat.
Plan plan_from_pieces(int64_t n) {
  const std::string both = concat("Pieces(0,", n / 2, "-", n, "+0-", n / 2, ":0-", n, ")");
  return make_plan(layout_of(mesh_of({2, 3}), {n, 4}, both + ",Cyclic(0,1)"),
                   layout_of(mesh_of({5}, ranks_from(3, 5)), {n, 4}, "Cyclic(0,2)"));
}

TEST(Periodic, RearrangementsMoveEveryElement) {
  for (const Rearranged& one : kRearranged) {
    for (const int64_t n : {1, 7, 997, 4'003}) {
      const Plan plan = plan_of(one, n);
      SCOPED_TRACE(to_string(plan));
      simulate(plan);
    }
  }
  for (const int64_t n : {12, 997}) simulate(plan_from_pieces(n));
}

TEST(Periodic, RearrangementsDoNotGrowWithTheNumberOfIntervals) {
  for (const Rearranged& one : kRearranged) {
    const auto begin = std::chrono::steady_clock::now();
    const Plan large = plan_of(one, 1'000'003);
    SCOPED_TRACE(to_string(large));
    ASSERT_EQ(large.steps.front().op, StepOp::kRearrange);
    EXPECT_LE(boxes_of(large), 4'000u);
    EXPECT_GT(certify(large, max_peak_bytes(large)).predicted_ps, 0);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  }
}

// All senders of a row serve an equal share, although each receiver needs one row of each repetition.
TEST(Periodic, RearrangementsBalanceSendersOfRepeatingRows) {
  constexpr int64_t n = 1'000'003;
  for (const auto& [holders, receivers] : std::vector<std::pair<int64_t, int64_t>>{{2, 3}, {8, 9}}) {
    std::string pieces = concat("0-", n);
    for (int64_t i = 1; i < holders; ++i) pieces += concat(":0-", n);
    const Layout from = layout_of(mesh_of({holders}), {n, 4}, concat("Pieces(0,", pieces, ")"));
    const Layout to = layout_of(mesh_of({receivers}, ranks_from(holders, receivers)), {n, 4}, "Cyclic(0,1)");
    const IndexedExchange moved(from, to, ReplicaPolicy::kEvenBytes);
    int64_t sent = 0;
    for (int64_t rank = 0; rank < holders; ++rank) {
      sent += moved.traffic(Rank{rank}).sent_bytes;
      EXPECT_LE(moved.traffic(Rank{rank}).sent_bytes, (n / holders + 100) * 16) << "rank " << rank;
    }
    EXPECT_EQ(sent, n * 16);
  }
}

// Neither case can be computed in samples: source and destination of the first have no short common period, and the
// parts of the second are not ascending.
TEST(Periodic, RearrangementsOfTooManyRunsAreRejectedAtOnce) {
  constexpr int64_t n = 64'000'000;
  const auto layout = [&](const std::string& placements, int flattened) {
    return Layout(mesh_of({8}), {n, 8}, DType::kBFloat16, parse_placements(placements), {}, StridedMeaning::kAuto,
                  flattened);
  };
  const Layout columns = layout("S(1)", 1);
  const int64_t half = n * 4;
  const std::string no_order = concat("Pieces(0,", half, "-", 2 * half, "+0-", half, ":0-0:0-0:0-0:0-0:0-0:0-0:0-0)");
  for (const auto& [placements, reason] : std::vector<std::pair<std::string, std::string>>{
           {"Cyclic(0,8000009)", "source and destination repeat early"}, {no_order, "in ascending order"}}) {
    SCOPED_TRACE(placements);
    const auto begin = std::chrono::steady_clock::now();
    try {
      make_plan(columns, layout(placements, 2));
      ADD_FAILURE() << "no error";
    } catch (const UserError& error) {
      EXPECT_NE(std::string(error.what()).find(reason), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("must have at most 2^24"), std::string::npos) << error.what();
    }
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  }
}

// Received bytes equal the elements that a rank lacks, found by a walk over elements.
TEST(Periodic, RearrangementsCountEveryElement) {
  constexpr int64_t n = 300'007;
  const Plan plan = plan_of(kRearranged[0], n);
  for (int64_t rank = 0; rank < 8; ++rank) {
    const int64_t rows = rank / 2 < 3 ? (n + 3) / 4 : n - 3 * ((n + 3) / 4);
    const int64_t first = rank / 2 * ((n + 3) / 4);
    int64_t lacking = 0;
    for (int64_t row = first; row < first + rows; ++row) {
      for (int64_t column = rank % 2 * 2; column < rank % 2 * 2 + 2; ++column) {
        lacking += (row * 4 + column) / 3 % 8 == rank ? 0 : 1;
      }
    }
    EXPECT_EQ(traffic_at(plan, Rank{rank}).received_bytes, lacking * 4) << "rank " << rank;
  }
}

}  // namespace
}  // namespace shardwright
