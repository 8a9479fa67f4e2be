// Compiles data moves: all-gathers, all-to-alls and other exchanges, which bring every rank what it lacks.
#include <algorithm>

#include "layout/selection.h"
#include "moves/exchange.h"
#include "program/builder.h"
#include "program/pairs.h"
#include "program/transfers.h"

namespace shardwright {
namespace {

using Positions = std::vector<int64_t>;  // on the mesh of the step, by ascending rank

// What this rank and those at `partners`, which are some or all of the step's group, send each other in one round.
TransferSet transfer_set(ProgramBuilder& builder, const Step& step, const Transfers& transfers,
                         const Positions& partners, int64_t round, BufferId current, BufferId next) {
  const Mesh& mesh = step.before.mesh();
  const Position here = builder.position_on(mesh);
  const Region held = step.before.region(here);
  const Region needed = step.after.region(here);
  const Positions& group = transfers.group();
  const auto index_of = [&](int64_t position) {
    return static_cast<size_t>(std::find(group.begin(), group.end(), position) - group.begin());
  };
  const size_t me = index_of(here);
  TransferSet set{builder.group_of_ranks(step.mesh_dims, mesh.ranks_at(partners)),
                  Messages(Messages::Side::kSent, current), Messages(Messages::Side::kReceived, next)};
  for (size_t m = 0; m < partners.size(); ++m) {
    if (partners[m] == here) continue;
    const auto index = static_cast<int64_t>(m);
    const size_t peer = partners.size() == group.size() ? m : index_of(partners[m]);
    const Interval sent = in_round(transfers.range(me, peer), round, step.rounds);
    if (sent.begin < sent.end) {
      const Selection both(held, step.after.region(partners[m]));
      set.sends.add(index, {{current, both.slice(sent.begin, sent.end)}});
    }
    const Interval received = in_round(transfers.range(peer, me), round, step.rounds);
    if (received.begin < received.end) {
      const Selection both(step.before.region(partners[m]), needed);
      set.receives.add(index, {{next, both.slice(received.begin, received.end)}});
    }
  }
  return set;
}

void exchange_in_rounds(ProgramBuilder& builder, const Step& step, const Positions& partners, Carrier carrier,
                        BufferId current, BufferId next) {
  const Transfers transfers(step, builder.position_on(step.before.mesh()));
  const Selection own(builder.region_in(step.before), builder.region_in(step.after));
  for (int64_t round = 0; round < step.rounds; ++round) {
    TransferSet set = transfer_set(builder, step, transfers, partners, round, current, next);
    const OwnItem kept{current, next, own.slice(0, round == 0 ? own.count() : 0)};  // copied in the first round
    exchange(builder, std::move(set), carrier, {kept}, step.rounds == 1);
  }
}

}  // namespace

void compile_data_move(ProgramBuilder& builder, const Step& step, BufferId current, BufferId next) {
  StepPairs pairs(step);
  const Position here = builder.position_on(step.before.mesh());
  StepPairs::Group& group = pairs.group(here);
  const size_t me = StepPairs::index_of(group, here);
  const DataMove move = data_move_of(pairs, group, me, builder.lowering(), builder.named_groups_only());
  if (!move.carrier) return builder.copy_shared(step, current, next);
  Positions partners = group.positions;
  if (!move.partners.empty()) {
    partners.clear();
    for (const size_t member : move.partners) partners.push_back(group.positions[member]);
  }
  exchange_in_rounds(builder, step, partners, *move.carrier, current, next);
}

}  // namespace shardwright
