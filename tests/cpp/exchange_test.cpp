// Compares the messages of a rank in an exchange with a walk over all pairs of its group.
#include "moves/step_exchange.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>

#include "exchange/axis_overlap.h"
#include "layouts.h"
#include "moves/move.h"
#include "pair_by_pair.h"

namespace shardwright {
namespace {

// A message of few elements is empty in some rounds.
TEST(Exchange, TrafficMatchesAllPairsOfRanksInAnyNumberOfRounds) {
  struct Setting {
    std::vector<int64_t> mesh;
    std::vector<int64_t> shape;
    size_t stride;
  };
  const std::vector<Setting> settings{
      {{2, 2}, {4, 4}, 1}, {{2, 3}, {7, 5}, 1}, {{5}, {7, 3}, 1}, {{4, 3}, {25}, 1}, {{2, 2, 3}, {11, 4}, 17}};
  int64_t checked = 0;
  int64_t short_messages = 0;
  for (const Setting& setting : settings) {
    const MeshPtr mesh = test::mesh_of(setting.mesh);
    std::vector<Layout> all = test::all_layouts(mesh, setting.shape, {});
    for (size_t d = 0; d < setting.mesh.size(); ++d) {  // strided cuts
      std::vector<Placement> placements(setting.mesh.size(), Placement::replicate());
      placements[d] = Placement::strided_shard(0, 3);
      all.emplace_back(mesh, setting.shape, DType::parse("float32"), placements);
    }
    for (size_t pair = 0; pair < all.size() * all.size(); pair += setting.stride) {
      std::optional<Step> step = move_between(all[pair / all.size()], all[pair % all.size()]);
      if (!step || step->op != StepOp::kExchange) continue;
      for (const int64_t rounds : {1, 2, 3, 9}) {
        step->rounds = rounds;
        const MeshExchange exchange = mesh_exchange_of(*step);
        for (int64_t position = 0; position < mesh->size(); ++position) {
          const Traffic counted = exchange.traffic_at(position);
          const Traffic walked = test::pair_by_pair(*step, position);
          ASSERT_EQ(counted, walked) << step->before.to_string() << " -> " << step->after.placements_string() << " in "
                                     << rounds << " rounds";
          // The lists of messages agree.
          const Rank rank = mesh->rank_at(Position{position});
          if (position % 3 == 0) {
            ASSERT_EQ(exchange.Exchange::traffic(rank, rounds), counted);
          }
          short_messages += counted.messages % rounds != 0;
          ++checked;
        }
      }
    }
  }
  EXPECT_GT(checked, 10'000);
  EXPECT_GT(short_messages, 100);
}

// Each coordinate of the mesh dims that vary and cut the tensor dim is one part.
TEST(Exchange, CountsPartsByTheirLength) {
  const MeshPtr mesh = test::mesh_of({2, 3, 4});
  for (const char* placements : {"S(0),S(0),S(0)", "S(0),R,Cyclic(0,2)", "SS(0,3),S(0),R", "R,R,R",
                                 "Owned(0,1),S(0),S(0)", "S(0),Blocks(0,3),R", "R,Ragged(0,4:0:7),S(0)"}) {
    const Layout layout(mesh, {11}, DType::parse("float32"), parse_placements(placements), {},
                        StridedMeaning::kLiteral);
    for (const MeshDimSet varying :
         {MeshDimSet(), MeshDimSet::single(1), MeshDimSet::from_bits(5), MeshDimSet::from_bits(7)}) {
      for (int64_t position = 0; position < mesh->size(); ++position) {
        std::map<int64_t, int64_t> walked;
        for (const int64_t member : mesh->group(position, varying & layout.cut_dims())) {
          ++walked[length(layout.region(member)[0])];
        }
        EXPECT_EQ(part_lengths(*mesh, 11, layout.cuts(0), position, varying), walked) << placements;
      }
    }
  }
}

}  // namespace
}  // namespace shardwright
