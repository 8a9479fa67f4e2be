// A plan: the moves that take a tensor from one layout to another, and what they cost.
//
// A plan is a function of the two global layouts and the options alone, so every rank computes the same one without
// communicating.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "layout/layout.h"
#include "layout/topology.h"

namespace shardwright {

enum class StepOp : uint8_t {
  kSlice,          // local: keep a part of what is held
  kPartition,      // local: R -> P, so that reducing gives the value back
  kZeroFill,       // local: S -> P(sum), own part amid zeros
  kAllGather,      // every rank of the group gets what all of it hold
  kAllToAll,       // every rank sends every other an equal part
  kPermute,        // every rank sends all to one other
  kExchange,       // every rank sends each peer what that peer needs
  kReduceScatter,  // reduce, each rank keeping a part
  kAllReduce,      // reduce, each rank keeping all
};

const char* step_op_name(StepOp op);
StepOp parse_step_op(const std::string& name);  // throws UserError
bool is_local(StepOp op);

// How the moves are lowered. kNccl uses the native reduce-scatter, all-reduce and all-gather where they fit. Gloo's own
// stage through extra copies, so kGloo composes them from messages and sums in the order of positions.
enum class Backend : uint8_t { kNccl, kGloo };

Backend parse_backend(const std::string& name);  // "nccl" or "gloo"; throws UserError
const char* backend_name(Backend backend);

// Of an exchange: how ranks of a group that hold the same share what is sent of it. kNone: each receiver reads from the
// one with its own coordinates. kMessages: each sends an equal number of whole messages. kBytes: each sends as much, to
// the element, which splits some messages.
enum class Sharing : uint8_t { kNone, kMessages, kBytes };

constexpr int64_t kMaxRounds = int64_t{1} << 20;

const char* sharing_name(Sharing sharing);       // "none", "messages" or "bytes"
Sharing parse_sharing(const std::string& name);  // throws UserError

// One move: `before` to `after`, within groups of ranks that differ only in `mesh_dims`.
struct Step {
  StepOp op;
  MeshDimSet mesh_dims;
  Layout before;
  Layout after;
  Sharing sharing = Sharing::kNone;
  // Of an exchange or reduction: it is carried out in so many goes, each with its share of every message, so that
  // staging is as many times smaller. Each counts as a step.
  int64_t rounds = 1;
  // Of a reduction: contributions are exchanged and summed here in the order of positions, never by a native
  // collective.
  bool ordered = false;
};

// What a plan is chosen for. kTime: predicted time, then fewest steps and messages. kBytes: bytes received by the worst
// rank, then steps, then messages; they differ, because small messages cost more than their bytes.
enum class Objective : uint8_t { kTime, kBytes };

Objective parse_objective(const std::string& name);  // "time" or "bytes"; throws UserError
const char* objective_name(Objective objective);

// Not what is local, nor an all-reduce that the backend does in place.
bool may_go_in_rounds(const Step& step, Backend backend);

// Whether "fast" (no), "float32" (where `src` has pending sums, averages or norms of a 16-bit type) or "ordered" (yes)
// asks for ordered reductions. Throws UserError on other names.
bool is_ordered(const std::string& reduce, const Layout& src);

struct PlanOptions {
  Backend backend = Backend::kNccl;
  Objective objective = Objective::kTime;
  // One reduction over all that is due, exchanged and summed here in rank order, 16-bit types in float32: results do
  // not depend on plan, topology and algorithm, and are rounded once.
  bool ordered = false;
  // Default: the mesh's own, else "64x8" for kNccl and "gloo-local" for kGloo.
  std::optional<Topology> topology = std::nullopt;
  // The sets of mesh dims that moves may span; empty: any.
  std::vector<MeshDimSet> groups = {};
  // Elements that a rank may hold in between; 0: any number.
  int64_t max_held = 0;

  bool operator==(const PlanOptions& other) const = default;
};

struct Plan {
  Layout src;
  Layout dst;
  Backend backend = Backend::kNccl;
  Objective objective = Objective::kTime;
  Topology topology;
  // Moves keep to process groups over sets of mesh dims that were named; else smaller ones may be made for sparse
  // moves.
  bool named_groups_only = false;
  std::vector<Step> steps;

  // One line per move.
  std::string to_string() const;
};

// Finds the cheapest moves. Throws UserError where the layouts differ in mesh, shape or dtype, where PyTorch's
// semantics define no such redistribution (P(sum) to P(max), S to P(max), R to P(product)), and where the groups that
// are allowed do not suffice.
Plan make_plan(const Layout& src, const Layout& dst, const PlanOptions& options = {});

// The plan that takes these layouts one after the other, one move each: to cost somebody else's plan, or to force one.
// `layouts` begins with the source and ends with the destination. Throws UserError where two neighbours are not one
// move apart; where they hold the same parts there is no step.
Plan plan_through(const std::vector<Layout>& layouts, const PlanOptions& options = {});

// Wire traffic, exact, in bytes and messages; received and sent by the rank at one position.
struct Traffic {
  int64_t received_bytes = 0;
  int64_t sent_bytes = 0;
  int64_t messages = 0;  // received
};

Traffic traffic_at(const Step& step, Backend backend, int64_t position);

struct TrafficTotals {
  int64_t received_bytes_max = 0;
  int64_t received_bytes_sum = 0;
  int64_t sent_bytes_max = 0;
  int64_t messages_max = 0;
  int64_t steps = 0;  // those that communicate, rounds counted
  bool sum_is_exact = true;
};

// Of one step, and of the whole plan (maxima are of ranks' sums over steps). Ranks are told apart by the coordinates
// that their figures depend on; where these have up to kMaxRanksWalked combinations, all are looked at. For more,
// maxima are taken over the corners of the mesh, and the sum is worked out without a walk, or else is an upper bound:
// then sum_is_exact is false.
constexpr int64_t kMaxRanksWalked = 4096;
std::vector<int64_t> seen_positions(const Mesh& mesh);
// The positions in position 0's group over `mesh_dims` whose coordinates are first or last: of the first mesh dims,
// where all would be more than `at_most`.
std::vector<int64_t> corner_positions(const Mesh& mesh, MeshDimSet mesh_dims, size_t at_most);
std::vector<int64_t> corner_positions(const Mesh& mesh);
TrafficTotals totals(const Step& step, Backend backend);
TrafficTotals totals(const Plan& plan);

// What no plan can go below. Without P a rank must receive what it needs and does not hold. With P, over all ranks,
// each element takes at least (contributions - 1) + (destination holders - 1) transfers, and bytes_max is the
// mean of that.
struct Bound {
  int64_t bytes_max = 0;
  int64_t bytes_sum = 0;
};

Bound lower_bound(const Layout& src, const Layout& dst);

// Picoseconds that no plan for the same layouts is predicted to go below, by this plan's topology.
int64_t least_picoseconds(const Plan& plan);

}  // namespace shardwright
