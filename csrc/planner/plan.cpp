#include "planner/plan.h"

#include "layout/error.h"
#include "planner/cost.h"
#include "planner/exchange.h"
#include "planner/text.h"

namespace shardwright {

const char* step_op_name(StepOp op) {
  switch (op) {
    case StepOp::kSlice:
      return "slice";
    case StepOp::kPartition:
      return "partition";
    case StepOp::kZeroFill:
      return "zero_fill";
    case StepOp::kAllGather:
      return "all_gather";
    case StepOp::kAllToAll:
      return "all_to_all";
    case StepOp::kPermute:
      return "permute";
    case StepOp::kExchange:
      return "exchange";
    case StepOp::kReduceScatter:
      return "reduce_scatter";
    case StepOp::kAllReduce:
      return "all_reduce";
  }
  return "?";
}

const char* sharing_name(Sharing sharing) {
  switch (sharing) {
    case Sharing::kNone:
      return "none";
    case Sharing::kMessages:
      return "messages";
    case Sharing::kBytes:
      return "bytes";
  }
  return "?";
}

namespace {

template <typename Enum>
Enum parse_name(const std::string& argument, const std::string& name, Enum last, const char* (*name_of)(Enum)) {
  std::vector<std::string> known;
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    known.push_back(name_of(static_cast<Enum>(i)));
    if (name == known.back()) return static_cast<Enum>(i);
  }
  throw UserError(concat(argument, ": '", name, "' is not known; allowed are ", join(known)));
}

}  // namespace

StepOp parse_step_op(const std::string& name) { return parse_name("op", name, StepOp::kAllReduce, step_op_name); }

Sharing parse_sharing(const std::string& name) { return parse_name("sharing", name, Sharing::kBytes, sharing_name); }

bool is_local(StepOp op) { return op == StepOp::kSlice || op == StepOp::kPartition || op == StepOp::kZeroFill; }

bool may_go_in_rounds(const Step& step, Backend backend) {
  return !is_local(step.op) && (step.op != StepOp::kAllReduce || !reduces_natively(step, backend));
}

bool is_ordered(const std::string& reduce, const Layout& src) {
  check_user(reduce == "fast" || reduce == "float32" || reduce == "ordered", "reduce: '", reduce,
             "' is not known; allowed are fast, float32, ordered");
  if (reduce != "float32") return reduce == "ordered";
  if (src.dtype().kind() != DTypeKind::kFloat || src.dtype().size_bytes() != 2) return false;
  for (const int d : src.partial_dims().to_vector()) {
    const ReduceOp op = src.placements()[d].op;
    if (op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kNorm) return true;
  }
  return false;
}

Backend parse_backend(const std::string& name) { return parse_name("backend", name, Backend::kGloo, backend_name); }

Objective parse_objective(const std::string& name) {
  return parse_name("objective", name, Objective::kBytes, objective_name);
}

const char* objective_name(Objective objective) { return objective == Objective::kTime ? "time" : "bytes"; }

const char* backend_name(Backend backend) { return backend == Backend::kNccl ? "nccl" : "gloo"; }

std::string Plan::to_string() const {
  std::string text = concat(src.to_string(), " -> ", dst.placements_string(), ", ", backend_name(backend), ", least ",
                            objective_name(objective), " on ", topology.name);
  if (steps.empty()) return text + "\n  nothing to do: every rank holds what it needs";
  for (size_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    text += concat("\n  ", i + 1, ". ", step_op_name(step.op), " over ", src.mesh().names_of(step.mesh_dims), ": ",
                   step.before.placements_string(), " -> ", step.after.placements_string());
    if (step.ordered) text += ", in rank order";
    if (step.sharing != Sharing::kNone) text += ", replicas share the sending";
    if (step.rounds > 1) text += concat(", in ", step.rounds, " rounds");
    if (is_local(step.op)) {
      text += ", local";
      continue;
    }
    const TrafficTotals t = shardwright::totals(step, backend);
    text += concat(", receives at most ", bytes_text(t.received_bytes_max), " in ", t.messages_max, " messages, about ",
                   microseconds_text(predicted_picoseconds(step, backend, topology)));
  }
  return text;
}

}  // namespace shardwright
