// Facts about pairs of lists of cuts: the list of one tensor dim before a move and the list after it.
//
// If digits (exchange/digits.h) describe both lists, the facts follow from them in a *closed form*, without comparing
// parts. docs/architecture/search.md computes the closed form of a pair step by step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "moves/cut_lists.h"
#include "support/small_vector.h"

namespace shardwright {

// Counts of indices and parts that follow from digits. Over several tensor dims, the numbers multiply.
//
// Example: 64 rows move on a mesh node=4, gpu=8, whose mesh dim `node` is between nodes, from [S(0), R] (16 rows of
// each node) to [R, S(0)] (8 rows of each gpu). A rank has some of the rows that it needs only if node == gpu / 2: a
// tie {gpu, 4}.
//
//   shared 8           a rank with node == gpu / 2 needs 8 rows and has all of them
//   differs            ranks with node != gpu / 2 have none of their rows
//   sources 1          the 8 rows of a rank are within one part of 16 rows
//   shared_by_node 16  the ranks of a node have 16 rows together, and need all of them
//   needed_by_node 8   the ranks of a node need 8 different parts together
struct ClosedForm {
  bool differs = false;                // some rank has nothing of the part that it needs, because a tie differs
  bool differs_between_nodes = false;  // `differs` because of a tie whose two mesh dims are both between nodes
  int64_t shared = 1;                  // indices in both parts of a rank whose coordinates agree on all ties
  int64_t sources = 1;                 // number of parts before that intersect one part after
  int64_t shared_by_node = 1;          // `shared` for the ranks of a node together
  int64_t needed_by_node = 1;          // indices needed by a node's ranks together, as a multiple of one rank's
};

struct ListPair {
  // A digit that both lists fix, by different coordinates.
  struct Tie {
    int mesh_dim;   // fixes the digit after the move
    int64_t radix;  // number of values of the digit
  };

  MeshDimSet spanned;                     // the mesh dims that a move must span because of this tensor dim
  bool takes_long = false;                // there are many pieces to compare, and no digits
  std::optional<bool> subdivides;         // result of ListPairs::subdivides(); nullopt until it is computed
  std::optional<ClosedForm> closed_form;  // only if both lists have digits that match, and ties are few
  SmallVector<Tie> ties;                  // complete only with a closed form
};

// Computes the facts about each pair on first use.
class ListPairs {
 public:
  // Ranks whose coordinates differ on a mesh dim of `between_nodes` count as ranks of different nodes. The layout,
  // which has the shape and the mesh, and the lists must outlive the object.
  ListPairs(const Layout& layout, const CutLists& lists, MeshDimSet between_nodes)
      : layout_(layout), lists_(lists), between_nodes_(between_nodes), tables_(layout.ndim()) {}

  // Returns the facts about a pair of lists, given by their numbers. The reference stays valid as long as the object.
  const ListPair& at(int tensor_dim, int before, int after) {
    const Table& table = tables_[tensor_dim];
    ListPair* known = std::max(before, after) < table.stride ? table.pairs[before * table.stride + after] : nullptr;
    return known ? *known : add(tensor_dim, before, after);
  }
  // Returns true if `after` subdivides the parts of `before`: the ranks that hold one part before hold together exactly
  // this part after. A result of false may be wrong.
  bool subdivides(int tensor_dim, int before, int after);

 private:
  static constexpr size_t kMaxTies = 6;  // maximum number of ties of a pair with a closed form

  // The pairs of one tensor dim: pairs[before * stride + after]; null if the pair is not known yet.
  struct Table {
    int stride = 0;
    std::vector<ListPair*> pairs;
  };

  // Computes the facts about a pair that is not in its table, and adds them.
  ListPair& add(int tensor_dim, int before, int after);
  // Returns the facts about a pair. ListPair::subdivides is set only if both lists have digits that match.
  ListPair compute(int tensor_dim, const CutList& before, const CutList& after) const;
  // Sets the closed form and the ties, unless there are more than kMaxTies.
  void set_closed_form(ListPair& pair, const Matching& matching) const;
  // Returns an upper bound of the number of pieces of a list's parts, over all ranks, or 1 if every cut makes runs
  // (CutRule::makes_runs).
  int64_t num_pieces(int64_t n, const CutList& list) const;

  const Layout& layout_;
  const CutLists& lists_;
  const MeshDimSet between_nodes_;
  std::vector<Table> tables_;  // by tensor dim
  std::deque<ListPair> pairs_;
};

}  // namespace shardwright
