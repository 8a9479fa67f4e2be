// Sets of transfers, lowered and run on simulated ranks.
#include "program/transfers.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "moves/describe.h"
#include "products.h"
#include "program/transfer_traffic.h"
#include "search/make_plan.h"
#include "simulate/machine.h"
#include "simulate/simulate.h"

namespace shardwright {
namespace {

using Side = Messages::Side;

// Returns a number for each element: its row-major index in the global tensor, plus `first`.
std::vector<double> numbers(const Layout& layout, int64_t position, double first) {
  std::vector<double> all;
  const Region region = layout.region(position);
  for (const Interval& rows : region[0]) {
    for (int64_t i = rows.begin; i < rows.end; ++i) {
      for (const Interval& columns : region[1]) {
        for (int64_t j = columns.begin; j < columns.end; ++j) {
          all.push_back(first + static_cast<double>(i * layout.shape()[1] + j));
        }
      }
    }
  }
  return all;
}

struct Move {
  Layout before;
  Layout after;
};

// Compiles all moves as one set, for the rank at a position; ranks equal positions.
Program program_of(const std::vector<Move>& moves, TransferMethod transfer_method, bool may_send_own,
                   int64_t position) {
  const MeshPtr mesh = moves[0].before.mesh_ptr();
  ProgramBuilder b(DType::kFloat32, Lowering::kGloo, false, Rank{position});
  std::vector<BufferId> from;
  std::vector<BufferId> to;
  for (const Move& move : moves) from.push_back(b.new_input(move.before.local_shape(position)));
  for (const Move& move : moves) {
    to.push_back(b.new_buffer(num_elements(move.after.region(position))));
    b.add_output(to.back(), move.after.local_shape(position));
  }
  b.begin_step("all moves");
  TransferSet set{b.group_of_ranks(MeshDimSet::single(0), mesh->ranks())};
  std::vector<OwnItem> own;
  for (int64_t peer = 0; peer < mesh->size(); ++peer) {
    std::vector<TransferItem> sent;
    std::vector<TransferItem> received;
    for (size_t t = 0; t < moves.size(); ++t) {
      const Selection out(moves[t].before.region(position), moves[t].after.region(peer));
      const Selection in(moves[t].before.region(peer), moves[t].after.region(position));
      if (peer == position) own.push_back({from[t], to[t], out.slice(0, out.count())});
      sent.push_back({from[t], out.slice(0, out.count())});
      received.push_back({to[t], in.slice(0, in.count())});
    }
    if (peer == position) continue;
    set.sends.add(peer, std::move(sent));
    set.receives.add(peer, std::move(received));
  }
  exchange(b, std::move(set), transfer_method, own, may_send_own);
  return b.program();
}

TEST(Transfers, OfSeveralTensorsShareMessages) {
  for (const int64_t ranks : {1, 2, 3, 4}) {
    const MeshPtr mesh = mesh_of({ranks});
    const std::vector<Move> moves{{layout_on(mesh, {7, 5}, {"S(0)"}), layout_on(mesh, {7, 5}, {"S(1)"})},
                                  {layout_on(mesh, {4, 6}, {"S(1)"}), layout_on(mesh, {4, 6}, {"R"})},
                                  {layout_on(mesh, {8, 3}, {"S(0)"}), layout_on(mesh, {8, 3}, {"S(0)"})}};
    for (const TransferMethod transfer_method : {TransferMethod::kAllToAll, TransferMethod::kMessages}) {
      for (const bool may_send_own : {false, true}) {
        std::vector<Program> programs;
        Machine machine;
        for (int64_t p = 0; p < ranks; ++p) {
          programs.push_back(program_of(moves, transfer_method, may_send_own, p));
          std::vector<Machine::Payload> inputs;
          for (size_t t = 0; t < moves.size(); ++t) inputs.push_back(numbers(moves[t].before, p, 1000.0 * t));
          machine.add(Rank{p}, programs.back(), inputs);
          const auto& all = programs.back().instructions;
          const auto transfers = std::count_if(all.begin(), all.end(), [](const Instruction& instruction) {
            return is_communication(instruction.operation);
          });
          EXPECT_EQ(transfers, ranks == 1 && transfer_method == TransferMethod::kMessages ? 0 : 1)
              << programs.back().to_string();
        }
        machine.run();
        for (int64_t p = 0; p < ranks; ++p) {
          for (size_t t = 0; t < moves.size(); ++t) {
            EXPECT_EQ(machine.output(Rank{p}, t), numbers(moves[t].after, p, 1000.0 * t)) << programs[p].to_string();
          }
          EXPECT_EQ(machine.peak_bytes(Rank{p}), programs[p].peak_bytes());
        }
      }
    }
  }
}

// The example of the header: rows [0, 2) and columns [1, 3) of a 4 x 6 tensor.
class Placed : public testing::Test {
 protected:
  Placed() {
    b_.begin_step("a step");
    tensor_ = b_.new_input({4, 6});
    const Region whole{{{0, 4}}, {{0, 6}}};
    const Selection rows(whole, {{{0, 2}}, {{0, 6}}});
    const Selection columns(whole, {{{0, 4}}, {{1, 3}}});
    sends_.add(0, {{tensor_, rows.slice(0, rows.count())}});
    sends_.add(1, {{tensor_, columns.slice(0, columns.count())}});
  }

  void expect_range(size_t message, int buffer, int64_t offset, int64_t count) const {
    const BufferRange& range = sends_.range(message);
    EXPECT_EQ(range.buffer, buffer);
    EXPECT_EQ(range.offset, offset);
    EXPECT_EQ(range.count, count);
  }

  size_t num_copies() const { return b_.program().instructions.size(); }

  ProgramBuilder b_{DType::kFloat32, Lowering::kNccl, false, Rank{2}};
  BufferId tensor_ = kMissingBuffer;
  Messages sends_{Side::kSent};
};

TEST_F(Placed, ContiguousPartsStayAndOthersArePacked) {
  EXPECT_EQ(sends_.staged_count({}), 8);
  sends_.choose_memory(b_, {});
  sends_.copy(b_);
  expect_range(0, 0, 0, 12);
  expect_range(1, 1, 0, 8);
  EXPECT_EQ(num_copies(), 1);
}

TEST_F(Placed, OneRunPacksAllPartsIfOneNeedsPacking) {
  sends_.choose_memory(b_, {.is_one_run = true});
  sends_.copy(b_);
  expect_range(0, 1, 0, 12);
  expect_range(1, 1, 12, 8);
  EXPECT_EQ(sends_.run().count, 20);
  EXPECT_EQ(num_copies(), 1);
}

TEST_F(Placed, EachPartHasItsOwnBuffer) {
  sends_.choose_memory(b_, {.memory = Staging::Memory::kApart, .may_stay = false});
  sends_.copy(b_);
  expect_range(0, 1, 0, 12);
  expect_range(1, 2, 0, 8);
  EXPECT_EQ(num_copies(), 2);
}

TEST_F(Placed, PartsAreAlignedInGivenMemory) {
  const Staging staging{.memory = Staging::Memory::kGiven, .may_stay = false, .alignment = 16};
  EXPECT_EQ(sends_.staged_count(staging), 32);
  Staging given = staging;
  given.given = {b_.new_buffer(100), 48, 32};
  sends_.choose_memory(b_, given);
  expect_range(0, 1, 48, 12);
  expect_range(1, 1, 64, 8);
}

// Compares the traffic that instructions report with the simulator's deliveries.
TEST(TransferTraffic, MatchesDeliveredBytes) {
  const MeshPtr mesh = mesh_of({2, 3});
  const std::vector<std::vector<std::string>> placements{{"S(0)", "S(1)"}, {"S(1)", "S(0)"}, {"R", "S(0)"},
                                                         {"S(0)", "S(0)"}, {"P", "P"},       {"P", "S(1)"}};
  for (const auto& src : placements) {
    for (const auto& dst : std::vector<std::vector<std::string>>{{"R", "R"}, {"S(1)", "R"}, {"S(0)", "S(0)"}}) {
      for (const Lowering lowering : {Lowering::kNccl, Lowering::kGloo}) {
        for (const int64_t rows : {12, 7}) {
          const Plan plan =
              make_plan(layout_on(mesh, {rows, 6}, src), layout_on(mesh, {rows, 6}, dst), {.lowering = lowering});
          const SimulationReport report = simulate(plan);
          for (int64_t p = 0; p < 6; ++p) {
            const Program program = compile(plan, Rank{p});
            int64_t received = 0;
            for (const Instruction& instruction : program.instructions) {
              received += traffic_of(program, instruction.operation).received_bytes;
            }
            EXPECT_EQ(received, report.received_bytes.at(Rank{p})) << to_string(plan) << "\n" << program.to_string();
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace shardwright
