// Moves between layouts and their costs, for a search that needs thousands of them.
//
// A state of the search is a list of cuts for each tensor dim and a set of pending mesh dims. Every mesh dim cuts at
// most one tensor dim, so the existence and the bytes of a move factorize over tensor dims. Lists of cuts are therefore
// numbered, and the facts about each pair of lists are computed once.
//
//   list          a list of cuts of one tensor dim, or its number
//   pair          the list of one tensor dim before a move and the list after it
//   closed form   the facts about a pair follow from digits (exchange/digits.h), without comparing parts
//   corner        a rank that is examined if some pair has no closed form (moves/rank_classes.h)
//   peer          a rank with which a rank exchanges data; its coordinates differ only on the mesh dims `varying`
//
// docs/architecture/search.md computes the closed form of a pair and a Distance step by step.
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

using Cuts = std::vector<std::vector<Cut>>;  // the list of cuts of each tensor dim

class MoveTable {
 public:
  // States have the mesh, shape and dtype of `layout`, and its reductions on their pending mesh dims. With `ordered`,
  // reductions add in the order of positions; otherwise native collectives are used if there are any. Ranks whose
  // coordinates differ on a mesh dim of `between_nodes` count as ranks of different nodes.
  MoveTable(const Layout& layout, Lowering lowering, bool ordered = false, MeshDimSet between_nodes = {});

  struct State {
    std::vector<int> lists;  // the number of the list of each tensor dim
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
  // Returns the number of indices of the largest part that a list makes.
  int64_t largest_length(int tensor_dim, int list) const { return lists_[tensor_dim][list].length; }
  bool has_equal_parts(int tensor_dim, int list) const { return lists_[tensor_dim][list].has_equal_parts; }
  bool has_digits(int tensor_dim, int list) const { return lists_[tensor_dim][list].digits.has_value(); }

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
  // Returns the exchange in which replicas share the sending in whole messages, if that reduces what the worst rank
  // sends and the reduction follows from digits. Otherwise returns nullopt.
  std::optional<Move> sending_whole_messages(const State& before, const State& after, const Move& exchange,
                                             const std::vector<MeshDimSet>& allowed);
  // Returns false if a quick test shows that `move` does not return a slice.
  bool may_be_slice(const State& before, const State& after) const;
  // Returns the counts of the worst rank in a move.
  StepCounts step_counts(const State& before, const State& after, const Move& move);
  // Returns lower bounds of an exchange's counts: those of the rank at the first coordinates. Returns nullopt if the
  // exact counts are as quick to compute.
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
  Distance distance(const State& before, const State& after);

 private:
  // Tensor dim, list before, list after, bits of the varying mesh dims, `last` and `base` of the corner.
  using Key = std::array<uint32_t, 6>;
  struct KeyHash {
    size_t operator()(const Key& key) const;
  };

  // The factors of one tensor dim in the traffic of one rank. The products over tensor dims are the counts in elements
  // and ranks; see exchange_traffic(). The peers are the ranks whose coordinates differ only on the mesh dims
  // `varying`.
  struct DimTraffic {
    int64_t kept = 0;       // indices that the rank holds before and needs after
    int64_t sources = 0;    // parts before the move, of the rank and its peers, with indices that the rank needs
    int64_t sent = 0;       // indices that the rank holds, summed over the parts after the move that need them
    int64_t receivers = 0;  // parts after the move, of the rank and its peers, with indices that the rank holds
  };

  // Facts about a pair of lists. All but subdivides, takes_long and spanned are valid only if has_closed_form.
  struct ListPair {
    std::optional<bool> subdivides;      // result of subdivides(); without digits, only reductions compute it
    bool takes_long = false;             // there are many pieces to compare, and no digits
    bool has_closed_form = false;        // closed formulas from digits give the following fields
    bool differs = false;                // some rank has nothing of the part that it needs, because a tie differs
    bool differs_between_nodes = false;  // as `differs`, with both coordinates on mesh dims in between_nodes_
    MeshDimSet spanned;                  // the mesh dims that a move must span because of this tensor dim
    int64_t shared = 1;                  // indices in both parts of a rank whose coordinates agree on all ties
    int64_t sources = 1;                 // number of parts before that intersect one part after
    int64_t shared_by_node = 1;          // `shared` for the ranks of a node together
    int64_t needed_by_node = 1;          // indices needed by a node's ranks together, as a multiple of one rank's
    // Ties: digits that both lists fix, by different coordinates. `mesh_dim` fixes the digit after the move.
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
    int64_t length = 0;  // indices of the largest part
    bool has_equal_parts = false;
    std::optional<std::vector<Digit>> digits;  // only if parts are equal, and not always then
    bool first_is_largest = true;              // the rank at first coordinates has the largest part
  };

  // Returns the number of pieces, over all ranks, to compare for strided parts; 1 if no cut is strided.
  int64_t num_pieces(int64_t n, const List& list) const;
  // Returns the facts about a pair, which are computed on first use.
  const ListPair& pair_of(int tensor_dim, int before, int after);
  ListPair compute_pair(int tensor_dim, const List& before, const List& after) const;
  // Sets the fields that follow from digits, and has_closed_form unless there are more than kMaxTies ties.
  void set_closed_form(ListPair& pair, const Matching& matching) const;
  // Returns true if `after` subdivides the parts of `before`: the ranks that hold one part before hold together exactly
  // this part after.
  bool subdivides(int tensor_dim, int before, int after);
  // Returns the counts of the worst rank in an exchange: by formula if all pairs have a closed form, else over the
  // corners.
  StepCounts exchange_counts(const State& before, const State& after, const Move& move);
  // Returns the traffic of the rank at a corner in an exchange with the peers along `varying`.
  //
  // Example: 8 rows on a=2, b=4 from [S(0), R] to [R, S(0)] over `varying` = {a}. Rank (0, 0) has rows 0 to 3 and needs
  // rows 0 and 1; its peer (1, 0) has rows 4 to 7 and needs rows 0 and 1.
  //   rank (0, 0)   kept 2, sources 1, sent 2, receivers 1; the part after is held twice, so it sends 2 x 2 - 2 = 2
  //   rows rank (1, 0)   kept 0, sources 1, sent 0, receivers 0; it receives 2 - 0 = 2 rows in 1 message
  Traffic exchange_traffic(const State& before, const State& after, MeshDimSet varying, Corner corner);
  // Returns true if all parts of all tensor dims have equal size.
  bool has_equal_parts(const State& state) const;
  // Return the indices of a tensor dim, and the elements of the tensor, that the rank at a corner holds.
  int64_t length_at(int tensor_dim, int list, Corner corner);
  int64_t elements_at(const State& state, Corner corner);
  // Returns the factors of a tensor dim. They are computed on first use: from digits if both lists have digits that
  // match, else by comparing the parts.
  const DimTraffic& dim_traffic(int tensor_dim, int before, int after, MeshDimSet varying, Corner corner);
  DimTraffic dim_traffic_by_digits(const Matching& matching, MeshDimSet varying, int64_t position) const;
  DimTraffic dim_traffic_by_parts(int64_t n, const std::vector<Cut>& before, const std::vector<Cut>& after,
                                  MeshDimSet varying, int64_t position) const;
  // Returns true if a reduce-scatter over `reduced` leads from one state to the other: these mesh dims become cuts, and
  // nothing else changes.
  bool is_reduce_scatter(const State& before, const State& after, MeshDimSet reduced);
  // Returns the key of an entry of dim_traffic_ or lengths_.
  static Key key(int tensor_dim, int before, int after, uint32_t varying, Corner corner);

  Layout layout_;
  Lowering lowering_;
  bool ordered_;
  MeshDimSet between_nodes_;
  int64_t node_size_;                     // number of ranks on a node: those with equal coordinates on between_nodes_
  int64_t item_bytes_;                    // size of an element
  Corners corners_;                       // for the lists without digits
  std::vector<std::vector<List>> lists_;  // by tensor dim, then by number
  std::vector<std::map<std::vector<int64_t>, int>> list_indices_;  // numbers of lists without digits, by tensor dim
  // Indices into pairs_ by tensor dim, list before and list after; -1: not computed yet.
  std::vector<std::vector<std::vector<int>>> pair_indices_;
  std::vector<ListPair> pairs_;
  std::pmr::monotonic_buffer_resource memory_;  // memory of dim_traffic_ and lengths_, which only grow
  std::pmr::unordered_map<Key, DimTraffic, KeyHash> dim_traffic_{&memory_};
  std::pmr::unordered_map<Key, int64_t, KeyHash> lengths_{&memory_};
};

}  // namespace shardwright
