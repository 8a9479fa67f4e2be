// Compiles pending reductions, either to the transport's own collectives or to exchanges followed by local sums.
#include <algorithm>
#include <memory>
#include <numeric>

#include "layout/selection.h"
#include "moves/collectives.h"
#include "program/builder.h"
#include "program/transfers.h"

namespace shardwright {

ReductionSpec reduction_of(const Step& step) {
  ReductionSpec reduction;
  reduction.mesh = &step.before.mesh();
  for (const int d : step.mesh_dims.to_vector()) {
    const Placement& placement = step.before.placements()[d];
    reduction.op = placement.op;
    if (placement.op == ReduceOp::kAvg) reduction.divisor *= static_cast<double>(step.before.mesh().dim_size(d));
    if (placement.op == ReduceOp::kNorm) reduction.power = placement.norm_power;
  }
  if (reduction.op == ReduceOp::kAvg || reduction.op == ReduceOp::kNorm) reduction.op = ReduceOp::kSum;
  return reduction;
}

std::vector<BufferRange> by_position(const Mesh& mesh, const std::vector<Rank>& group,
                                     const std::vector<BufferRange>& by_index) {
  std::vector<size_t> order(group.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return mesh.position_of(group[a]) < mesh.position_of(group[b]); });
  std::vector<BufferRange> ranges;
  for (const size_t m : order) ranges.push_back(by_index[m]);
  return ranges;
}

std::vector<BufferRange> contributions_in(const ProgramBuilder& builder, const ReductionSpec& reduction,
                                          BufferId staging, int64_t count, int group) {
  const std::vector<Rank>& members = builder.program().groups[group].ranks;
  std::vector<BufferRange> ranges;
  for (size_t m = 0; m < members.size(); ++m) ranges.push_back({staging, static_cast<int64_t>(m) * count, count});
  return by_position(*reduction.mesh, members, ranges);
}

namespace {

// Takes the root of a norm in place.
void take_root(ProgramBuilder& builder, BufferRange result, double power) {
  if (power != 1 && result.count > 0) builder.emit(Power{result, result, 1.0 / power});
}

}  // namespace

void reduce_parts(ProgramBuilder& builder, const ReductionSpec& reduction, std::vector<BufferRange> parts,
                  BufferRange result) {
  const bool has_fractions = builder.program().dtype.has_fractions();
  builder.emit(Reduce{reduction.op, std::move(parts), result, has_fractions ? reduction.divisor : 1});
  if (!has_fractions) builder.divide(result, reduction.divisor);
  take_root(builder, result, reduction.power);
}

void finish_native(ProgramBuilder& builder, const ReductionSpec& reduction, BufferRange result) {
  builder.divide(result, reduction.divisor);
  take_root(builder, result, reduction.power);
}

namespace {

// Returns the stages of an all-reduce of two ranks: they send each other their contributions, and both add them in the
// same order. This sends as many bytes as all_reduce_in_chunks, in one transfer instead of two.
ReductionStages all_reduce_of_two(ProgramBuilder& b, int g, const ReductionSpec& reduction, BufferRange contribution,
                                  BufferRange result) {
  const int64_t me = b.program().groups[g].index;
  const BufferId staging = b.new_buffer(result.count);
  const auto ticket = std::make_shared<Ticket>(kNoTicket);
  return {[=, &b] {
            TransferSet set{g};
            set.sends.add_placed(1 - me, contribution);
            set.receives.add_placed(1 - me, b.whole(staging));
            *ticket = start(b, set, TransferMethod::kAllToAll);
          },
          [=, &b] {
            b.wait(*ticket);
            std::vector<BufferRange> parts{contribution, b.whole(staging)};
            if (me == 1) std::swap(parts[0], parts[1]);
            reduce_parts(b, reduction, by_position(*reduction.mesh, b.program().groups[g].ranks, parts), result);
          }};
}

// Starts the transfer that sends this rank's reduced chunk to all other ranks and receives their chunks. `chunks` has
// the ranges of all ranks' chunks in the result. An all-to-all sends from a new buffer, which has a copy of the chunk
// for each rank.
Ticket start_chunk_gather(ProgramBuilder& b, int g, const std::vector<BufferRange>& chunks) {
  const int64_t me = b.program().groups[g].index;
  const auto k = static_cast<int64_t>(chunks.size());
  const BufferRange own = chunks[me];
  const TransferMethod transfer_method =
      transfer_method_of_reduced_chunks(chunks[0].count * b.program().dtype.size_bytes());
  TransferSet set{g};
  if (transfer_method == TransferMethod::kAllToAll) {
    const BufferId copies = b.new_buffer(own.count * k);
    if (own.count > 0) b.copy(own.buffer, copies, {Box{own.offset, 0, {k, own.count}, {0, 1}, {own.count, 1}}});
    for (int64_t m = 0; m < k; ++m) set.sends.add_placed(m, {copies, m * own.count, own.count});
    for (int64_t m = 0; m < k; ++m) set.receives.add_placed(m, chunks[m]);
  } else {
    for (int64_t m = 0; m < k; ++m) {
      if (m == me) continue;
      set.sends.add_placed(m, own);
      set.receives.add_placed(m, chunks[m]);
    }
  }
  return start(b, set, transfer_method);
}

// Returns the stages of an all-reduce in which rank m of the group receives chunk m of all contributions, reduces it,
// and sends the result to all ranks. Each element is reduced on one rank only, so replicas are bitwise equal.
ReductionStages all_reduce_in_chunks(ProgramBuilder& b, int g, const ReductionSpec& reduction, BufferRange contribution,
                                     BufferRange result) {
  const auto k = static_cast<int64_t>(b.program().groups[g].ranks.size());
  std::vector<BufferRange> contributed;  // chunks of the contribution
  std::vector<BufferRange> reduced;      // chunks of the result
  for (int64_t m = 0; m < k; ++m) {
    const Interval chunk = flat_chunk(result.count, k, m);
    const int64_t length = chunk.end - chunk.begin;
    contributed.push_back({contribution.buffer, contribution.offset + chunk.begin, length});
    reduced.push_back({result.buffer, result.offset + chunk.begin, length});
  }
  const BufferRange own = reduced[b.program().groups[g].index];
  const BufferId staging = b.new_buffer(own.count * k);
  const auto ticket = std::make_shared<Ticket>(kNoTicket);
  return {[=, &b] {
            TransferSet set{g};
            for (int64_t m = 0; m < k; ++m) {
              set.sends.add_placed(m, contributed[m]);
              set.receives.add_placed(m, {staging, m * own.count, own.count});
            }
            *ticket = start(b, set, TransferMethod::kAllToAll);
          },
          [=, &b] {
            b.wait(*ticket);
            if (own.count > 0) reduce_parts(b, reduction, contributions_in(b, reduction, staging, own.count, g), own);
            *ticket = start_chunk_gather(b, g, reduced);
          },
          [=, &b] { b.wait(*ticket); }};
}

}  // namespace

ReductionStages composed_all_reduce(ProgramBuilder& builder, int group, const ReductionSpec& reduction,
                                    BufferRange contribution, BufferRange result) {
  const bool is_of_two = builder.program().groups[group].ranks.size() == 2;
  return is_of_two ? all_reduce_of_two(builder, group, reduction, contribution, result)
                   : all_reduce_in_chunks(builder, group, reduction, contribution, result);
}

ReductionStages native_all_reduce(ProgramBuilder& builder, int group, const ReductionSpec& reduction,
                                  BufferRange data) {
  const auto ticket = std::make_shared<Ticket>(kNoTicket);
  return {[=, &builder] { *ticket = builder.emit(AllReduce{group, reduction.op, data}); },
          [=, &builder] {
            builder.wait(*ticket);
            finish_native(builder, reduction, data);
          }};
}

namespace {

// Emits the reduction of a step, round by round.
class ReductionCompiler {
 public:
  explicit ReductionCompiler(ProgramBuilder& builder) : b_(builder) {}

  // Emits a reduce-scatter from the buffer `current` to the buffer `next`.
  void emit_reduce_scatter(const Step& step, BufferId current, BufferId next) {
    const ReductionSpec reduction = reduction_of(step);
    const int g = b_.group_index(step);
    if (b_.count_of(current) == 0) return;
    current = emit_power(b_.whole(current), reduction.power).buffer;
    for (int64_t round = 0; round < step.rounds; ++round) emit_round(step, g, current, next, round);
  }

  // Emits one round of a reduce-scatter over group `g`. `current` has this rank's contribution, raised to the power.
  void emit_round(const Step& step, int g, BufferId current, BufferId next, int64_t round) {
    const Region held = b_.region_in(step.before);
    // All members hold the same region, so either all of them have messages or none has.
    Messages contributions(Messages::Side::kSent, current);
    const std::vector<Rank> members = b_.program().groups[g].ranks;
    for (size_t m = 0; m < members.size(); ++m) {
      const Selection part(held, step.after.region(*step.after.mesh().position_of(members[m])));
      const Interval range = in_round({0, part.count()}, round, step.rounds);
      contributions.add(static_cast<int64_t>(m), {{current, part.slice(range.begin, range.end)}});
    }
    if (contributions.total_count() == 0) return;
    contributions.choose_memory(b_, {.is_one_run = true});
    contributions.copy(b_);
    const Interval own_range = in_round({0, b_.count_of(next)}, round, step.rounds);
    const BufferRange result{next, own_range.begin, own_range.end - own_range.begin};
    start_sum(b_, step, g, contributions, contributions.are_equally_long(), result)();
  }

  // Emits an all-reduce from the buffer `current` to the buffer `next`.
  void emit_all_reduce(const Step& step, BufferId current, BufferId next) {
    const ReductionSpec reduction = reduction_of(step);
    if (b_.count_of(next) == 0) return;
    const int g = b_.group_index(step);
    if (reduces_natively(step, b_.lowering())) {
      if (reduction.power != 1) {
        b_.emit(Power{b_.whole(current), b_.whole(next), reduction.power});
      } else {
        b_.copy_shared(step, current, next);
      }
      for (const auto& stage : native_all_reduce(b_, g, reduction, b_.whole(next))) stage();
      return;
    }
    for (int64_t round = 0; round < step.rounds; ++round) {
      const Interval range = in_round({0, b_.count_of(next)}, round, step.rounds);
      const int64_t n = range.end - range.begin;
      if (n == 0) continue;
      const BufferRange contribution = emit_power({current, range.begin, n}, reduction.power);
      for (const auto& stage : composed_all_reduce(b_, g, reduction, contribution, {next, range.begin, n})) stage();
    }
  }

  // Emits the power of a range, in a new buffer, and returns it. With a power of 1, emits nothing and returns the
  // range.
  BufferRange emit_power(BufferRange range, double power) {
    if (power == 1) return range;
    const BufferId powers = b_.new_buffer(range.count);
    b_.emit(Power{range, b_.whole(powers), power});
    return b_.whole(powers);
  }

  ProgramBuilder& b_;
};

}  // namespace

void compile_reduce_scatter(ProgramBuilder& builder, const Step& step, BufferId current, BufferId next) {
  ReductionCompiler(builder).emit_reduce_scatter(step, current, next);
}

void compile_all_reduce(ProgramBuilder& builder, const Step& step, BufferId current, BufferId next) {
  ReductionCompiler(builder).emit_all_reduce(step, current, next);
}

}  // namespace shardwright
