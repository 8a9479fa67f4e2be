// Moves of data: all-gathers, all-to-alls and whatever else brings every rank what it misses.
#include <algorithm>
#include <optional>

#include "moves/exchange.h"
#include "program/boxes.h"
#include "program/builder.h"
#include "program/pairs.h"

namespace shardwright {
namespace {

class DataMove {
 public:
  explicit DataMove(ProgramBuilder& builder) : b_(builder) {}

  // What one rank of the group exchanges, seen from here. Null where nothing is.
  struct Exchange {
    std::vector<std::optional<Parcel>> sends;     // by index in the group
    std::vector<std::optional<Parcel>> receives;  // by index in the group
    Parcel own;
  };

  void exchange(const Step& step, BufferId current, BufferId next) {
    StepPairs pairs(step);
    StepPairs::Group& group = pairs.group(b_.position());
    const size_t me = StepPairs::index_of(group, b_.position());
    const DataMovePlan plan = way_of(pairs, group, me, b_.backend(), b_.named_groups_only());
    Positions partners = group.positions;
    if (!plan.partners.empty()) {
      partners.clear();
      for (const size_t member : plan.partners) partners.push_back(group.positions[member]);
    }
    switch (plan.way) {
      case DataMoveWay::kNativeGather:
        return native_all_gather(step, current, next);
      case DataMoveWay::kAllToAll:
        return all_to_all(step, partners, current, next);
      case DataMoveWay::kMessages:
        return messages(step, partners, current, next);
      case DataMoveWay::kLocal:
        return b_.copy_shared(step, current, next);
    }
  }

  // With the ranks at `partners`, some or all of the group of the step, by ascending rank.
  // What stays on the rank goes in the first round.
  Exchange exchange_parts(const Step& step, const Positions& partners, int64_t round) const {
    const Region held = step.before.region(b_.position());
    const Region needed = step.after.region(b_.position());
    const size_t k = partners.size();
    const Intersection own(held, needed);
    Exchange parts{std::vector<std::optional<Parcel>>(k), std::vector<std::optional<Parcel>>(k),
                   Parcel(own, 0, round == 0 ? own.count() : 0)};
    const Transfers transfers(step, b_.position());
    const Positions& group = transfers.group();
    const auto index_of = [&](int64_t position) {
      return static_cast<size_t>(std::find(group.begin(), group.end(), position) - group.begin());
    };
    const size_t me = index_of(b_.position());
    for (size_t m = 0; m < k; ++m) {
      if (partners[m] == b_.position()) continue;
      const size_t peer = k == group.size() ? m : index_of(partners[m]);
      const Interval sent = in_round(transfers.range(me, peer), round, step.rounds);
      if (sent.begin < sent.end) {
        parts.sends[m] = Parcel(Intersection(held, step.after.region(partners[m])), sent.begin, sent.end);
      }
      const Interval received = in_round(transfers.range(peer, me), round, step.rounds);
      if (received.begin < received.end) {
        parts.receives[m] = Parcel(Intersection(step.before.region(partners[m]), needed), received.begin, received.end);
      }
    }
    return parts;
  }

  void native_all_gather(const Step& step, BufferId current, BufferId next) {
    const int g = b_.group_index(step.mesh_dims);
    const Group& group = b_.program().groups[g];
    const Exchange parts = exchange_parts(step, group.positions, 0);
    const int64_t n = b_.count_of(current);
    const auto k = static_cast<int64_t>(group.positions.size());
    bool in_place = true;
    for (int64_t m = 0; m < k && in_place; ++m) {
      const Parcel& shared = m == group.index ? parts.own : *parts.receives[m];
      in_place = shared.run_in_b() == m * n;
    }
    if (in_place) {
      b_.wait(b_.emit(AllGather{g, b_.whole(current), b_.whole(next)}));
      return;
    }
    const BufferId staging = b_.new_buffer(n * k);
    const Ticket ticket = b_.emit(AllGather{g, b_.whole(current), b_.whole(staging)});
    b_.copy_shared(step, current, next);
    b_.wait(ticket);
    std::vector<Box> boxes;
    for (int64_t m = 0; m < k; ++m) {
      if (m != group.index) append(boxes, parts.receives[m]->packed_to_b(m * n, 0));
    }
    b_.copy(staging, next, std::move(boxes));
  }

  // Parts may stay where they are if they lie one behind the other in the group's order; else they are packed. The own
  // part goes along where that saves packing the others.
  void all_to_all(const Step& step, const Positions& positions, BufferId current, BufferId next) {
    for (int64_t round = 0; round < step.rounds; ++round) all_to_all(step, positions, current, next, round);
  }

  void all_to_all(const Step& step, const Positions& positions, BufferId current, BufferId next, int64_t round) {
    const Exchange parts = exchange_parts(step, positions, round);
    const size_t k = positions.size();
    const int g = b_.group_of_positions(step.mesh_dims, positions);
    const Group& group = b_.program().groups[g];
    std::vector<const Parcel*> sends(k, nullptr);
    std::vector<const Parcel*> receives(k, nullptr);
    for (size_t m = 0; m < k; ++m) {
      if (parts.sends[m]) sends[m] = &*parts.sends[m];
      if (parts.receives[m]) receives[m] = &*parts.receives[m];
    }
    const int64_t to_send = total_count(sends);
    const int64_t to_receive = total_count(receives);
    const int64_t own = parts.own.count();
    int64_t from = first_of_run(sends, &Parcel::run_in_a);
    int64_t to = first_of_run(receives, &Parcel::run_in_b);
    const int64_t packed_without = (from < 0 ? to_send : 0) + (to < 0 ? to_receive : 0) + own;
    sends[group.index] = receives[group.index] = &parts.own;
    const int64_t from_with_own = first_of_run(sends, &Parcel::run_in_a);
    const int64_t to_with_own = first_of_run(receives, &Parcel::run_in_b);
    const int64_t packed_with = (from_with_own < 0 ? to_send + own : 0) + (to_with_own < 0 ? to_receive + own : 0);
    const bool carries_own = step.rounds == 1 && packed_with < packed_without;
    if (carries_own) {
      from = from_with_own;
      to = to_with_own;
    } else {
      sends[group.index] = receives[group.index] = nullptr;
    }

    AllToAll move{g, {current, from, total_count(sends)}, {next, to, total_count(receives)}, {}, {}};
    std::vector<Box> pack;
    std::vector<Box> unpack;
    int64_t sent = 0;
    int64_t received = 0;
    for (size_t m = 0; m < k; ++m) {
      move.send_counts.push_back(sends[m] != nullptr ? sends[m]->count() : 0);
      move.receive_counts.push_back(receives[m] != nullptr ? receives[m]->count() : 0);
      if (sends[m] != nullptr && from < 0) append(pack, sends[m]->a_to_packed(0, sent));
      if (receives[m] != nullptr && to < 0) append(unpack, receives[m]->packed_to_b(received, 0));
      sent += move.send_counts.back();
      received += move.receive_counts.back();
    }
    if (from < 0) move.src = b_.whole(b_.new_buffer(sent));
    if (to < 0) move.dst = b_.whole(b_.new_buffer(received));
    const BufferId staging = move.dst.buffer;
    b_.copy(current, move.src.buffer, std::move(pack));
    const Ticket ticket = b_.emit(std::move(move));
    if (!carries_own) b_.copy(current, next, parts.own.a_to_b(0, 0));
    b_.wait(ticket);
    b_.copy(staging, next, std::move(unpack));
  }

  void messages(const Step& step, const Positions& positions, BufferId current, BufferId next) {
    for (int64_t round = 0; round < step.rounds; ++round) messages(step, positions, current, next, round);
  }

  void messages(const Step& step, const Positions& positions, BufferId current, BufferId next, int64_t round) {
    const Exchange parts = exchange_parts(step, positions, round);
    SendReceive move{b_.group_of_positions(step.mesh_dims, positions), {}, {}};
    std::vector<Box> pack;
    std::vector<Box> unpack;
    int64_t to_pack = 0;
    int64_t to_unpack = 0;
    for (const auto& part : parts.sends) to_pack += part && part->run_in_a() < 0 ? part->count() : 0;
    for (const auto& part : parts.receives) to_unpack += part && part->run_in_b() < 0 ? part->count() : 0;
    const BufferId send_staging = to_pack > 0 ? b_.new_buffer(to_pack) : kMissingBuffer;
    const BufferId receive_staging = to_unpack > 0 ? b_.new_buffer(to_unpack) : kMissingBuffer;
    to_pack = to_unpack = 0;
    for (size_t m = 0; m < parts.sends.size(); ++m) {
      const auto peer = static_cast<int64_t>(m);
      if (const auto& part = parts.sends[m]) {
        const int64_t run = part->run_in_a();
        move.sends.push_back({peer, run >= 0 ? BufferRange{current, run, part->count()}
                                             : BufferRange{send_staging, to_pack, part->count()}});
        if (run < 0) append(pack, part->a_to_packed(0, to_pack));
        if (run < 0) to_pack += part->count();
      }
      if (const auto& part = parts.receives[m]) {
        const int64_t run = part->run_in_b();
        move.receives.push_back({peer, run >= 0 ? BufferRange{next, run, part->count()}
                                                : BufferRange{receive_staging, to_unpack, part->count()}});
        if (run < 0) append(unpack, part->packed_to_b(to_unpack, 0));
        if (run < 0) to_unpack += part->count();
      }
    }
    b_.copy(current, send_staging, std::move(pack));
    const Ticket ticket = b_.send_receive(std::move(move));
    b_.copy(current, next, parts.own.a_to_b(0, 0));
    b_.wait(ticket);
    b_.copy(receive_staging, next, std::move(unpack));
  }

  ProgramBuilder& b_;
};

}  // namespace

void compile_data_move(ProgramBuilder& builder, const Step& step, BufferId current, BufferId next) {
  DataMove(builder).exchange(step, current, next);
}

}  // namespace shardwright
