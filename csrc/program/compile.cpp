// Plan x rank -> program. One function per kind of move; each takes the buffer that holds `before` and fills the one
// that will hold `after`.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

#include "layout/error.h"
#include "planner/exchange.h"
#include "program/boxes.h"
#include "program/program.h"

namespace shardwright {
namespace {

// Above this, looking at every pair of a group costs more than messages to absent peers save.
constexpr int64_t kMaxGroupForPairs = 512;

// Gloo's single messages stall where its all-to-all does not: up to this many ranks that are connected by what they
// exchange, an all-to-all among them is faster even if some pairs have nothing to say.
constexpr size_t kMaxSparseAllToAll = 8;

// Gloo's all-to-all answers several times faster than its single messages do, so small gathers pay for sending every
// peer a copy of its own. Above this the copies cost more.
constexpr int64_t kMaxCopiedGatherBytes = int64_t{1} << 20;

// How a pending reduction is carried out: pre-power, one collective with `op`, division, post-power.
struct Reduction {
  ReduceOp op = ReduceOp::kSum;
  double divisor = 1;
  double power = 1;
};

Reduction reduction_of(const Step& step) {
  Reduction reduction;
  for (const int d : step.mesh_dims.to_vector()) {
    const Placement& placement = step.before.placements()[d];
    reduction.op = placement.op;
    if (placement.op == ReduceOp::kAvg) reduction.divisor *= static_cast<double>(step.before.mesh().dim_size(d));
    if (placement.op == ReduceOp::kNorm) reduction.power = placement.norm_power;
  }
  if (reduction.op == ReduceOp::kAvg || reduction.op == ReduceOp::kNorm) reduction.op = ReduceOp::kSum;
  return reduction;
}

// One per mesh dim, in mesh order: PyTorch divides once per mesh dim, and two divisions round differently than one.
std::vector<double> partition_divisors(const Step& step) {
  std::vector<double> divisors;
  for (const int d : step.mesh_dims.to_vector()) {
    const Placement& placement = step.after.placements()[d];
    const auto size = static_cast<double>(step.before.mesh().dim_size(d));
    divisors.push_back(placement.op == ReduceOp::kNorm ? std::pow(size, 1.0 / placement.norm_power) : size);
  }
  return divisors;
}

using Positions = std::vector<int64_t>;  // of ranks on the mesh, by ascending rank

class Compiler {
 public:
  Compiler(const Plan& plan, int64_t position)
      : plan_(plan), position_(position), program_{{}, {}, plan.src.dtype(), {}, 0, {}, {}, {}, {}} {}

  Program run() {
    program_.input_shape = plan_.src.local_shape(position_);
    program_.output_shape = plan_.dst.local_shape(position_);
    int current = new_buffer(num_elements(plan_.src.region(position_)));
    for (step_index_ = 0; step_index_ < static_cast<int>(plan_.steps.size()); ++step_index_) {
      const Step& step = plan_.steps[step_index_];
      program_.step_texts.push_back(concat("step ", step_index_ + 1, " of ", plan_.steps.size(), " (",
                                           step_op_name(step.op), " over ", plan_.src.mesh().names_of(step.mesh_dims),
                                           ")"));
      const int next = new_buffer(num_elements(step.after.region(position_)));
      compile_step(step, current, next);
      current = next;
    }
    program_.output = current;
    program_.box_of_input = box_of_input();
    return std::move(program_);
  }

 private:
  void compile_step(const Step& step, int current, int next) {
    switch (step.op) {
      case StepOp::kSlice:
        return copy_shared(step, current, next);
      case StepOp::kPartition:
        copy_shared(step, current, next);
        for (const double divisor : partition_divisors(step)) divide(whole(next), divisor);
        return;
      case StepOp::kZeroFill:
        if (count_of(next) > 0) emit(FillZero{whole(next)});
        return copy_shared(step, current, next);
      case StepOp::kAllGather:
      case StepOp::kAllToAll:
      case StepOp::kPermute:
      case StepOp::kExchange:
        return exchange(step, current, next);
      case StepOp::kReduceScatter:
        return reduce_scatter(step, current, next);
      case StepOp::kAllReduce:
        return all_reduce(step, current, next);
    }
  }

  // ---- data moves

  // What one rank of the group exchanges, seen from here. Null where nothing is.
  struct Exchange {
    std::vector<std::optional<Parcel>> sends;     // by index in the group
    std::vector<std::optional<Parcel>> receives;  // by index in the group
    Parcel own;
  };

  void exchange(const Step& step, int current, int next) {
    const Positions group = plan_.src.mesh().group(position_, step.mesh_dims);
    const auto k = static_cast<int64_t>(group.size());
    const bool is_gather = step.op == StepOp::kAllGather;
    if (plan_.backend == Backend::kNccl && step.rounds == 1 && gathers_evenly(step, group)) {
      native_all_gather(step, current, next);
    } else if (is_gather) {
      gathers_by_copies(step, k) ? all_to_all(step, group, current, next) : messages(step, group, current, next);
    } else if (k > kMaxGroupForPairs) {
      messages(step, group, current, next);
    } else {
      const Pairs pairs(step, group);
      const bool regroups = plan_.backend == Backend::kGloo && !plan_.named_groups_only;
      const Positions partners = regroups ? pairs.connected_to(position_) : group;
      if (partners.size() == 1) {
        copy_shared(step, current, next);
      } else if (suits_all_to_all(pairs, partners)) {
        all_to_all(step, partners, current, next);
      } else {
        messages(step, group, current, next);
      }
    }
  }

  // Who has something for whom in a group. All its members see the same.
  class Pairs {
   public:
    Pairs(const Step& step, const Positions& group) : group_(group), talks_(group.size() * group.size()) {
      const Transfers transfers(step, group[0]);
      for (size_t from = 0; from < group.size(); ++from) {
        for (size_t to = 0; to < group.size(); ++to) {
          const Interval range = transfers.range(from, to);
          talks_[from * group.size() + to] = from != to && range.begin < range.end;
        }
      }
    }

    bool talk(size_t from, size_t to) const { return talks_[from * group_.size() + to]; }

    // The ranks that the one at `position` exchanges with, directly or through others, itself included.
    Positions connected_to(int64_t position) const {
      std::vector<bool> found(group_.size(), false);
      std::vector<size_t> open{static_cast<size_t>(std::find(group_.begin(), group_.end(), position) - group_.begin())};
      found[open[0]] = true;
      while (!open.empty()) {
        const size_t from = open.back();
        open.pop_back();
        for (size_t m = 0; m < group_.size(); ++m) {
          if (found[m] || (!talk(from, m) && !talk(m, from))) continue;
          found[m] = true;
          open.push_back(m);
        }
      }
      Positions connected;
      for (size_t m = 0; m < group_.size(); ++m) {
        if (found[m]) connected.push_back(group_[m]);
      }
      return connected;
    }

    // The share of ordered pairs of `members`, a subset of the group, that have something to say, in percent.
    int64_t density(const Positions& members) const {
      int64_t talking = 0;
      for (size_t from = 0; from < group_.size(); ++from) {
        if (std::find(members.begin(), members.end(), group_[from]) == members.end()) continue;
        for (size_t to = 0; to < group_.size(); ++to) talking += talk(from, to) ? 1 : 0;
      }
      const auto k = static_cast<int64_t>(members.size());
      return talking * 100 / (k * (k - 1));
    }

   private:
    const Positions& group_;
    std::vector<bool> talks_;
  };

  bool suits_all_to_all(const Pairs& pairs, const Positions& members) const {
    const bool waits_for_those_concerned = plan_.backend == Backend::kGloo && !plan_.named_groups_only;
    if (waits_for_those_concerned && members.size() <= kMaxSparseAllToAll) return true;
    return pairs.density(members) == 100;
  }

  bool gathers_by_copies(const Step& step, int64_t k) const {
    return plan_.backend == Backend::kGloo && (k == 2 || step.before.largest_part_bytes() <= kMaxCopiedGatherBytes);
  }

  // With the ranks at `partners`, some or all of the group of the step, by ascending rank.
  // What stays on the rank goes in the first round.
  Exchange exchange_parts(const Step& step, const Positions& partners, int64_t round) const {
    const Region held = step.before.region(position_);
    const Region needed = step.after.region(position_);
    const size_t k = partners.size();
    const Intersection own(held, needed);
    Exchange parts{std::vector<std::optional<Parcel>>(k), std::vector<std::optional<Parcel>>(k),
                   Parcel(own, 0, round == 0 ? own.count() : 0)};
    const Transfers transfers(step, position_);
    const Positions& group = transfers.group();
    const auto index_of = [&](int64_t position) {
      return static_cast<size_t>(std::find(group.begin(), group.end(), position) - group.begin());
    };
    const size_t me = index_of(position_);
    for (size_t m = 0; m < k; ++m) {
      if (partners[m] == position_) continue;
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

  static bool gathers_evenly(const Step& step, const Positions& group) {
    if (step.op != StepOp::kAllGather) return false;
    const int64_t first = num_elements(step.before.region(group[0]));
    for (const int64_t member : group) {
      if (num_elements(step.before.region(member)) != first) return false;
    }
    return first > 0;
  }

  void native_all_gather(const Step& step, int current, int next) {
    const int g = group_index(step.mesh_dims);
    const Group& group = program_.groups[g];
    const Exchange parts = exchange_parts(step, group.positions, 0);
    const int64_t n = count_of(current);
    const auto k = static_cast<int64_t>(group.positions.size());
    bool in_place = true;
    for (int64_t m = 0; m < k && in_place; ++m) {
      const Parcel& shared = m == group.index ? parts.own : *parts.receives[m];
      in_place = shared.run_in_b() == m * n;
    }
    if (in_place) {
      wait(emit(AllGather{g, whole(current), whole(next)}));
      return;
    }
    const int staging = new_buffer(n * k);
    const int ticket = emit(AllGather{g, whole(current), whole(staging)});
    copy_shared(step, current, next);
    wait(ticket);
    std::vector<Box> boxes;
    for (int64_t m = 0; m < k; ++m) {
      if (m != group.index) append(boxes, parts.receives[m]->packed_to_b(m * n, 0));
    }
    copy(staging, next, std::move(boxes));
  }

  // Parts may stay where they are if they lie one behind the other in the group's order; else they are packed. The own
  // part goes along where that saves packing the others.
  void all_to_all(const Step& step, const Positions& positions, int current, int next) {
    for (int64_t round = 0; round < step.rounds; ++round) all_to_all(step, positions, current, next, round);
  }

  void all_to_all(const Step& step, const Positions& positions, int current, int next, int64_t round) {
    const Exchange parts = exchange_parts(step, positions, round);
    const size_t k = positions.size();
    const int g = group_of_positions(step.mesh_dims, positions);
    const Group& group = program_.groups[g];
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
    if (from < 0) move.src = whole(new_buffer(sent));
    if (to < 0) move.dst = whole(new_buffer(received));
    const int staging = move.dst.buffer;
    copy(current, move.src.buffer, std::move(pack));
    const int ticket = emit(std::move(move));
    if (!carries_own) copy(current, next, parts.own.a_to_b(0, 0));
    wait(ticket);
    copy(staging, next, std::move(unpack));
  }

  static int64_t total_count(const std::vector<const Parcel*>& parts) {
    int64_t total = 0;
    for (const Parcel* part : parts) total += part != nullptr ? part->count() : 0;
    return total;
  }

  // Where the parts begin if they lie one behind the other in a local tensor, else -1. 0 if there are none.
  static int64_t first_of_run(const std::vector<const Parcel*>& parts, int64_t (Parcel::*run)() const) {
    int64_t first = -1;
    int64_t next = -1;
    for (const Parcel* part : parts) {
      if (part == nullptr || part->count() == 0) continue;
      const int64_t at = (part->*run)();
      if (at < 0 || (first >= 0 && at != next)) return -1;
      if (first < 0) first = at;
      next = at + part->count();
    }
    return std::max<int64_t>(first, 0);
  }

  void messages(const Step& step, const Positions& positions, int current, int next) {
    for (int64_t round = 0; round < step.rounds; ++round) messages(step, positions, current, next, round);
  }

  void messages(const Step& step, const Positions& positions, int current, int next, int64_t round) {
    const Exchange parts = exchange_parts(step, positions, round);
    SendReceive move{group_of_positions(step.mesh_dims, positions), {}, {}};
    std::vector<Box> pack;
    std::vector<Box> unpack;
    int64_t to_pack = 0;
    int64_t to_unpack = 0;
    for (const auto& part : parts.sends) to_pack += part && part->run_in_a() < 0 ? part->count() : 0;
    for (const auto& part : parts.receives) to_unpack += part && part->run_in_b() < 0 ? part->count() : 0;
    const int send_staging = to_pack > 0 ? new_buffer(to_pack) : -1;
    const int receive_staging = to_unpack > 0 ? new_buffer(to_unpack) : -1;
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
    copy(current, send_staging, std::move(pack));
    const int ticket = send_receive(std::move(move));
    copy(current, next, parts.own.a_to_b(0, 0));
    wait(ticket);
    copy(receive_staging, next, std::move(unpack));
  }

  // ---- reductions

  void reduce_scatter(const Step& step, int current, int next) {
    const Reduction reduction = reduction_of(step);
    const int g = group_index(step.mesh_dims);
    if (count_of(current) == 0) return;
    current = raised(whole(current), reduction.power).buffer;
    for (int64_t round = 0; round < step.rounds; ++round) reduce_scatter(step, reduction, g, current, next, round);
  }

  void reduce_scatter(const Step& step, const Reduction& reduction, int g, int current, int next, int64_t round) {
    const Group& group = program_.groups[g];
    const auto k = static_cast<int64_t>(group.positions.size());
    const Region held = step.before.region(position_);
    std::vector<Parcel> parts;
    std::vector<const Parcel*> pointers;
    for (const int64_t member : group.positions) {
      const Intersection part(held, step.after.region(member));
      const Interval range = in_round({0, part.count()}, round, step.rounds);
      parts.emplace_back(part, range.begin, range.end);
    }
    bool is_even = true;
    for (const Parcel& part : parts) {
      pointers.push_back(&part);
      is_even = is_even && part.count() == parts[0].count();
    }
    // All members hold the same region, so all answer these alike.
    const Interval mine = in_round({0, count_of(next)}, round, step.rounds);
    const int64_t own = mine.end - mine.begin;
    const int64_t first = first_of_run(pointers, &Parcel::run_in_a);
    BufferRange packed{current, first, total_count(pointers)};
    if (packed.count == 0) return;
    if (first < 0) {
      packed = whole(new_buffer(packed.count));
      std::vector<Box> boxes;
      int64_t offset = 0;
      for (const Parcel& part : parts) {
        append(boxes, part.a_to_packed(0, offset));
        offset += part.count();
      }
      copy(current, packed.buffer, std::move(boxes));
    }
    const BufferRange result{next, mine.begin, own};
    if (is_even && reduces_natively(step, plan_.backend)) {
      wait(emit(ReduceScatter{g, reduction.op, packed, result}));
      finish(result, reduction);
    } else {
      AllToAll move{g, packed, whole(new_buffer(own * k)), {}, std::vector<int64_t>(k, own)};
      for (const Parcel& part : parts) move.send_counts.push_back(part.count());
      const int staging = move.dst.buffer;
      wait(emit(std::move(move)));
      if (own > 0) reduce(reduction, rows_of(staging, own, g), result);
    }
  }

  void all_reduce(const Step& step, int current, int next) {
    const Reduction reduction = reduction_of(step);
    if (count_of(next) == 0) return;
    const int g = group_index(step.mesh_dims);
    if (reduces_natively(step, plan_.backend)) {
      if (reduction.power != 1) {
        emit(Power{whole(current), whole(next), reduction.power});
      } else {
        copy_shared(step, current, next);
      }
      wait(emit(AllReduce{g, reduction.op, whole(next)}));
      finish(whole(next), reduction);
      return;
    }
    for (int64_t round = 0; round < step.rounds; ++round) {
      const Interval range = in_round({0, count_of(next)}, round, step.rounds);
      const int64_t n = range.end - range.begin;
      if (n == 0) continue;
      const BufferRange contribution = raised({current, range.begin, n}, reduction.power);
      const BufferRange result{next, range.begin, n};
      if (program_.groups[g].positions.size() == 2) {
        all_reduce_of_two(g, reduction, contribution, result);
      } else {
        all_reduce_in_chunks(g, reduction, contribution, result);
      }
    }
  }

  // Two ranks trade all they have and both add it in the same order: the bytes of the way by chunks, in one step.
  void all_reduce_of_two(int g, const Reduction& reduction, BufferRange contribution, BufferRange result) {
    const Group& group = program_.groups[g];
    const int staging = new_buffer(result.count);
    std::vector<int64_t> counts{result.count, result.count};
    counts[group.index] = 0;
    wait(emit(AllToAll{g, contribution, whole(staging), counts, counts}));
    std::vector<BufferRange> parts{contribution, whole(staging)};
    if ((group.positions[0] < group.positions[1]) != (group.index == 0)) std::swap(parts[0], parts[1]);
    reduce(reduction, std::move(parts), result);
  }

  // Rank m of the group reduces flat chunk m and sends it to all: each element is summed once, so replicas are bitwise
  // equal.
  void all_reduce_in_chunks(int g, const Reduction& reduction, BufferRange contribution, BufferRange result) {
    const Group& group = program_.groups[g];
    const auto k = static_cast<int64_t>(group.positions.size());
    const Interval mine = flat_chunk(result.count, k, group.index);
    const int64_t own = mine.end - mine.begin;
    const int staging = new_buffer(own * k);
    AllToAll scatter{g, contribution, whole(staging), {}, std::vector<int64_t>(k, own)};
    for (int64_t m = 0; m < k; ++m) {
      const Interval chunk = flat_chunk(result.count, k, m);
      scatter.send_counts.push_back(chunk.end - chunk.begin);
    }
    const std::vector<int64_t> chunk_counts = scatter.send_counts;
    wait(emit(std::move(scatter)));
    const BufferRange own_result{result.buffer, result.offset + mine.begin, own};
    if (own > 0) reduce(reduction, rows_of(staging, own, g), own_result);
    if (chunk_counts[0] * program_.dtype.size_bytes() <= kMaxCopiedGatherBytes) {
      gather_copies(g, own_result, chunk_counts, result);
    } else {
      gather_messages(g, own_result, chunk_counts, result);
    }
  }

  // One all-to-all that gives every rank a copy of the own chunk.
  void gather_copies(int g, BufferRange own, const std::vector<int64_t>& chunk_counts, BufferRange result) {
    const auto k = static_cast<int64_t>(chunk_counts.size());
    const int copies = new_buffer(own.count * k);
    if (own.count > 0) copy(result.buffer, copies, {Box{own.offset, 0, {k, own.count}, {0, 1}, {own.count, 1}}});
    wait(emit(AllToAll{g, whole(copies), result, std::vector<int64_t>(k, own.count), chunk_counts}));
  }

  void gather_messages(int g, BufferRange own, const std::vector<int64_t>& chunk_counts, BufferRange result) {
    SendReceive gather{g, {}, {}};
    int64_t begin = result.offset;
    for (int64_t m = 0; m < static_cast<int64_t>(chunk_counts.size()); ++m) {
      if (m != program_.groups[g].index) {
        if (chunk_counts[m] > 0) gather.receives.push_back({m, {result.buffer, begin, chunk_counts[m]}});
        if (own.count > 0) gather.sends.push_back({m, own});
      }
      begin += chunk_counts[m];
    }
    wait(send_receive(std::move(gather)));
  }

  // The rows of a staging buffer, one per rank of the group, by ascending position: replicas then add in the same order
  // on meshes whose ranks are shuffled too.
  std::vector<BufferRange> rows_of(int staging, int64_t row, int g) const {
    const std::vector<int64_t>& positions = program_.groups[g].positions;
    std::vector<int64_t> order(positions.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return positions[a] < positions[b]; });
    std::vector<BufferRange> rows;
    for (const int64_t m : order) rows.push_back({staging, m * row, row});
    return rows;
  }

  // The range itself where there is nothing to raise.
  BufferRange raised(BufferRange range, double power) {
    if (power == 1) return range;
    const int raised = new_buffer(range.count);
    emit(Power{range, whole(raised), power});
    return whole(raised);
  }

  void reduce(const Reduction& reduction, std::vector<BufferRange> parts, BufferRange result) {
    const bool has_fractions =
        program_.dtype.kind() == DTypeKind::kFloat || program_.dtype.kind() == DTypeKind::kComplex;
    emit(Reduce{reduction.op, std::move(parts), result, has_fractions ? reduction.divisor : 1});
    if (!has_fractions) divide(result, reduction.divisor);
    take_root(result, reduction.power);
  }

  // After a native collective, which neither divides nor takes roots.
  void finish(BufferRange result, const Reduction& reduction) {
    divide(result, reduction.divisor);
    take_root(result, reduction.power);
  }

  void take_root(BufferRange result, double power) {
    if (power != 1 && result.count > 0) emit(Power{result, result, 1.0 / power});
  }

  // ---- small pieces

  std::optional<std::vector<int64_t>> box_of_input() const {
    for (const Step& step : plan_.steps) {
      if (step.op != StepOp::kSlice && step.op != StepOp::kPartition) return std::nullopt;
    }
    const Region held = plan_.src.region(position_);
    const Region needed = plan_.dst.region(position_);
    std::vector<int64_t> starts;
    for (size_t t = 0; t < held.size(); ++t) {
      const std::vector<Piece> pieces = intersect(held[t], needed[t]);
      if (pieces.size() > 1) return std::nullopt;
      starts.push_back(pieces.empty() ? 0 : pieces[0].a_position);
    }
    return starts;
  }

  void copy_shared(const Step& step, int current, int next) {
    copy(current, next, Intersection(step.before.region(position_), step.after.region(position_)).a_to_b(0, 0));
  }

  void copy(int src, int dst, std::vector<Box> boxes) {
    if (!boxes.empty()) emit(Copy{src, dst, std::move(boxes)});
  }

  void divide(BufferRange dst, double divisor) {
    if (divisor != 1 && dst.count > 0) emit(Divide{dst, divisor});
  }

  // -1 where this rank neither sends nor receives.
  int send_receive(SendReceive move) {
    return move.sends.empty() && move.receives.empty() ? -1 : emit(std::move(move));
  }

  void wait(int ticket) {
    if (ticket >= 0) emit(Wait{ticket});
  }

  int emit(Operation operation) {
    program_.instructions.push_back({std::move(operation), step_index_});
    return static_cast<int>(program_.instructions.size()) - 1;
  }

  static void append(std::vector<Box>& boxes, std::vector<Box> more) {
    for (Box& box : more) boxes.push_back(std::move(box));
  }

  int new_buffer(int64_t count) {
    program_.buffer_counts.push_back(count);
    return static_cast<int>(program_.buffer_counts.size()) - 1;
  }

  int64_t count_of(int buffer) const { return program_.buffer_counts[buffer]; }
  BufferRange whole(int buffer) const { return {buffer, 0, count_of(buffer)}; }

  int group_index(MeshDimSet mesh_dims) {
    return group_of_positions(mesh_dims, plan_.src.mesh().group(position_, mesh_dims));
  }

  int group_of_positions(MeshDimSet mesh_dims, Positions positions) {
    for (size_t g = 0; g < program_.groups.size(); ++g) {
      if (program_.groups[g].positions == positions) return static_cast<int>(g);
    }
    Group group{mesh_dims, std::move(positions), {}, -1};
    for (size_t m = 0; m < group.positions.size(); ++m) {
      group.ranks.push_back(plan_.src.mesh().rank_at(group.positions[m]));
      if (group.positions[m] == position_) group.index = static_cast<int64_t>(m);
    }
    program_.groups.push_back(std::move(group));
    return static_cast<int>(program_.groups.size()) - 1;
  }

  const Plan& plan_;
  int64_t position_;
  Program program_;
  int step_index_ = 0;
};

}  // namespace

Program compile(const Plan& plan, int64_t position) {
  check_user(position >= 0 && position < plan.src.mesh().size(), "position: ", position, " is not on the mesh (",
             plan.src.mesh().to_string(), ")");
  return Compiler(plan, position).run();
}

}  // namespace shardwright
