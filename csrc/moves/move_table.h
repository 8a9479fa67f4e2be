// Moves between layouts and their costs, for a search that needs thousands of them.
//
// A state of the search is a list of cuts for each tensor dim and the set of mesh dims with pending reductions. Every
// mesh dim cuts at most one tensor dim, so the existence and the bytes of a move factorize over tensor dims. Lists of
// cuts are therefore numbered, and the facts about each pair of lists are computed once.
//
//   list          a list of cuts of one tensor dim, or its number (moves/cut_lists.h)
//   pair          the list of one tensor dim before a move and the list after it (moves/list_pairs.h)
//   closed form   the facts about a pair follow from digits, without comparing parts
//   corner        a rank that is examined if some pair has no closed form (moves/corner_traffic.h)
//
// docs/architecture/search.md computes the closed form of a pair and a Distance step by step.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "moves/collectives.h"
#include "moves/corner_traffic.h"
#include "moves/cut_lists.h"
#include "moves/list_pairs.h"

namespace shardwright {

using Cuts = std::vector<std::vector<Cut>>;  // the list of cuts of each tensor dim

class MoveTable {
 public:
  // All states have the mesh, shape and dtype of `layout`. The op of a pending reduction is the op of `layout` on the
  // same mesh dim. With `ordered`, reductions add in the order of positions; otherwise native collectives are used if
  // there are any. Ranks whose coordinates differ on a mesh dim of `between_nodes` count as ranks of different nodes.
  MoveTable(const Layout& layout, Lowering lowering, bool ordered = false, MeshDimSet between_nodes = {});

  struct State {
    std::vector<int> lists;   // the number of the list of each tensor dim
    MeshDimSet cut_dims;      // the mesh dims that cut in these lists
    MeshDimSet partial_dims;  // the mesh dims with a pending reduction
    int64_t elements = 0;     // number of elements of the largest part
    bool operator==(const State& other) const { return lists == other.lists && partial_dims == other.partial_dims; }
  };

  CutLists& lists() { return lists_; }
  // Returns the state with these cuts. New lists are numbered.
  State state(const Cuts& cuts, MeshDimSet partial_dims);
  // Returns the cuts of a state, in canonical form (moves/spans.h).
  Cuts cuts(const State& state) const;

  struct Move {
    StepOp op = StepOp::kSlice;
    MeshDimSet mesh_dims;
    ReplicaPolicy policy = ReplicaPolicy::kAligned;  // kEvenBytes does not occur: the table has no costs for it
  };

  // Returns true if the counts of a move would take so long to compute that the search should skip it.
  bool takes_long(const State& before, const State& after);

  // Returns the move between two states, as move_between() in moves/move.h does for layouts.
  std::optional<Move> move(const State& before, const State& after, const std::vector<MeshDimSet>& allowed);
  // Returns `exchange` with replicas that share the sending (ReplicaPolicy::kWholeMessages), if digits show that its
  // worst rank then sends less. The replicas join its group. Returns nullopt otherwise, for other moves, if the group
  // would have more than MeshExchange::kMaxSharingGroup ranks, or if its mesh dims are not in `allowed` (empty: any).
  std::optional<Move> sending_whole_messages(const State& before, const State& after, const Move& exchange,
                                             const std::vector<MeshDimSet>& allowed);
  // Returns false if a quick test shows that move() does not return a slice. The tensor must have elements.
  bool may_be_slice(const State& before, const State& after) const;
  // Returns the counts of the worst rank in a move.
  StepCounts step_counts(const State& before, const State& after, const Move& move);
  // Returns lower bounds of an exchange's counts: the counts of the rank at the first coordinates. Returns nullopt for
  // other moves, and if the exact counts are as quick to compute.
  std::optional<StepCounts> counts_lower_bound(const State& before, const State& after, const Move& move);

  // Lower bounds for every sequence of moves from one state to another, pending reductions included.
  //
  // Example: 8 rows on a=2, b=4 go from [S(0), R] to [R, S(0)]. Rank (1, 0) has rows 4 to 7 and needs rows 0 and 1, so
  // missing_max is 2. Rank (0, 0) has both rows that it needs, so missing_min is 0. `sources` is 2: a rank that lacks
  // its rows needs those of another rank.
  struct Distance {
    int64_t missing_max = 0;         // elements that some rank must receive
    int64_t missing_min = 0;         // elements that every rank must receive
    int64_t sources = 1;             // number of ranks, including itself, whose data some rank needs
    bool needs_other_nodes = false;  // some of these sources are on other nodes
    int64_t from_other_nodes = 0;    // elements that some rank must receive from other nodes
  };
  // Returns the distance from one state to another. If some pair of lists has no closed form, only `missing_max` and
  // `sources` are computed; the other bounds keep their defaults.
  Distance distance(const State& before, const State& after);

 private:
  // Returns the product of the closed forms of all tensor dims; nullopt if some tensor dim has none.
  std::optional<ClosedForm> closed_form(const State& before, const State& after);
  // Returns the counts of the worst rank in an exchange: by formula if all pairs have a closed form, else over the
  // corners.
  StepCounts exchange_counts(const State& before, const State& after, const Move& move);
  // Returns the traffic of the rank at a corner in an exchange with the peers along `varying`.
  Traffic exchange_traffic(const State& before, const State& after, MeshDimSet varying, Corner corner);
  // Returns true if all parts of all tensor dims have equal size.
  bool has_equal_parts(const State& state) const;
  // Returns true if a reduce-scatter over `reduced` leads from one state to the other: these mesh dims become cuts, and
  // nothing else changes.
  bool is_reduce_scatter(const State& before, const State& after, MeshDimSet reduced);

  Layout layout_;
  Lowering lowering_;
  bool ordered_;
  MeshDimSet between_nodes_;
  int64_t node_size_;   // number of ranks on a node: those with equal coordinates on between_nodes_
  int64_t item_bytes_;  // size of an element
  CutLists lists_{layout_};
  ListPairs pairs_{layout_, lists_, between_nodes_};
  CornerTraffic corner_traffic_{layout_, lists_};
};

}  // namespace shardwright
