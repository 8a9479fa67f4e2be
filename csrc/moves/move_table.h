// Moves between layouts and their costs, for a search that needs thousands of them.
//
// A state of the search is a list of cuts for each tensor dim and a set of pending mesh dims. Every mesh dim cuts at
// most one tensor dim, so the existence and the bytes of a move factorize over tensor dims. Lists of cuts are therefore
// numbered, and the costs of each pair of lists are computed once.
//
//   list      a list of cuts of one tensor dim, or its number
//   pair      the lists of one tensor dim before and after a move
//   closed    a pair whose costs follow from digits (exchange/digits.h), without comparing parts
//   corner    a rank that is examined if a pair is not closed (moves/rank_classes.h)
//   varying   mesh dims on which the peers of a rank have any coordinates; elsewhere they have the rank's coordinates
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory_resource>
#include <optional>
#include <unordered_map>
#include <vector>

#include "cost/cost.h"
#include "exchange/digits.h"
#include "moves/collectives.h"
#include "moves/rank_classes.h"

namespace shardwright {

using Cuts = std::vector<std::vector<Cut>>;

class MoveTable {
 public:
  // States have the mesh, shape and dtype of `layout`, and its reductions on their pending mesh dims. With `ordered`,
  // reductions add in the order of positions; otherwise native collectives are used if there are any. Ranks that differ
  // in a mesh dim in `between` are on different nodes.
  MoveTable(const Layout& layout, Lowering lowering, bool ordered = false, MeshDimSet between = {});

  struct State {
    std::vector<int> lists;  // indexed by tensor dim
    MeshDimSet cut_dims;
    MeshDimSet partial_dims;
    int64_t elements = 0;  // elements of the largest part
    bool operator==(const State& other) const { return lists == other.lists && partial_dims == other.partial_dims; }
  };

  // Returns the index of a list of cuts of a tensor dim. Lists that make the same parts share an index if the parts
  // have equal size.
  int list_index(int tensor_dim, const std::vector<Cut>& cuts);
  // Returns the mesh dims that make the cuts of a list.
  MeshDimSet dims_of(int tensor_dim, int list) const { return lists_[tensor_dim][list].dims; }
  // Returns the number of indices of the largest part.
  int64_t first_length(int tensor_dim, int list) const { return lists_[tensor_dim][list].length; }

  bool has_equal_parts(int tensor_dim, int list) const { return lists_[tensor_dim][list].has_equal_parts; }
  bool has_digits(int tensor_dim, int list) const { return lists_[tensor_dim][list].digits.has_value(); }

  State state(const Cuts& cuts, MeshDimSet partial_dims);
  Cuts cuts(const State& state) const;  // in canonical form (moves/spans.h)

  struct Move {
    StepOp op = StepOp::kSlice;
    MeshDimSet mesh_dims;
    ReplicaPolicy policy = ReplicaPolicy::kAligned;  // kEvenBytes does not occur: the table has no costs for it
  };

  // Returns true if the costs of a move would take so long to compute that the search should skip it.
  bool takes_long(const State& before, const State& after);

  // See move_between in move.h.
  std::optional<Move> move(const State& before, const State& after, const std::vector<MeshDimSet>& allowed);
  // Returns the exchange with its sending shared among replicas, in whole messages, if that reduces what the worst rank
  // sends and the reduction follows from digits. Otherwise returns nullopt.
  std::optional<Move> sending_whole_messages(const State& before, const State& after, const Move& exchange,
                                             const std::vector<MeshDimSet>& allowed);
  // A quick test: if it returns false, `move` does not return a slice.
  bool may_be_slice(const State& before, const State& after) const;
  // Returns the counts of the worst rank in a move.
  StepCounts step_counts(const State& before, const State& after, const Move& move);
  // Returns lower bounds of an exchange's costs: the costs of the rank at the first coordinates. Returns nullopt if the
  // exact costs are as quick to compute.
  std::optional<StepCounts> least_counts(const State& before, const State& after, const Move& move);

  // Lower bounds for every sequence of moves from one state to another, including pending reductions.
  struct Distance {
    int64_t missing = 0;        // elements that some rank must receive
    int64_t missing_least = 0;  // elements that every rank must receive
    int64_t sources = 1;        // number of ranks, including itself, whose data some rank needs
    bool beyond_node = false;   // some of these sources are on other nodes
    int64_t from_nodes = 0;     // elements that some rank must receive from other nodes
  };
  Distance distance(const State& before, const State& after);

 private:
  // Tensor dim, list before, list after, bits of the varying mesh dims, `last` and `base` of the corner.
  using Key = std::array<uint32_t, 6>;
  struct KeyHash {
    size_t operator()(const Key& key) const;
  };

  // The factors of one tensor dim in the costs of the rank at one position, for given varying mesh dims.
  struct Shares {
    int64_t own = 0;        // indices that the rank holds before and needs after
    int64_t sources = 0;    // parts before the move, its own and its peers', that have indices that the rank needs
    int64_t sent = 0;       // indices that the rank holds and the peers need, summed over their parts after the move
    int64_t receivers = 0;  // parts after the move, its own and its peers', that have indices that the rank holds
  };

  // Facts about a pair of lists. All but cuts_further, takes_long and spanned are valid only if has_closed_form.
  struct Pair {
    std::optional<bool> cuts_further;    // cached cuts_further(); without digits, only reductions compute it
    bool takes_long = false;             // there are many pieces to compare, and no digits
    bool has_closed_form = false;        // closed formulas from digits give the following fields
    bool differs = false;                // some rank's coordinates fix the same digit to different values
    bool differs_between_nodes = false;  // as `differs`, with both coordinates on mesh dims in between_
    MeshDimSet spanned;                  // the mesh dims that a move must span because of this tensor dim
    int64_t shared = 1;                  // elements in both parts of a rank, if the digits are fixed to the same values
    int64_t sources = 1;                 // number of parts before that intersect one part after
    int64_t shared_by_node = 1;          // `shared` for the ranks of a node together
    int64_t needed_by_node = 1;          // elements needed by a node's ranks together, as a multiple of one rank's
    // Digits that both lists fix, by different mesh dims. mesh_dim is the mesh dim that fixes the digit after the move.
    static constexpr int kMaxTies = 6;
    struct Tie {
      int mesh_dim;
      int64_t radix;
    };
    int num_ties = 0;
    std::array<Tie, kMaxTies> ties;
  };

  struct List {
    std::vector<Cut> cuts;
    MeshDimSet dims;     // the mesh dims that make the cuts
    int64_t length = 0;  // elements of the largest part
    bool has_equal_parts = false;
    std::optional<std::vector<Digit>> digits;  // only if parts are equal, and not always then
    bool first_is_largest = true;              // the rank at first coordinates has the largest part
  };

  // Returns the number of pieces, over all ranks, to compare for strided parts; 1 if no cut is strided.
  int64_t pieces(int64_t n, const List& list) const;
  const Pair& pair(int tensor_dim, int before, int after);  // computed on first use
  // Returns true if the ranks that hold a part before together hold exactly this part after.
  bool cuts_further(int tensor_dim, int before, int after);
  Pair make_pair(int tensor_dim, const List& before, const List& after) const;
  // Sets the fields that follow from digits, and has_closed_form unless there are more than kMaxTies ties.
  void set_closed_form(Pair& pair, const Matching& matching) const;
  // Returns the counts of the worst rank in an exchange: by formula if all pairs have a closed form, else over the
  // corners.
  StepCounts exchange_counts(const State& before, const State& after, const Move& move);
  // Returns the traffic of the rank at a corner in an exchange.
  Traffic exchange_traffic(const State& before, const State& after, MeshDimSet varying, Corner corner);
  bool has_equal_parts(const State& state) const;
  // Return the indices of a tensor dim, and the elements of the tensor, that the rank at a corner holds.
  int64_t length_at(int tensor_dim, int list, Corner corner);
  int64_t elements_at(const State& state, Corner corner);
  // Computed on first use: by digits if both lists have matching ones, else by comparing the parts.
  const Shares& shares(int tensor_dim, int before, int after, MeshDimSet varying, Corner corner);
  Shares shares_by_digits(const Matching& matching, MeshDimSet varying, int64_t position) const;
  Shares shares_by_walking(int64_t n, const std::vector<Cut>& before, const std::vector<Cut>& after, MeshDimSet varying,
                           int64_t position) const;
  // Returns true if a reduce-scatter over `reduced` leads from one state to the other: these mesh dims become cuts, and
  // nothing else changes.
  bool scatters(const State& before, const State& after, MeshDimSet reduced);
  static Key key(int tensor_dim, int before, int after, uint32_t varying, Corner corner);

  Layout layout_;
  Lowering lowering_;
  bool ordered_;
  MeshDimSet between_;
  int64_t node_size_;                     // number of ranks with the same coordinates on between_
  int64_t item_;                          // bytes of an element
  Corners corners_;                       // for the lists without digits
  std::vector<std::vector<List>> lists_;  // by tensor dim, then by number
  std::vector<std::map<std::vector<int64_t>, int>> list_indices_;  // numbers of lists without digits, by tensor dim
  std::vector<std::vector<std::vector<int>>> pair_numbers_;  // by tensor dim, before and after list; -1: not computed
  std::vector<Pair> pairs_;
  std::pmr::monotonic_buffer_resource memory_;  // memory of shares_ and lengths_, which only grow
  std::pmr::unordered_map<Key, Shares, KeyHash> shares_{&memory_};
  std::pmr::unordered_map<Key, int64_t, KeyHash> lengths_{&memory_};
};

}  // namespace shardwright
