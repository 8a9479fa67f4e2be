#include "program/memory.h"

#include <algorithm>
#include <initializer_list>
#include <map>
#include <optional>

#include "moves/extremes.h"
#include "program/builder.h"
#include "program/pairs.h"
#include "program/sketch.h"

namespace shardwright {

namespace {

// The members of larger groups send messages to those they have something for, whoever these are (pairs.cpp).
constexpr int64_t kMaxGroupListed = 512;

// What one rank sends and receives in one round, by member of the group.
struct Loads {
  RunOfLoads sent;
  RunOfLoads received;
};

}  // namespace

// One step's part of the programs of all ranks. The instructions are those of data_moves.cpp and reductions.cpp, as far
// as they name buffers.
class StepMemory {
 public:
  StepMemory(const Step& step, const Plan& plan)
      : step_(step),
        lowering_(plan.lowering),
        named_groups_only_(plan.named_groups_only),
        is_native_(reduces_natively(step, plan.lowering)),
        pairs_(step),
        traffic_(step) {}

  // Takes apart the ranks that need different amounts.
  void tell_apart(RankClasses& classes) const {
    const bool is_reduction = step_.op == StepOp::kReduceScatter || step_.op == StepOp::kAllReduce;
    const bool moves = !is_local(step_.op) && !is_reduction;
    const bool is_gather = step_.op == StepOp::kAllGather;
    const bool may_be_in_order = !lowering_.gathers || !is_gather;
    const bool lists_members = is_gather || step_.before.mesh().group_size(step_.mesh_dims) <= kMaxGroupListed;
    classes.add(step_, moves && may_be_in_order && lists_members);
    // Ranks are connected, and stand in order, by what each of them has for whom.
    const bool some_meet = lowering_.narrows_groups && !named_groups_only_ && !is_gather && !pairs_.all_meet_alike();
    if (moves && some_meet && lists_members) classes.split_all(step_.mesh_dims);
    // Every group has an order of its own.
    if (!is_local(step_.op) && !ranks_ascend(step_.before.mesh())) classes.split_all(MeshDimSet::from_bits(~0u));
  }

  // Nothing where the peak depends on more than what the rank sends and receives.
  std::optional<Traffic> traffic_that_decides(int64_t position) const {
    const bool exchanges =
        step_.op == StepOp::kAllToAll || step_.op == StepOp::kPermute || step_.op == StepOp::kExchange;
    const bool by_messages = step_.before.mesh().group_size(step_.mesh_dims) > kMaxGroupListed;
    if (!exchanges || !by_messages || !pairs_.all_look_alike()) return std::nullopt;
    return traffic_.at(position);
  }
  std::optional<Traffic> traffic_at_most() const { return traffic_.at_most(); }

  void write(Sketch& sketch, int64_t position, int current, int next) {
    switch (step_.op) {
      case StepOp::kZeroFill:
        if (sketch.count_of(next) > 0) sketch.emit({next});
        [[fallthrough]];
      case StepOp::kSlice:
      case StepOp::kPartition:
        return copy_own(sketch, shared_elements(step_.before.region(position), step_.after.region(position)), current,
                        next);
      case StepOp::kAllGather:
      case StepOp::kAllToAll:
      case StepOp::kPermute:
      case StepOp::kExchange:
        return data_move(sketch, position, current, next);
      case StepOp::kReduceScatter:
        return reduce_scatter(sketch, position, current, next);
      case StepOp::kAllReduce:
        return all_reduce(sketch, position, current, next);
    }
  }

 private:
  using Group = StepPairs::Group;
  using Transfer = StepPairs::Transfer;

  static void copy_own(Sketch& sketch, int64_t own, int current, int next) {
    if (own > 0) sketch.emit({current, next});
  }

  // The members are listed only where what is done depends on them one by one.
  void data_move(Sketch& sketch, int64_t position, int current, int next) {
    const bool lists_members = step_.op != StepOp::kAllGather || step_.sharing != Sharing::kNone;
    const bool is_large = pairs_.around(position).size > kMaxGroupListed;
    Group& group = lists_members && !is_large ? pairs_.group(position) : pairs_.around(position);
    const size_t me = StepPairs::index_of(group, position);
    const DataMovePlan plan = way_of(pairs_, group, me, lowering_, named_groups_only_);
    switch (plan.way) {
      case DataMoveWay::kNativeGather:
        return native_all_gather(sketch, position, current, next);
      case DataMoveWay::kAllToAll: {
        const Group& listed = pairs_.group(position);
        std::vector<int64_t> partners;
        for (const size_t member : plan.partners) partners.push_back(listed.positions[member]);
        return all_to_all(sketch, listed, position, partners.empty() ? listed.positions : partners, current, next);
      }
      case DataMoveWay::kMessages:
        return messages(sketch, group, position, current, next);
      case DataMoveWay::kLocal:
        return copy_own(sketch, pairs_.own(position).count, current, next);
    }
  }

  // Whether the parts of the group lie one behind the other, in its order, in what each of it needs.
  bool gathers_in_place(int64_t position, int64_t n) {
    const Group& group = pairs_.around(position);
    const auto [found, is_new] = gathers_in_place_.try_emplace(group.least, true);
    if (!is_new) return found->second;
    const auto lies_at = [&](int64_t member, int64_t first) {
      const Load load = pairs_.share(member, position).in_round(0);
      return load.is_run_needed && load.first_needed == first;
    };
    const Mesh& mesh = step_.before.mesh();
    if (pairs_.all_look_alike() && mesh.ranks_are_positions()) {
      // Where parts are equal the place of one is linear in its coordinates.
      int64_t turn = 1;
      for (int d = mesh.ndim() - 1; d >= 0; --d) {
        if (!step_.mesh_dims.contains(d) || mesh.dim_size(d) == 1) continue;
        found->second = found->second && lies_at(group.least + mesh.stride(d), turn * n);
        turn *= mesh.dim_size(d);
      }
      return found->second;
    }
    const std::vector<int64_t>& members = pairs_.group(position).positions;
    for (size_t m = 0; m < members.size() && found->second; ++m) {
      found->second = lies_at(members[m], static_cast<int64_t>(m) * n);
    }
    return found->second;
  }

  void native_all_gather(Sketch& sketch, int64_t position, int current, int next) {
    const int64_t n = pairs_.num_held(position);
    const int64_t k = pairs_.around(position).size;
    if (gathers_in_place(position, n)) {
      sketch.emit({current, next});
      return sketch.emit({current, next});
    }
    const int staging = sketch.new_buffer(n * k);
    sketch.emit({current, staging});
    copy_own(sketch, pairs_.own(position).count, current, next);
    sketch.emit({current, staging});
    if (k > 1) sketch.emit({staging, next});
  }

  // The loads of a rank in one round, own part included or not.
  struct BothLoads {
    Loads without;
    Loads with;

    bool is_some_run() const {
      return without.sent.is_run() || without.received.is_run() || with.sent.is_run() || with.received.is_run();
    }
  };

  void add_peer(BothLoads& loads, const Load& sent, const Load& received, bool is_self) const {
    for (Loads* some : {&loads.without, &loads.with}) {
      if (is_self && some == &loads.without) continue;
      some->sent.add(sent.count, sent.first_held, sent.is_run_held);
      some->received.add(received.count, received.first_needed, received.is_run_needed);
    }
  }

  // With one round, no further than some of them may be runs: then the totals are what the rank exchanges in all.
  BothLoads loads_in_order(const Group& group, int64_t position, const std::vector<int64_t>& partners, int64_t round) {
    const bool is_gather = step_.op == StepOp::kAllGather;  // then a rank sends all members the same
    BothLoads loads;
    const Load own = pairs_.own(position);
    std::optional<Transfer> sends;
    for (const int64_t member : partners) {
      if (member == position) {
        add_peer(loads, own, own, true);
        continue;
      }
      if (!sends || !is_gather) sends = pairs_.transfer(group, position, member);
      const Transfer received = pairs_.transfer(group, member, position);
      add_peer(loads, sends->in_round(round), received.in_round(round), false);
      if (step_.rounds == 1 && !loads.is_some_run()) break;
    }
    if (step_.rounds == 1) {
      const Traffic traffic = traffic_.at(position);
      const int64_t item = step_.before.dtype().size_bytes();
      loads.without.sent.set_total(traffic.sent_bytes / item);
      loads.without.received.set_total(traffic.received_bytes / item);
      loads.with.sent.set_total(traffic.sent_bytes / item + own.count);
      loads.with.received.set_total(traffic.received_bytes / item + own.count);
    }
    return loads;
  }

  void all_to_all(Sketch& sketch, const Group& group, int64_t position, const std::vector<int64_t>& partners,
                  int current, int next) {
    const Load own = pairs_.own(position);
    for (int64_t round = 0; round < step_.rounds; ++round) {
      const BothLoads both = loads_in_order(group, position, partners, round);
      const auto packed = [](const Loads& loads) {
        return (loads.sent.is_run() ? 0 : loads.sent.total()) + (loads.received.is_run() ? 0 : loads.received.total());
      };
      const bool carries_own = step_.rounds == 1 && packed(both.with) < packed(both.without) + own.count;
      const Loads& loads = carries_own ? both.with : both.without;
      const int from = loads.sent.is_run() ? current : sketch.new_buffer(loads.sent.total());
      const int to = loads.received.is_run() ? next : sketch.new_buffer(loads.received.total());
      if (from != current) sketch.emit({current, from});
      sketch.emit({from, to});
      if (!carries_own && round == 0) copy_own(sketch, own.count, current, next);
      sketch.emit({from, to});
      if (to != next) sketch.emit({to, next});
    }
  }

  // Elements packed by a rank in one round, and messages that need no packing.
  struct Packed {
    int64_t sent = 0;
    int64_t received = 0;
    int64_t sent_runs = 0;
    int64_t received_runs = 0;

    void add_sent(const Load& load, int64_t times) {
      if (!load.is_run_held) sent += load.count * times;
      if (load.is_run_held && load.count > 0) sent_runs += times;
    }
    void add_received(const Load& load, int64_t times) {
      if (!load.is_run_needed) received += load.count * times;
      if (load.is_run_needed && load.count > 0) received_runs += times;
    }
  };

  void messages(Sketch& sketch, const Group& group, int64_t position, int current, int next) {
    std::vector<Packed> rounds(step_.rounds);
    if (pairs_.all_look_alike()) {
      add_equal_shares(rounds, position);
    } else {
      for (const auto& [transfer, times] : pairs_.sends(group, position)) {
        for (int64_t round = 0; round < step_.rounds; ++round) rounds[round].add_sent(transfer.in_round(round), times);
      }
      for (const auto& [transfer, times] : pairs_.receives(group, position)) {
        for (int64_t round = 0; round < step_.rounds; ++round) {
          rounds[round].add_received(transfer.in_round(round), times);
        }
      }
    }
    const int64_t own = pairs_.own(position).count;
    for (int64_t round = 0; round < step_.rounds; ++round) {
      const Packed& packed = rounds[round];
      const int sending = packed.sent > 0 ? sketch.new_buffer(packed.sent) : kNoBuffer;
      const int receiving = packed.received > 0 ? sketch.new_buffer(packed.received) : kNoBuffer;
      const int sent = packed.sent_runs > 0 ? current : kNoBuffer;
      const int received = packed.received_runs > 0 ? next : kNoBuffer;
      if (sending != kNoBuffer) sketch.emit({current, sending});
      sketch.emit({sent, sending, received, receiving});
      if (round == 0) copy_own(sketch, own, current, next);
      sketch.emit({sent, sending, received, receiving});
      if (receiving != kNoBuffer) sketch.emit({receiving, next});
    }
  }

  // Where digits say it all, what goes between two ranks looks alike for all pairs that have something to say.
  void add_equal_shares(std::vector<Packed>& rounds, int64_t position) {
    const Traffic traffic = traffic_.at(position);
    if (traffic.received_bytes == 0 && traffic.sent_bytes == 0) return;
    const Transfer& share = pairs_.any_transfer(position);
    const int64_t share_bytes = share.count() * step_.before.dtype().size_bytes();
    for (int64_t round = 0; round < step_.rounds; ++round) {
      const Load load = share.in_round(round);
      rounds[round].add_sent(load, traffic.sent_bytes / share_bytes);
      rounds[round].add_received(load, traffic.received_bytes / share_bytes);
    }
  }

  // All members hold the same, so they answer alike how it is sent.
  struct Scattering {
    std::vector<RunOfLoads> rounds;
    std::vector<bool> is_even;
  };

  const Scattering& scattering(int64_t position) {
    const auto [found, is_new] = scatterings_.try_emplace(pairs_.around(position).least);
    Scattering& scattering = found->second;
    if (!is_new) return scattering;
    const std::vector<int64_t>& members = pairs_.group(position).positions;
    if (step_.rounds == 1) {  // no further than the parts may lie one behind the other
      RunOfLoads loads;
      for (size_t m = 0; m < members.size() && loads.is_run(); ++m) {
        const Load load = pairs_.share(position, members[m]).in_round(0);
        loads.add(load.count, load.first_held, load.is_run_held);
      }
      loads.set_total(pairs_.num_held(position));
      return scattering = {{loads}, {pairs_.need_equally(position)}};
    }
    std::vector<Transfer> parts;
    for (const int64_t member : members) parts.push_back(pairs_.share(position, member));
    for (int64_t round = 0; round < step_.rounds; ++round) {
      RunOfLoads loads;
      bool is_even = true;
      const int64_t first = parts[0].in_round(round).count;
      for (const Transfer& part : parts) {
        const Load load = part.in_round(round);
        is_even = is_even && load.count == first;
        loads.add(load.count, load.first_held, load.is_run_held);
      }
      scattering.rounds.push_back(loads);
      scattering.is_even.push_back(is_even);
    }
    return scattering;
  }

  void reduce_scatter(Sketch& sketch, int64_t position, int current, int next) {
    const int64_t held = pairs_.num_held(position);
    if (held == 0) return;
    current = raised(sketch, current, held);
    const Scattering& of_group = scattering(position);
    for (int64_t round = 0; round < step_.rounds; ++round) {
      const RunOfLoads& sent = of_group.rounds[round];
      if (sent.total() == 0) continue;
      const Interval mine = in_round({0, sketch.count_of(next)}, round, step_.rounds);
      const int64_t own = mine.end - mine.begin;
      int packed = current;
      if (!sent.is_run()) {
        packed = sketch.new_buffer(sent.total());
        sketch.emit({current, packed});
      }
      if (of_group.is_even[round] && is_native_) {
        sketch.emit({packed, next});
        sketch.emit({packed, next});
        continue;
      }
      const int staging = sketch.new_buffer(own * pairs_.around(position).size);
      sketch.emit({packed, staging});
      sketch.emit({packed, staging});
      if (own > 0) sketch.emit({next, staging});
    }
  }

  void all_reduce(Sketch& sketch, int64_t position, int current, int next) {
    const int64_t n = sketch.count_of(next);
    if (n == 0) return;
    if (is_native_) return sketch.emit({current, next});
    const int64_t me = index_in_group(step_.before.mesh(), position, step_.mesh_dims);
    const int64_t k = pairs_.around(position).size;
    for (int64_t round = 0; round < step_.rounds; ++round) {
      const Interval range = in_round({0, n}, round, step_.rounds);
      const int64_t length = range.end - range.begin;
      if (length == 0) continue;
      const int contribution = raised(sketch, current, length);
      if (k == 2) {
        const int staging = sketch.new_buffer(length);
        sketch.emit({contribution, staging});
        sketch.emit({contribution, staging});
        sketch.emit({contribution, staging, next});
        continue;
      }
      const Interval mine = flat_chunk(length, k, me);
      const int64_t own = mine.end - mine.begin;
      const int staging = sketch.new_buffer(own * k);
      sketch.emit({contribution, staging});
      sketch.emit({contribution, staging});
      if (own > 0) sketch.emit({next, staging});
      const Interval first = flat_chunk(length, k, 0);
      const bool copies = (first.end - first.begin) * step_.before.dtype().size_bytes() <= kMaxCopiedGatherBytes;
      const int gathered = copies ? sketch.new_buffer(own * k) : kNoBuffer;
      if (copies && own > 0) sketch.emit({next, gathered});
      sketch.emit({gathered, next});
      sketch.emit({gathered, next});
    }
  }

  // The buffer that holds the powers that are added, where a norm is due.
  int raised(Sketch& sketch, int current, int64_t count) const {
    if (reduction_of(step_).power == 1) return current;
    const int raised = sketch.new_buffer(count);
    sketch.emit({current, raised});
    return raised;
  }

  const Step& step_;
  Lowering lowering_;
  bool named_groups_only_;
  bool is_native_;
  StepPairs pairs_;
  ExchangeTraffic traffic_;
  // By the first position of a group.
  std::map<int64_t, bool> gathers_in_place_;
  std::map<int64_t, Scattering> scatterings_;
};

ProgramMemory::ProgramMemory(const Plan& plan) : plan_(plan) {
  for (const Step& step : plan.steps) steps_.push_back(std::make_unique<StepMemory>(step, plan));
}

ProgramMemory::~ProgramMemory() = default;

std::vector<int64_t> ProgramMemory::peak_bytes_by_step(Rank rank) {
  Sketch sketch;
  int current = kInputBuffer;
  for (size_t i = 0; i < steps_.size(); ++i) {
    sketch.begin_step();
    const std::optional<Position> position = plan_.steps[i].after.mesh().position_of(rank);
    const int next = sketch.new_buffer(position ? num_elements(plan_.steps[i].after.region(*position)) : 0);
    if (position) steps_[i]->write(sketch, *position, current, next);
    current = next;
  }
  std::vector<int64_t> peaks = sketch.peaks(current);
  for (int64_t& peak : peaks) peak *= plan_.src.dtype().size_bytes();
  return peaks;
}

// Only with several rounds is the result perhaps not there in all of what follows the last use of it.
int64_t ProgramMemory::peak_of_step(size_t step, int64_t position) {
  Sketch sketch;
  int current = kInputBuffer;
  sketch.begin_step();
  if (step > 0) {
    current = sketch.new_buffer(num_elements(plan_.steps[step].before.region(position)));
    sketch.hold_from_start(current);
  }
  int next = sketch.new_buffer(num_elements(plan_.steps[step].after.region(position)));
  steps_[step]->write(sketch, position, current, next);
  if (plan_.steps[step].rounds > 1 && step + 1 < steps_.size()) {
    sketch.begin_step();
    current = next;
    next = sketch.new_buffer(num_elements(plan_.steps[step + 1].after.region(position)));
    steps_[step + 1]->write(sketch, position, current, next);
  }
  return sketch.peaks(next)[0] * plan_.src.dtype().size_bytes();
}

ProgramMemory::Worst ProgramMemory::worst_peak_bytes_by_step(int64_t at_most) {
  Worst worst;
  for (size_t i = 0; i < steps_.size(); ++i) {
    RankClasses classes(plan_.steps[i].before.mesh());
    steps_[i]->tell_apart(classes);
    if (plan_.steps[i].rounds > 1 && i + 1 < steps_.size()) steps_[i + 1]->tell_apart(classes);
    const RanksSeen seen = classes.seen(at_most);
    std::vector<Traffic> known;
    int64_t peak = 0;
    for (const int64_t position : seen.positions) {
      if (const std::optional<Traffic> traffic = steps_[i]->traffic_that_decides(position)) {
        if (std::find(known.begin(), known.end(), *traffic) != known.end()) continue;
        known.push_back(*traffic);
      }
      peak = std::max(peak, peak_of_step(i, position));
    }
    worst.bytes.push_back(peak);
    // A rank that sends and receives more needs no less, but for the first position's own part.
    const std::optional<Traffic> most = known.empty() ? std::nullopt : steps_[i]->traffic_at_most();
    const bool has_most =
        most && std::any_of(known.begin(), known.end(), [&](const Traffic& traffic) {
          return traffic.received_bytes == most->received_bytes && traffic.sent_bytes == most->sent_bytes;
        });
    worst.is_exact = worst.is_exact && (seen.stand_for_all || has_most);
  }
  return worst;
}

}  // namespace shardwright
