// Who has how much for whom in a step and where it lies, from interval lists alone: what the compiler decides by, and
// what memory is counted from.
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
#include "moves/plan.h"

namespace shardwright {

// What goes from one rank to another in one round: so many elements, and the offset of the first in the row-major parts
// that the one holds and the other needs. A run: they lie there one behind the other, in the order of the message.
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

  // What a rank has of one tensor dim.
  struct Part {
    int64_t begin = 0;
    int64_t end = 0;
    int64_t length = 0;
    const IntervalList* list = nullptr;
    bool has_gaps = false;
  };

  struct Group {
    int64_t least = 0;  // its position with the first coordinates on the mesh dims of the step
    int64_t size = 1;
    std::vector<int64_t> positions;      // by ascending rank; only from group()
    std::optional<Transfers> transfers;  // of steps with sharing
    // Members that are connected by what they exchange, directly or through others, by ascending rank; by the number
    // that `connected` has for each member. Only after connect().
    std::vector<std::vector<size_t>> circles;
    std::vector<bool> all_pairs_talk;  // by circle
    std::vector<size_t> connected;
    std::optional<bool> all_talk;  // once it was asked for
  };

  // The group that the step makes of the ranks around this one; kept. With its members, or without a look at them.
  Group& group(int64_t position);
  Group& around(int64_t position);
  static size_t index_of(const Group& group, int64_t position);

  // What a member sends another one, by rounds.
  class Transfer {
   public:
    Transfer() = default;
    Transfer(const Load& whole, const std::vector<Load>* rounds) : whole_(whole), rounds_(rounds) {}
    int64_t count() const { return whole_.count; }
    Load in_round(int64_t round) const;
    bool has_runs() const;  // in some round, on some side

   private:
    Load whole_;
    const std::vector<Load>* rounds_ = nullptr;  // offsets from the first of the whole; null: there is one round
  };
  // Between the ranks at two positions of one group. Of steps with sharing only once group() was asked for it.
  Transfer transfer(const Group& group, int64_t from, int64_t to);
  // All that a rank sends, and receives, over `times` pairs that are alike; with the own share once taken off.
  struct Alike {
    Transfer transfer;
    int64_t times = 0;
  };
  std::vector<Alike> sends(const Group& group, int64_t position);
  std::vector<Alike> receives(const Group& group, int64_t position);
  // One of the transfers of a rank, in either direction, where all look alike. It must have some.
  const Transfer& any_transfer(int64_t position);

  // All that one rank holds and another needs, whoever sends it: what a reduction contributes.
  Transfer share(int64_t from, int64_t to);

  // What a rank has before and after.
  Load own(int64_t position);
  int64_t num_held(int64_t position);  // elements
  // Whether all members of the group around a rank hold as many elements, and need as many.
  bool hold_equally(int64_t position) { return have_equally(step_.before, position); }
  bool need_equally(int64_t position) { return have_equally(step_.after, position); }

  // Whether the rank at one position has something for the one at another, of the same group.
  bool talks(const Group& group, int64_t from, int64_t to);
  // Finds the circles. Looks at every pair.
  void connect(Group& group);
  // Whether every member has something for every other one.
  bool all_talk(Group& group) {
    return group.all_talk ? *group.all_talk : *(group.all_talk = work_out_all_talk(group));
  }
  // Whether all pairs that have something to say look alike but for their offsets: digits say it all.
  bool all_look_alike() const { return all_look_alike_; }
  // And all pairs on one replica have something to say.
  bool all_meet_alike() const { return all_look_alike_ && ties_.empty(); }

  const Step& step() const { return step_; }

 private:
  using Parts = std::vector<std::unordered_map<int64_t, IntervalList>>;  // by tensor dim, by coordinates that matter
  using PartsOfRank = std::vector<Part>;                                 // by tensor dim

  // Parts of others that meet one part alike.
  struct Meeting {
    Part part;  // one of them
    int64_t times = 0;
    SharedRuns shared;
    std::vector<Piece> pieces;  // where slices are asked for and there are gaps
  };

  // Who has something for whom among the members of a group.
  struct Talk {
    struct PartsOfDim {
      std::vector<int> held;  // by member
      std::vector<int> needed;
      int num_needed = 0;
      std::vector<bool> meet;  // by held and needed part
    };
    std::vector<int> held;  // by member: equal for those that talk, wherever digits say it all, and on one replica
    std::vector<int> needed;
    std::vector<PartsOfDim> parts;  // by tensor dim, where digits do not

    bool is_there(size_t from, size_t to) const {
      if (held[from] != needed[to]) return false;
      for (const PartsOfDim& dim : parts) {
        if (!dim.meet[dim.held[from] * dim.num_needed + dim.needed[to]]) return false;
      }
      return true;
    }
  };

  Talk talk_of(const Group& group);
  bool work_out_all_talk(Group& group);
  Part part(const Layout& layout, Parts& parts, int tensor_dim, int64_t position);
  PartsOfRank held(int64_t position);
  PartsOfRank needed(int64_t position);
  bool have_equally(const Layout& layout, int64_t position) const;
  bool shares_with(int64_t from, int64_t to);
  Load shared(const PartsOfRank& held, const PartsOfRank& needed) const;
  Transfer in_rounds(const PartsOfRank& held, const PartsOfRank& needed, const Load& whole, Interval range);
  const std::vector<Meeting>& meetings(int tensor_dim, int64_t position, bool others_hold);
  void meet_below(const IntervalList& list, std::span<const Cut> cuts, int64_t times, const Part& mine,
                  bool others_hold, int64_t position, std::vector<Meeting>& found);
  void add_meeting(const IntervalList& list, int64_t times, const Part& mine, bool others_hold,
                   std::vector<Meeting>& found);
  std::vector<Alike> alike(int64_t position, bool others_hold);
  std::vector<Alike> one_by_one(const Group& group, int64_t position, bool others_hold);

  const Step& step_;
  size_t ndim_;
  MeshDimSet cutting_;   // mesh dims of the step that cut `before`: members that differ there hold different parts
  MeshDimSet replicas_;  // the others: a receiver reads from the rank with its own coordinates there
  bool all_look_alike_;
  std::vector<Matching::Common> ties_;
  std::optional<Transfer> alike_;  // of any pair, where all look alike
  Parts held_;
  Parts needed_;
  std::deque<IntervalList> lists_;                                    // of meetings
  std::map<int64_t, Group> groups_;                                   // by their least position
  std::map<std::vector<int64_t>, std::vector<Load>> rounds_;          // by all that they depend on
  std::map<std::pair<int, int64_t>, std::vector<Meeting>> meetings_;  // by tensor dim and side, by coordinates
};

// How a move of data is carried out by the rank at one position.
enum class DataMoveWay { kNativeGather, kAllToAll, kMessages, kLocal };

struct DataMovePlan {
  DataMoveWay way = DataMoveWay::kLocal;
  std::vector<size_t> partners;  // members of the group that take part; empty: all
};

// With named_groups_only all ranks of the group take part, else those that have something to say.
DataMovePlan way_of(StepPairs& pairs, StepPairs::Group& group, size_t member, Lowering lowering,
                    bool named_groups_only);

}  // namespace shardwright
