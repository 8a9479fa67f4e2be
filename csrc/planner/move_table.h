// Moves between layouts and what they cost, for a search that asks for thousands of them.
//
// A state of the search is a list of cuts for each tensor dim and a set of pending mesh dims. Whether a move exists and
// what it travels factorises over tensor dims, because every mesh dim cuts one of them at most. So lists are numbered,
// and what there is to know of a pair of lists is worked out once.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "planner/cost.h"
#include "planner/plan.h"

namespace shardwright {

using Cuts = std::vector<std::vector<Cut>>;

class MoveTable {
 public:
  // States are on the mesh and of the shape and dtype of `layout`, and pending with its reductions, which are carried
  // out in order or by whatever is native.
  MoveTable(const Layout& layout, Backend backend, bool ordered = false);

  struct State {
    std::vector<int> lists;  // by tensor dim
    MeshDimSet cut_dims;
    MeshDimSet partial_dims;
    int64_t elements = 0;  // held at position 0, where parts are largest
    bool operator==(const State& other) const { return lists == other.lists && partial_dims == other.partial_dims; }
  };

  // The number of a list of cuts of a tensor dim. Lists that make the same parts have the same number wherever parts
  // have one size.
  int number(int tensor_dim, const std::vector<Cut>& cuts);
  MeshDimSet dims_of(int tensor_dim, int list) const { return lists_[tensor_dim][list].dims; }
  int64_t first_length(int tensor_dim, int list) const { return lists_[tensor_dim][list].length; }

  State state(const Cuts& cuts, MeshDimSet partial_dims);
  Cuts cuts(const State& state) const;

  struct Move {
    StepOp op;
    MeshDimSet mesh_dims;
  };

  // See move_between in move.h.
  std::optional<Move> move(const State& before, const State& after, const std::vector<MeshDimSet>& allowed);
  // False where `move` finds no slice; quick.
  bool may_be_slice(const State& before, const State& after) const;
  StepFigures figures(const State& before, const State& after, const Move& move);
  // Elements that some rank holds afterwards and not before: no sequence of moves brings it fewer.
  int64_t missing(const State& before, const State& after);

 private:
  using Key = std::array<uint32_t, 5>;  // tensor dim, lists before and after, mesh dims that vary, corner
  struct KeyHash {
    size_t operator()(const Key& key) const;
  };

  // What a pair of lists shares at one position, in elements and parts.
  struct Shares {
    int64_t own = 0;
    int64_t sources = 0;
    int64_t sent = 0;
  };

  int64_t length_at(int tensor_dim, int list, uint32_t corner);
  int64_t elements_at(const State& state, uint32_t corner);
  const Shares& shares(int tensor_dim, int before, int after, MeshDimSet varying, uint32_t corner);
  MeshDimSet spanned(int tensor_dim, int before, int after);
  bool is_cut_further(int tensor_dim, int before, int after);
  bool scatters(const State& before, const State& after, MeshDimSet reduced);
  // The position whose coordinate is the last one on the mesh dims of `corner`, else the first.
  int64_t position_of(uint32_t corner) const;
  static Key key(int tensor_dim, int before, int after, uint32_t varying = 0, uint32_t corner = 0);

  Layout layout_;
  Backend backend_;
  bool ordered_;
  int64_t item_;
  struct List {
    std::vector<Cut> cuts;
    MeshDimSet dims;
    int64_t length = 0;  // of the part at position 0
  };
  std::vector<std::vector<List>> lists_;  // by tensor dim, by number
  std::vector<std::map<std::vector<int64_t>, int>> numbers_;
  std::unordered_map<Key, Shares, KeyHash> shares_;
  std::unordered_map<Key, MeshDimSet, KeyHash> spanned_;
  std::unordered_map<Key, bool, KeyHash> cut_further_;
  std::unordered_map<Key, int64_t, KeyHash> lengths_;
};

}  // namespace shardwright
