// Who has how much for whom in a step and where it lies, from interval lists alone: what the compiler decides by, and
// what memory is counted from.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
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
    std::vector<int64_t> positions;  // by ascending rank
    std::vector<Part> held;          // by member, then tensor dim
    std::vector<Part> needed;
    std::vector<int64_t> replica;  // by member: a receiver reads from the replica with the same number as its own
    int64_t num_replicas = 1;
    // By member, then tie: pairs whose numbers agree have something for each other. Where digits say it all.
    std::vector<int64_t> held_ties;
    std::vector<int64_t> needed_ties;
    std::optional<Transfers> transfers;  // of steps with sharing
    // Members that are connected by what they exchange, directly or through others, by ascending rank; by the number
    // that `connected` has for each member. Only after connect().
    std::vector<std::vector<size_t>> circles;
    std::vector<bool> all_pairs_talk;  // by circle
    std::vector<size_t> connected;
    // The parts of a tensor dim that members hold, and that receivers from one replica need: every combination of one
    // for each tensor dim is there, equally often. By tensor dim; the latter by replica first. Once they were asked
    // for.
    std::vector<std::vector<Part>> all_held;
    std::vector<std::vector<Part>> all_needed;
  };

  // The group that the step makes of the ranks around this one; kept.
  Group& group(int64_t position);
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
  Transfer transfer(const Group& group, size_t from, size_t to);
  // All that a member sends, and receives, over `times` pairs that are alike; with the own share once taken off.
  struct Alike {
    Transfer transfer;
    int64_t times = 0;
  };
  std::vector<Alike> sends(Group& group, size_t member);
  std::vector<Alike> receives(Group& group, size_t member);

  // All that one member holds and another needs, whoever sends it: what a reduction contributes.
  Transfer share(const Group& group, size_t from, size_t to);

  // What a member has before and after.
  Load own(const Group& group, size_t member) const {
    return shared(&group.held[member * ndim_], &group.needed[member * ndim_]);
  }
  int64_t num_held(const Group& group, size_t member) const;  // elements

  // Whether a member has something for another one.
  bool talks(const Group& group, size_t from, size_t to);
  // Finds the circles. Looks at every pair.
  void connect(Group& group);
  // Whether all pairs that have something to say look alike but for their offsets: digits say it all.
  bool all_look_alike() const { return all_look_alike_; }

  const Step& step() const { return step_; }

 private:
  using Parts = std::vector<std::unordered_map<int64_t, IntervalList>>;  // by tensor dim, by coordinates that matter

  // Parts of others that meet one part alike.
  struct Meeting {
    Part part;  // one of them
    int64_t times = 0;
    SharedRuns shared;
    std::vector<Piece> pieces;  // where slices are asked for and there are gaps
  };

  Part part(const Layout& layout, Parts& parts, int tensor_dim, int64_t position);
  Load shared(const Part* held, const Part* needed) const;
  Transfer in_rounds(const Part* held, const Part* needed, const Load& whole, Interval range);
  void list_parts(Group& group);
  const std::vector<Meeting>& meetings(const std::vector<Part>& others, const Part& mine, bool others_hold);
  std::vector<Alike> alike(const std::vector<Part>* others, const Part* mine, bool others_hold, int64_t members);

  const Step& step_;
  size_t ndim_;
  bool all_look_alike_;
  std::vector<Matching::Common> ties_;
  std::optional<Transfer> alike_;  // of any pair, where all look alike
  Parts held_;
  Parts needed_;
  std::map<int64_t, Group> groups_;                                               // by their least position
  std::map<std::vector<int64_t>, std::vector<Load>> rounds_;                      // by all that they depend on
  std::map<std::pair<const void*, const void*>, std::vector<Meeting>> meetings_;  // by the others, by the own part
};

// How a move of data is carried out by the rank at one position.
enum class DataMoveWay { kNativeGather, kAllToAll, kMessages, kLocal };

struct DataMovePlan {
  DataMoveWay way = DataMoveWay::kLocal;
  std::vector<size_t> partners;  // members of the group that take part; empty: all
};

// With named_groups_only all ranks of the group take part, else those that have something to say.
DataMovePlan way_of(StepPairs& pairs, StepPairs::Group& group, size_t member, Backend backend, bool named_groups_only);

}  // namespace shardwright
