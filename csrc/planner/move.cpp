#include "planner/move.h"

#include <algorithm>
#include <array>

#include "planner/exchange.h"
#include "planner/move_table.h"

namespace shardwright {
namespace {

using CutList = std::vector<Cut>;

// Up to this many combinations of coordinates are compared to see whether uneven regions agree.
constexpr int64_t kMaxRegionsCompared = 4096;
// Up to this size a group's members are looked at one by one to name a move.
constexpr int64_t kMaxGroupNamedExactly = 64;
// Of larger groups, up to so many corners.
constexpr size_t kMaxCornersNamed = 256;

MeshDimSet dims_of(const CutList& cuts) {
  MeshDimSet dims;
  for (const Cut& c : cuts) dims.insert(c.mesh_dim);
  return dims;
}

// The cuts as they read once `gathered` are gathered. A cut can be taken behind a later one whose split factor its own
// divides, which then splits into as many times more pieces; the last cut can be left out. Nothing where that fails.
std::optional<CutList> without(const Mesh& mesh, CutList cuts, MeshDimSet gathered) {
  for (size_t i = cuts.size(); i-- > 0;) {
    if (!gathered.contains(cuts[i].mesh_dim)) continue;
    for (size_t later = i + 1; later < cuts.size(); ++later) {
      if (cuts[later].split_factor % cuts[i].split_factor != 0) return std::nullopt;
      cuts[later].split_factor *= mesh.dim_size(cuts[i].mesh_dim);
    }
    cuts.erase(cuts.begin() + static_cast<int64_t>(i));
  }
  return cuts;
}

IntervalList united(const Mesh& mesh, int64_t n, const CutList& cuts, MeshDimSet gathered, int64_t position) {
  std::vector<IntervalList> parts{{}};
  if (n > 0) parts[0].push_back({0, n});
  for (const Cut& c : cuts) {
    std::vector<IntervalList> finer;
    for (const IntervalList& part : parts) {
      const int64_t k = mesh.dim_size(c.mesh_dim);
      const bool all = gathered.contains(c.mesh_dim);
      const int64_t own = mesh.coordinate(position, c.mesh_dim);
      for (int64_t i = all ? 0 : own; i < (all ? k : own + 1); ++i) finer.push_back(cut(part, k, i, c.split_factor));
    }
    parts = std::move(finer);
  }
  IntervalList sorted;
  for (const IntervalList& part : parts) sorted.insert(sorted.end(), part.begin(), part.end());
  std::sort(sorted.begin(), sorted.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  IntervalList merged;
  for (const Interval& interval : sorted) {
    if (!merged.empty() && merged.back().end == interval.begin) {
      merged.back().end = interval.end;
    } else {
      merged.push_back(interval);
    }
  }
  return merged;
}

bool agree_when_gathered(const Mesh& mesh, int64_t n, const CutList& before, const CutList& after, MeshDimSet kept) {
  const MeshDimSet gathered_before = dims_of(before) - kept;
  const MeshDimSet gathered_after = dims_of(after) - kept;
  const std::optional<CutList> left_before = without(mesh, before, gathered_before);
  const std::optional<CutList> left_after = without(mesh, after, gathered_after);
  if (!left_before || !left_after) return false;
  // With parts of one size `without` and `canonical` say exactly what is held.
  if (cuts_evenly(mesh, n, before) && cuts_evenly(mesh, n, after)) {
    return canonical(mesh, n, *left_before) == canonical(mesh, n, *left_after);
  }
  if (*left_before != *left_after) return false;
  if (mesh.group_size(dims_of(before) | dims_of(after)) > kMaxRegionsCompared) return false;
  for (const int64_t position : mesh.group(0, kept & (dims_of(before) | dims_of(after)))) {
    if (united(mesh, n, before, gathered_before, position) != united(mesh, n, after, gathered_after, position))
      return false;
  }
  return true;
}

// The mesh dims behind the common beginning of the two lists that must not be spanned: they cut alike before and
// after, whatever is gathered or cut around them.
MeshDimSet carried_along(const Mesh& mesh, int64_t n, const CutList& before, const CutList& after, size_t common) {
  const CutList tail_before(before.begin() + static_cast<int64_t>(common), before.end());
  const CutList tail_after(after.begin() + static_cast<int64_t>(common), after.end());
  const MeshDimSet both = dims_of(tail_before) & dims_of(tail_after);
  if (both.empty()) return {};
  MeshDimSet prefix;
  for (size_t i = 0; i < common; ++i) prefix.insert(before[i].mesh_dim);
  return agree_when_gathered(mesh, n, before, after, both | prefix) ? both : MeshDimSet();
}

// Names the collective by what the ranks of position 0's group do; the compiler decides by what each group does, so a
// wrong name could cost clarity, never data.
StepOp data_move_op(const Step& step) {
  const MeshDimSet dims = step.mesh_dims;
  const Mesh& mesh = step.before.mesh();
  const bool gathers = (dims & step.before.cut_dims()) == dims && (dims & step.after.cut_dims()).empty();
  if (gathers && (step.after.cut_dims() - step.before.cut_dims()).empty()) return StepOp::kAllGather;
  const int64_t k = mesh.group_size(dims);
  const int64_t item = step.after.dtype().size_bytes();
  const std::vector<int64_t> members =
      k <= kMaxGroupNamedExactly ? mesh.group(0, dims) : corner_positions(mesh, dims, kMaxCornersNamed);
  bool trades_equally = true;
  bool has_one_peer = true;
  const ExchangeTraffic exchange(step);
  for (const int64_t member : members) {
    const Traffic traffic = exchange.at(member);
    const int64_t whole = num_elements(step.after.region(member)) * item;
    trades_equally = trades_equally && traffic.messages == k - 1 && traffic.received_bytes * k == whole * (k - 1) &&
                     traffic.sent_bytes == traffic.received_bytes;
    has_one_peer = has_one_peer && traffic.messages <= 1 && traffic.sent_bytes == traffic.received_bytes &&
                   (traffic.received_bytes == whole || traffic.received_bytes == 0);
  }
  if (trades_equally && !exchange.has_equal_shares() && k <= kMaxGroupNamedExactly) {
    for (const int64_t member : members) {
      for (const int64_t other : members) {
        trades_equally = trades_equally && (member == other || transfer_elements(step, other, member) ==
                                                                   transfer_elements(step, members[0], members[1]));
      }
    }
  }
  if (trades_equally) return StepOp::kAllToAll;
  return has_one_peer ? StepOp::kPermute : StepOp::kExchange;
}

}  // namespace

std::vector<Cut> canonical(const Mesh& mesh, int64_t n, std::vector<Cut> cuts) {
  if (!cuts_evenly(mesh, n, cuts)) return cuts;
  bool changed = true;
  while (changed) {
    changed = false;
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      const int64_t later = cuts[i + 1].split_factor * mesh.dim_size(cuts[i + 1].mesh_dim);
      if (cuts[i].split_factor % later != 0) continue;
      cuts[i].split_factor /= mesh.dim_size(cuts[i + 1].mesh_dim);
      std::swap(cuts[i], cuts[i + 1]);
      changed = true;
    }
  }
  return cuts;
}

bool same_parts(const Layout& a, const Layout& b) {
  for (int t = 0; t < a.ndim(); ++t) {
    if (a.cuts(t) == b.cuts(t)) continue;
    if (canonical(a.mesh(), a.shape()[t], a.cuts(t)) != canonical(b.mesh(), b.shape()[t], b.cuts(t))) return false;
  }
  return true;
}

bool holds_the_same(const Mesh& mesh, int64_t n, const CutList& before, const CutList& after, MeshDimSet kept) {
  return agree_when_gathered(mesh, n, canonical(mesh, n, before), canonical(mesh, n, after), kept);
}

MeshDimSet spanned_dims(const Mesh& mesh, int64_t n, const CutList& before, const CutList& after) {
  const auto common = static_cast<size_t>(
      std::mismatch(before.begin(), before.end(), after.begin(), after.end()).first - before.begin());
  MeshDimSet dims;
  for (size_t i = common; i < before.size(); ++i) dims.insert(before[i].mesh_dim);
  for (size_t i = common; i < after.size(); ++i) dims.insert(after[i].mesh_dim);
  return dims - carried_along(mesh, n, before, after, common);
}

std::optional<Step> move_between(const Layout& before, const Layout& after, const std::vector<MeshDimSet>& allowed) {
  MoveTable table(before, Backend::kNccl);
  const MoveTable::State a = table.state(before.cuts(), before.partial_dims());
  const MoveTable::State b = table.state(after.cuts(), after.partial_dims());
  const std::optional<MoveTable::Move> move = table.move(a, b, allowed);
  if (!move) return std::nullopt;
  return Step{move->op, move->mesh_dims, before, after};
}

Step shared_if_it_helps(Step step, Sharing sharing, const std::vector<MeshDimSet>& allowed) {
  if (step.op != StepOp::kExchange) return step;
  const Mesh& mesh = step.before.mesh();
  Step shared = step;
  shared.sharing = sharing;
  shared.mesh_dims = step.mesh_dims | (step.before.replicated_dims() & step.after.cut_dims());
  if (shared.mesh_dims == step.mesh_dims || mesh.group_size(shared.mesh_dims) > kMaxSharingGroup) return step;
  if (!allowed.empty() && std::find(allowed.begin(), allowed.end(), shared.mesh_dims) == allowed.end()) return step;
  const ExchangeTraffic before(step);
  const ExchangeTraffic after(shared);
  int64_t worst_before = 0;
  int64_t worst_after = 0;
  const bool sees_all = mesh.size() <= kMaxSharingGroup;
  for (const int64_t position : sees_all ? seen_positions(mesh) : mesh.group(0, shared.mesh_dims)) {
    worst_before = std::max(worst_before, before.at(position).sent_bytes);
    worst_after = std::max(worst_after, after.at(position).sent_bytes);
  }
  return worst_after < worst_before ? shared : step;
}

Step named_by_collective(Step step) {
  if (step.op == StepOp::kExchange && step.sharing == Sharing::kNone) step.op = data_move_op(step);
  return step;
}

}  // namespace shardwright
