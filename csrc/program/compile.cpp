// Compiles a plan to the program of one rank.
#include <cmath>
#include <optional>

#include "moves/traffic.h"
#include "program/builder.h"
#include "program/in_segments.h"
#include "program/program.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Returns the divisors that turn a value into equal contributions to a pending reduction: one per mesh dim, in mesh
// order. PyTorch divides once per mesh dim, and two divisions round differently than one.
std::vector<double> partition_divisors(const Step& step) {
  std::vector<double> divisors;
  for (const int d : step.mesh_dims.to_vector()) {
    const Placement& placement = step.after.placements()[d];
    const auto size = static_cast<double>(step.before.mesh().dim_size(d));
    divisors.push_back(placement.op == ReduceOp::kNorm ? std::pow(size, 1.0 / placement.norm_power) : size);
  }
  return divisors;
}

// Emits a partition (R -> P). Divides by each divisor separately, as PyTorch does, so that results are rounded in the
// same way. The copy does the first division if the dtype has fractions.
void compile_partition(ProgramBuilder& builder, const Step& step, BufferId current, BufferId next) {
  std::vector<double> divisors = partition_divisors(step);
  std::vector<Box> boxes = Selection(builder.region_in(step.before), builder.region_in(step.after))
                               .boxes(CopySide::local(), CopySide::local());
  const bool has_fractions = builder.program().dtype.has_fractions();
  Copy copy{current, next, std::move(boxes)};
  if (has_fractions && !divisors.empty()) {
    copy.divisor = divisors.front();
    divisors.erase(divisors.begin());
  }
  if (!copy.boxes.empty()) builder.emit(std::move(copy));
  for (const double divisor : divisors) builder.divide(builder.whole(next), divisor);
}

// Returns Program::box_of_input: the first index of the result in the input, by tensor dim, if all steps only slice and
// divide and the result is one box of the input. Otherwise returns nullopt.
std::optional<std::vector<int64_t>> box_of_input(const ProgramBuilder& builder, const Plan& plan) {
  for (const Step& step : plan.steps) {
    if (step.op != StepOp::kSlice && step.op != StepOp::kPartition) return std::nullopt;
  }
  if (plan.src.flattened() != plan.dst.flattened()) return std::nullopt;
  const Region held = builder.region_in(plan.src);
  const Region needed = builder.region_in(plan.dst);
  std::vector<int64_t> starts;
  for (size_t t = 0; t < held.size(); ++t) {
    const SharedRuns shared = shared_runs(held[t], needed[t]);
    // An empty result may have dims that are longer than the dims of the input.
    if (shared.runs > 1 || shared.length != length(needed[t])) return std::nullopt;
    starts.push_back(shared.a_position);
  }
  return starts;
}

}  // namespace

void compile_step(ProgramBuilder& builder, const Step& step, BufferId current, BufferId next) {
  if (!builder.is_on(step.before.mesh()) && !builder.is_on(step.after.mesh())) return;
  builder.begin_exchanges(step);
  switch (step.op) {
    case StepOp::kSlice:
      return builder.copy_shared(step, current, next);
    case StepOp::kPartition:
      return compile_partition(builder, step, current, next);
    case StepOp::kZeroFill:
      if (builder.count_of(next) > 0) builder.emit(FillZero{builder.whole(next)});
      return builder.copy_shared(step, current, next);
    case StepOp::kAllGather:
    case StepOp::kAllToAll:
    case StepOp::kPermute:
    case StepOp::kExchange:
    case StepOp::kCross:
    case StepOp::kRearrange:
      return compile_exchange(builder, step, current, next);
    case StepOp::kReduceScatter:
      return compile_reduce_scatter(builder, step, current, next);
    case StepOp::kAllReduce:
      return compile_all_reduce(builder, step, current, next);
  }
}

std::string step_text(const Plan& plan, size_t index) {
  const Step& step = plan.steps[index];
  return concat("step ", index + 1, " of ", plan.steps.size(), " (", step_name(step), ")");
}

namespace {

// Returns the text that profilers show after step_text(): " [S(0)] -> [R], 96 bytes received".
std::string step_note(const Plan& plan, size_t index, Rank rank) {
  const Step& step = plan.steps[index];
  return concat(" ", step.before.placements_string(), " -> ", step.after.placements_string(), ", ",
                traffic_at(step, plan.lowering, rank).received_bytes, " bytes received");
}

}  // namespace

BufferId compile_steps(ProgramBuilder& builder, const Plan& plan, size_t begin, size_t end, BufferId current,
                       const std::string& prefix) {
  const DType before = builder.begin_dtype(plan.src.dtype());
  for (size_t i = begin; i < end; ++i) {
    builder.begin_step(prefix + step_text(plan, i), step_note(plan, i, builder.rank()));
    const BufferId next = builder.new_buffer(builder.count_in(plan.steps[i].after));
    compile_step(builder, plan.steps[i], current, next);
    current = next;
  }
  builder.begin_dtype(before);
  return current;
}

Program compile(const Plan& plan, Rank rank) {
  if (plan.segments.count > 1) return compile_in_segments(plan, rank);
  ProgramBuilder builder(plan.src.dtype(), plan.lowering, plan.named_groups_only, rank);
  const bool is_on_one = builder.is_on(plan.src.mesh()) || builder.is_on(plan.dst.mesh());
  check_user(is_on_one || crosses(plan), "rank must be on the mesh (", plan.src.mesh(), "), got ", rank);
  check_user(is_on_one, "rank must be on the mesh of the source (", plan.src.mesh(), ") or of the destination (",
             plan.dst.mesh(), "), got ", rank);
  const BufferId input = builder.new_input(plan.src.local_shape_of_rank(rank));
  const BufferId current = compile_steps(builder, plan, 0, plan.steps.size(), input);
  Program& program = builder.program();
  builder.add_output(current, plan.dst.local_shape_of_rank(rank));
  program.box_of_input = box_of_input(builder, plan);
  return std::move(program);
}

}  // namespace shardwright
