// What pairs of ranks share in a step: how much one has for the other, and where it lies. Computed from interval lists
// alone. The compiler decides with it how to carry out a move, and memory is computed from it.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "moves/digits.h"
#include "moves/exchange.h"
#include "moves/known_parts.h"
#include "moves/plan.h"

namespace shardwright {

// What goes from one rank to another in one round: the number of elements, and the offset of the first one in the
// row-major parts that the sender holds and that the receiver needs. They are a run if they are contiguous there, in
// the order of the message.
struct Load {
  int64_t count = 0;
  int64_t first_held = 0;
  int64_t first_needed = 0;
  bool is_run_held = false;
  bool is_run_needed = false;
};

class StepPairs {
 public:
  explicit StepPairs(const Step& step);

  // The indices that a rank has of one tensor dim.
  struct Part {
    int64_t begin = 0;
    int64_t end = 0;
    int64_t length = 0;
    const IntervalList* list = nullptr;
    bool has_gaps = false;
  };

  struct Group {
    int64_t least = 0;  // the member whose coordinates on the step's mesh dims are 0
    int64_t size = 1;
    std::vector<int64_t> positions;      // by ascending rank; only set by group()
    std::optional<Transfers> transfers;  // for steps with sharing
    // Only after connect(): the connected components of "exchanges data with", each by ascending rank. `connected` has
    // the index of each member's component.
    std::vector<std::vector<size_t>> circles;
    std::vector<bool> all_pairs_talk;  // by component
    std::vector<size_t> connected;
    std::optional<bool> all_talk;  // set on first use, as is_even
    std::optional<bool> is_even;
  };

  // The step's group that contains this position. Groups are kept. group() also lists the members, around() does not.
  Group& group(int64_t position);
  Group& around(int64_t position);
  static size_t index_of(const Group& group, int64_t position);

  // What one member sends another, round by round.
  class Transfer {
   public:
    Transfer() = default;
    Transfer(const Load& whole, const std::vector<Load>* rounds) : whole_(whole), rounds_(rounds) {}
    int64_t count() const { return whole_.count; }
    Load in_round(int64_t round) const;
    bool has_runs() const;  // in some round, on some side

   private:
    Load whole_;
    const std::vector<Load>* rounds_ = nullptr;  // offsets are relative to the whole's first; null: there is one round
  };
  // The transfer between two positions of one group. For steps with sharing, group() must have been called before.
  Transfer transfer(const Group& group, int64_t from, int64_t to);
  // Everything that a rank sends or receives, with equal pairs counted together; its own share is not included.
  struct Alike {
    Transfer transfer;
    int64_t times = 0;
  };
  // Valid until the next call.
  const std::vector<Alike>& sends(const Group& group, int64_t position);
  const std::vector<Alike>& receives(const Group& group, int64_t position);
  // Any one of a rank's transfers, in either direction, if all look alike. The rank must have some.
  const Transfer& any_transfer(int64_t position);

  // Everything that one rank holds and another needs, whoever sends it: its contribution to a reduction.
  Transfer share(int64_t from, int64_t to);

  // Equal for two ranks only if messages to and from them are equally many, equally long, and runs or not alike: one
  // number for each tensor dim. Nothing for steps in rounds or with sharing, and where very many combinations of
  // coordinates cut a tensor dim.
  std::optional<std::vector<int>> likeness(int64_t position);

  // What a rank holds before the step and also needs after it.
  Load own(int64_t position);
  int64_t num_held(int64_t position);  // elements
  // Returns whether all members of the group around a rank hold equally many elements.
  bool hold_equally(int64_t position) const;
  // How many members of the group around a rank need how many elements after the step, without examining members.
  std::map<int64_t, int64_t> members_by_need(int64_t position) const;

  // Returns whether the rank at one position has something for the rank at another position of the same group.
  bool talks(const Group& group, int64_t from, int64_t to);
  // Computes the connected components. Examines every pair.
  void connect(Group& group);
  // Returns whether every member has something for every other one.
  bool all_talk(Group& group) {
    return group.all_talk ? *group.all_talk : *(group.all_talk = work_out_all_talk(group));
  }
  // Returns whether all members hold something, and equally much.
  bool is_even(Group& group) {
    if (!group.is_even) group.is_even = hold_equally(group.least) && num_held(group.least) > 0;
    return *group.is_even;
  }
  // Returns whether all pairs that exchange data look alike except for offsets, as they do where digits describe
  // everything.
  bool all_look_alike() const { return all_look_alike_; }
  // Returns whether in addition all pairs on one replica exchange data.
  bool all_meet_alike() const { return all_look_alike_ && ties_.empty(); }

  const Step& step() const { return step_; }

 private:
  using PartsOfRank = std::vector<Part>;  // by tensor dim
  struct PartsAt {
    int64_t position = -1;
    PartsOfRank parts;
  };

  // Parts of other ranks that intersect one part in the same way.
  struct Meeting {
    Part part;          // one of them
    int64_t times = 0;  // their number
    SharedRuns shared;
    PieceList pieces;  // if rounds need slices and there are gaps
  };

  // Those with one part of a tensor dim, which the rank at some position needs or holds.
  struct Meetings {
    int tensor_dim;
    int64_t position;
    bool others_hold;
    Part mine;
    std::vector<Meeting> found;
  };

  struct Talk;  // which members of a group have something for which (connected.cpp)

  std::map<int64_t, int64_t> lengths(const Layout& layout, int tensor_dim, int64_t position) const;
  Talk talk_of(const Group& group);
  Talk talk_by_pairs(const Group& group);
  bool work_out_all_talk(Group& group);
  const Coordinates& coordinates(int64_t position);
  Part part(KnownParts& parts, int tensor_dim, int64_t position);
  // Valid until the next call with another position.
  const PartsOfRank& parts_at(KnownParts& parts, PartsAt& at, int64_t position);
  const PartsOfRank& held(int64_t position) { return parts_at(held_, held_at_, position); }
  const PartsOfRank& needed(int64_t position) { return parts_at(needed_, needed_at_, position); }
  bool shares_with(int64_t from, int64_t to);
  Load shared(const PartsOfRank& held, const PartsOfRank& needed) const;
  // The same where it is known what they share.
  template <typename RunsOf>
  Load shared(const PartsOfRank& held, const PartsOfRank& needed, const RunsOf& runs_of) const;
  Transfer in_rounds(const PartsOfRank& held, const PartsOfRank& needed, const Load& whole, Interval range);
  const std::vector<Meeting>& meetings(int tensor_dim, int64_t position, bool others_hold);
  ByCoordinates<std::vector<Meeting>> no_meetings_yet(int tensor_dim, bool others_hold) const;
  int likeness_in(int tensor_dim, int64_t position);
  void meet_below(const IntervalList& list, std::span<const Cut> cuts, int64_t times, Meetings& with);
  void add_meeting(const IntervalList& theirs, int64_t times, Meetings& with);
  const std::vector<Alike>& alike(int64_t position, bool others_hold);
  const std::vector<Alike>& one_by_one(const Group& group, int64_t position, bool others_hold);

  const Step& step_;
  size_t ndim_;
  MeshDimSet cutting_;   // mesh dims of the step that cut `before`; members that differ there hold different parts
  MeshDimSet replicas_;  // the step's other mesh dims; a receiver reads from the rank with its own coordinates there
  bool all_look_alike_;
  std::vector<Matching::Common> ties_;
  std::optional<Transfer> alike_;  // the transfer of any pair, if all look alike
  std::vector<int> spanned_;       // the step's mesh dims
  KnownParts held_;
  KnownParts needed_;
  PartsAt held_at_;
  PartsAt needed_at_;
  int64_t position_ = -1;  // of coordinates_
  Coordinates coordinates_;
  std::vector<Alike> all_alike_;                  // what sends() or receives() returned
  std::vector<const std::vector<Meeting>*> met_;  // in alike(), by tensor dim, with the combination
  std::vector<size_t> combination_;
  PartsOfRank others_;
  std::deque<IntervalList> lists_;                             // of meetings
  std::unordered_map<int64_t, Group> groups_;                  // by their least position
  std::map<std::vector<int64_t>, std::vector<Load>> rounds_;   // by everything that they depend on
  std::vector<ByCoordinates<std::vector<Meeting>>> meetings_;  // two for each tensor dim: receivers, then holders
  std::vector<ByCoordinates<int>> likenesses_;                 // by tensor dim; empty until they are asked for
  std::vector<std::map<std::vector<int64_t>, int>> known_likenesses_;
};

SharedRuns shared_runs(const StepPairs::Part& held, const StepPairs::Part& needed);

}  // namespace shardwright
