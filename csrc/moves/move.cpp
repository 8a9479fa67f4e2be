#include "moves/move.h"

#include <algorithm>

#include "moves/move_table.h"
#include "moves/rank_classes.h"
#include "moves/step_exchange.h"
#include "moves/traffic.h"

namespace shardwright {
namespace {

// Up to this group size, all members are examined to name a move.
constexpr int64_t kMaxGroupNamedExactly = 64;
// In larger groups, this many corners (moves/rank_classes.h) are examined.
constexpr size_t kMaxCornersNamed = 256;

// Returns the op that names a step which moves data, from the messages of position 0's group. The name is for readers
// only; the compiler examines every group itself.
StepOp data_move_op(const Step& step) {
  const MeshDimSet dims = step.mesh_dims;
  const Mesh& mesh = step.before.mesh();
  const bool gathers = (dims & step.before.cut_dims()) == dims && (dims & step.after.cut_dims()).empty();
  if (gathers && (step.after.cut_dims() - step.before.cut_dims()).empty()) return StepOp::kAllGather;
  const int64_t k = mesh.group_size(dims);
  const int64_t item = step.after.dtype().size_bytes();
  const std::vector<int64_t> members =
      k <= kMaxGroupNamedExactly ? mesh.group(0, dims) : corner_positions(mesh, dims, kMaxCornersNamed);
  bool trades_equally = true;  // every member receives equal shares of its new part from all other members
  bool has_one_peer = true;    // every member receives its full new part from one other member, or nothing
  const MeshExchange exchange = mesh_exchange_of(step);
  for (const int64_t member : members) {
    const Traffic traffic = exchange.traffic_at(member);
    const int64_t part_bytes = num_elements(step.after.region(member)) * item;
    trades_equally = trades_equally && traffic.messages == k - 1 &&
                     traffic.received_bytes * k == part_bytes * (k - 1) && traffic.sent_bytes == traffic.received_bytes;
    has_one_peer = has_one_peer && traffic.messages <= 1 && traffic.sent_bytes == traffic.received_bytes &&
                   (traffic.received_bytes == part_bytes || traffic.received_bytes == 0);
  }
  if (trades_equally && !exchange.is_regular() && k <= kMaxGroupNamedExactly) {
    for (const int64_t member : members) {
      for (const int64_t other : members) {
        trades_equally = trades_equally && (member == other || exchange.elements_between(other, member) ==
                                                                   exchange.elements_between(members[0], members[1]));
      }
    }
  }
  if (trades_equally) return StepOp::kAllToAll;
  return has_one_peer ? StepOp::kPermute : StepOp::kExchange;
}

}  // namespace

std::optional<Step> move_between(const Layout& before, const Layout& after, const std::vector<MeshDimSet>& allowed) {
  MoveTable table(before, Lowering::kNccl);
  const MoveTable::State a = table.state(before.cuts(), before.partial_dims());
  const MoveTable::State b = table.state(after.cuts(), after.partial_dims());
  const std::optional<MoveTable::Move> move = table.move(a, b, allowed);
  if (!move) return std::nullopt;
  return Step{move->op, move->mesh_dims, before, after};
}

Step with_policy_if_cheaper(Step step, ReplicaPolicy policy, const std::vector<MeshDimSet>& allowed) {
  if (step.op != StepOp::kExchange) return step;
  const Mesh& mesh = step.before.mesh();
  Step shared = step;
  shared.policy = policy;
  shared.mesh_dims = step.mesh_dims | (step.before.replicated_dims() & step.after.cut_dims());
  if (shared.mesh_dims == step.mesh_dims || mesh.group_size(shared.mesh_dims) > MeshExchange::kMaxSharingGroup)
    return step;
  if (!allowed.empty() && std::find(allowed.begin(), allowed.end(), shared.mesh_dims) == allowed.end()) return step;
  const MeshExchange before = mesh_exchange_of(step);
  const MeshExchange after = mesh_exchange_of(shared);
  int64_t max_sent_before = 0;
  int64_t max_sent_after = 0;
  // The mesh dims along which ranks are examined: all, or those of position 0's group on a large mesh.
  const MeshDimSet examined_dims =
      mesh.size() <= MeshExchange::kMaxSharingGroup ? MeshDimSet::from_bits(~0u) : shared.mesh_dims;
  for (const int64_t position : mesh.group(0, examined_dims)) {
    max_sent_before = std::max(max_sent_before, before.traffic_at(position).sent_bytes);
    max_sent_after = std::max(max_sent_after, after.traffic_at(position).sent_bytes);
  }
  return max_sent_after < max_sent_before ? shared : step;
}

Step named_by_collective(Step step) {
  if (step.op == StepOp::kExchange && step.policy == ReplicaPolicy::kAligned) step.op = data_move_op(step);
  return step;
}

}  // namespace shardwright
