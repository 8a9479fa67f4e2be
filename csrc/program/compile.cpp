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
constexpr int64_t kMaxGroupForDenseCheck = 512;

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
    std::vector<std::optional<Intersection>> sends;     // by index in the group
    std::vector<std::optional<Intersection>> receives;  // by index in the group
    Intersection own;
  };

  void exchange(const Step& step, int current, int next) {
    const int g = group_index(step.mesh_dims);
    const Group& group = program_.groups[g];
    const Exchange parts = exchange_parts(step, group);
    if (plan_.backend == Backend::kNccl && gathers_evenly(step, group)) {
      native_all_gather(step, g, parts, current, next);
    } else if (step.op != StepOp::kAllGather && is_dense(step, group)) {
      native_all_to_all(g, parts, current, next);
    } else {
      messages(g, parts, current, next);
    }
  }

  Exchange exchange_parts(const Step& step, const Group& group) {
    const Region held = step.before.region(position_);
    const Region needed = step.after.region(position_);
    const size_t k = group.positions.size();
    Exchange parts{std::vector<std::optional<Intersection>>(k), std::vector<std::optional<Intersection>>(k),
                   Intersection(held, needed)};
    for (size_t m = 0; m < k; ++m) {
      const int64_t peer = group.positions[m];
      if (peer == position_) continue;
      if (source_for(step, position_, peer) == position_) {
        Intersection shared(held, step.after.region(peer));
        if (shared.count() > 0) parts.sends[m] = std::move(shared);
      }
      if (source_for(step, peer, position_) == peer) {
        Intersection shared(step.before.region(peer), needed);
        if (shared.count() > 0) parts.receives[m] = std::move(shared);
      }
    }
    return parts;
  }

  static bool gathers_evenly(const Step& step, const Group& group) {
    if (step.op != StepOp::kAllGather) return false;
    const int64_t first = num_elements(step.before.region(group.positions[0]));
    for (const int64_t member : group.positions) {
      if (num_elements(step.before.region(member)) != first) return false;
    }
    return first > 0;
  }

  // Every rank of the group has something for every other. All members see the same answer.
  static bool is_dense(const Step& step, const Group& group) {
    if (static_cast<int64_t>(group.positions.size()) > kMaxGroupForDenseCheck) return false;
    for (const int64_t source : group.positions) {
      for (const int64_t receiver : group.positions) {
        if (source != receiver && transfer_elements(step, source, receiver) == 0) return false;
      }
    }
    return true;
  }

  void native_all_gather(const Step& step, int g, const Exchange& parts, int current, int next) {
    const Group& group = program_.groups[g];
    const int64_t n = count_of(current);
    const auto k = static_cast<int64_t>(group.positions.size());
    bool in_place = true;
    for (int64_t m = 0; m < k && in_place; ++m) {
      const Intersection& shared = m == group.index ? parts.own : *parts.receives[m];
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

  // Packs only where the parts do not already lie one behind the other in the group's order.
  void native_all_to_all(int g, const Exchange& parts, int current, int next) {
    const Group& group = program_.groups[g];
    const size_t k = group.positions.size();
    std::vector<const Intersection*> sends(k);
    std::vector<const Intersection*> receives(k);
    for (size_t m = 0; m < k; ++m) {
      const bool self = static_cast<int64_t>(m) == group.index;
      sends[m] = self ? &parts.own : &*parts.sends[m];
      receives[m] = self ? &parts.own : &*parts.receives[m];
    }
    const bool from_place = lies_in_order(sends, &Intersection::run_in_a);
    const bool to_place = lies_in_order(receives, &Intersection::run_in_b);
    const bool carries_own = from_place || to_place;

    AllToAll move{g, whole(current), whole(next), {}, {}};
    std::vector<Box> pack;
    std::vector<Box> unpack;
    int64_t sent = 0;
    int64_t received = 0;
    for (size_t m = 0; m < k; ++m) {
      const bool left_out = static_cast<int64_t>(m) == group.index && !carries_own;
      move.send_counts.push_back(left_out ? 0 : sends[m]->count());
      move.receive_counts.push_back(left_out ? 0 : receives[m]->count());
      if (!left_out) append(pack, sends[m]->a_to_packed(0, sent));
      if (!left_out) append(unpack, receives[m]->packed_to_b(received, 0));
      sent += move.send_counts.back();
      received += move.receive_counts.back();
    }
    if (!from_place) {
      move.src = whole(new_buffer(sent));
      copy(current, move.src.buffer, std::move(pack));
    }
    if (!to_place) move.dst = whole(new_buffer(received));
    const int staging = move.dst.buffer;
    const int ticket = emit(std::move(move));
    if (!carries_own) copy(current, next, parts.own.a_to_b(0, 0));
    wait(ticket);
    if (!to_place) copy(staging, next, std::move(unpack));
  }

  static bool lies_in_order(const std::vector<const Intersection*>& parts, int64_t (Intersection::*run)() const) {
    int64_t offset = 0;
    for (const Intersection* part : parts) {
      if (part->count() == 0) continue;
      if ((part->*run)() != offset) return false;
      offset += part->count();
    }
    return true;
  }

  void messages(int g, const Exchange& parts, int current, int next) {
    SendReceive move{g, {}, {}};
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
    current = raised(current, reduction.power);
    const int g = group_index(step.mesh_dims);
    const Group& group = program_.groups[g];
    const auto k = static_cast<int64_t>(group.positions.size());
    const Region held = step.before.region(position_);
    std::vector<Intersection> parts;
    std::vector<const Intersection*> pointers;
    for (const int64_t member : group.positions) parts.emplace_back(held, step.after.region(member));
    bool is_even = true;
    bool all_get_some = true;
    for (const Intersection& part : parts) {
      pointers.push_back(&part);
      is_even = is_even && part.count() == parts[0].count();
      all_get_some = all_get_some && part.count() > 0;
    }
    // All members hold the same region, so all answer these alike.
    const bool in_order = lies_in_order(pointers, &Intersection::run_in_a);
    const bool native = is_even && reduces_natively(step, plan_.backend);
    const int64_t own = count_of(next);
    if (count_of(current) == 0) return;

    if (!all_get_some) {
      reduce_by_messages(g, parts, reduction.op, current, next);
    } else {
      int packed = current;
      if (!in_order) {
        packed = new_buffer(count_of(current));
        std::vector<Box> boxes;
        int64_t offset = 0;
        for (const Intersection& part : parts) {
          append(boxes, part.a_to_packed(0, offset));
          offset += part.count();
        }
        copy(current, packed, std::move(boxes));
      }
      if (native) {
        wait(emit(ReduceScatter{g, reduction.op, whole(packed), whole(next)}));
      } else {
        AllToAll move{g, whole(packed), whole(new_buffer(own * k)), {}, std::vector<int64_t>(k, own)};
        for (const Intersection& part : parts) move.send_counts.push_back(part.count());
        const BufferRange staging = move.dst;
        wait(emit(std::move(move)));
        emit(Reduce{reduction.op, staging, whole(next), order_of_positions(g)});
      }
    }
    finish(whole(next), reduction);
  }

  void reduce_by_messages(int g, const std::vector<Intersection>& parts, ReduceOp op, int current, int next) {
    const Group& group = program_.groups[g];
    const auto k = static_cast<int64_t>(parts.size());
    const int64_t own = count_of(next);
    int64_t to_pack = 0;
    for (const Intersection& part : parts) to_pack += part.count();
    const int send_staging = new_buffer(to_pack);
    const int receive_staging = own > 0 ? new_buffer(own * k) : -1;
    SendReceive move{g, {}, {}};
    std::vector<Box> pack;
    int64_t offset = 0;
    for (int64_t m = 0; m < k; ++m) {
      if (m == group.index) continue;
      if (parts[m].count() > 0) {
        move.sends.push_back({m, {send_staging, offset, parts[m].count()}});
        append(pack, parts[m].a_to_packed(0, offset));
        offset += parts[m].count();
      }
      if (own > 0) move.receives.push_back({m, {receive_staging, m * own, own}});
    }
    program_.buffer_counts[send_staging] = offset;
    copy(current, send_staging, std::move(pack));
    const int ticket = send_receive(std::move(move));
    if (own > 0) copy(current, receive_staging, parts[group.index].a_to_packed(0, group.index * own));
    wait(ticket);
    if (own > 0) emit(Reduce{op, whole(receive_staging), whole(next), order_of_positions(g)});
  }

  void all_reduce(const Step& step, int current, int next) {
    const Reduction reduction = reduction_of(step);
    const int64_t n = count_of(next);
    if (n == 0) return;
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
    all_reduce_in_chunks(g, reduction, raised(current, reduction.power), next);
  }

  // Rank m of the group reduces flat chunk m and sends it to all: each element is summed once, so replicas are bitwise
  // equal.
  void all_reduce_in_chunks(int g, const Reduction& reduction, int current, int next) {
    const Group& group = program_.groups[g];
    const auto k = static_cast<int64_t>(group.positions.size());
    const int64_t n = count_of(next);
    const Interval mine = flat_chunk(n, k, group.index);
    const int64_t own = mine.end - mine.begin;
    const int staging = own > 0 ? new_buffer(own * k) : -1;
    SendReceive scatter{g, {}, {}};
    SendReceive gather{g, {}, {}};
    for (int64_t m = 0; m < k; ++m) {
      if (m == group.index) continue;
      const Interval chunk = flat_chunk(n, k, m);
      const int64_t count = chunk.end - chunk.begin;
      if (count > 0) scatter.sends.push_back({m, {current, chunk.begin, count}});
      if (count > 0) gather.receives.push_back({m, {next, chunk.begin, count}});
      if (own > 0) scatter.receives.push_back({m, {staging, m * own, own}});
      if (own > 0) gather.sends.push_back({m, {next, mine.begin, own}});
    }
    const int ticket = send_receive(std::move(scatter));
    if (own > 0) copy(current, staging, {Box{mine.begin, group.index * own, {own}, {1}, {1}}});
    wait(ticket);
    const BufferRange result{next, mine.begin, own};
    if (own > 0) {
      emit(Reduce{reduction.op, whole(staging), result, order_of_positions(g)});
      finish(result, reduction);
    }
    wait(send_receive(std::move(gather)));
  }

  // Indices in the group by ascending position.
  std::vector<int64_t> order_of_positions(int g) const {
    const std::vector<int64_t>& positions = program_.groups[g].positions;
    std::vector<int64_t> order(positions.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return positions[a] < positions[b]; });
    return order;
  }

  int raised(int buffer, double power) {
    if (power == 1 || count_of(buffer) == 0) return buffer;
    const int raised = new_buffer(count_of(buffer));
    emit(Power{whole(buffer), whole(raised), power});
    return raised;
  }

  void finish(BufferRange result, const Reduction& reduction) {
    divide(result, reduction.divisor);
    if (reduction.power != 1 && result.count > 0) emit(Power{result, result, 1.0 / reduction.power});
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

  // -1 where this rank neither sends nor receives. A trade between the two ranks of a group is one all-to-all, which
  // costs one call instead of two; both see it alike, as what one sends the other receives.
  int send_receive(SendReceive move) {
    if (move.sends.empty() && move.receives.empty()) return -1;
    const Group& group = program_.groups[move.group];
    if (group.ranks.size() != 2 || move.sends.empty() || move.receives.empty()) return emit(std::move(move));
    const BufferRange& sent = move.sends[0].range;
    const BufferRange& received = move.receives[0].range;
    AllToAll trade{move.group, sent, received, {0, 0}, {0, 0}};
    trade.send_counts[move.sends[0].peer] = sent.count;
    trade.receive_counts[move.receives[0].peer] = received.count;
    return emit(std::move(trade));
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
    for (size_t g = 0; g < program_.groups.size(); ++g) {
      if (program_.groups[g].mesh_dims == mesh_dims) return static_cast<int>(g);
    }
    const Mesh& mesh = plan_.src.mesh();
    Group group{mesh_dims, mesh.group(position_, mesh_dims), {}, -1};
    for (size_t m = 0; m < group.positions.size(); ++m) {
      group.ranks.push_back(mesh.rank_at(group.positions[m]));
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
