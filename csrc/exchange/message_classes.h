// Classes of equal messages that a rank sends or receives on one mesh, without visiting its peers one by one.
//
// Every mesh dim cuts at most one tensor dim, so parts of different tensor dims combine freely: each combination of one
// class of overlapping parts per tensor dim is a class of messages.
//
// Example: 10 elements move from S(0) to R over a=4, so ranks hold 3, 3, 3 and 1. Rank 0 receives 3 messages of 3
// elements (one of them is its own part), 1 of 1 and -1 of 3.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

#include "exchange/exchange.h"
#include "exchange/part_transfers.h"

namespace shardwright {

// Messages of equal size and contiguity that a rank sends or receives. A class may count the elements that the rank
// keeps as a message; then a last class with `times` = -1 subtracts that message.
struct MessageClass {
  Transfer transfer;  // one of these messages
  int64_t times = 0;  // number of these messages
};

// Caches results. The arguments must outlive the object.
class MessageClasses {
 public:
  // `transfers` are those of the move.
  MessageClasses(GroupMove& move, PartTransfers& transfers);

  // Returns all messages that a rank sends or receives, by class. A rank exchanges data with the members of its group
  // that have its coordinates on the replica dims (group_move.h). The last class subtracts the elements that the rank
  // keeps; its message has no elements if the rank keeps none.
  std::vector<MessageClass> of_rank(int64_t position, Direction direction);
  // Returns the number of sources of a rank on a tensor dim: the different parts of the dim that have indices which the
  // rank needs, out of the parts that the members of its group hold. The rank's own part counts too.
  int64_t num_sources(int tensor_dim, int64_t position);
  // Returns a rank's profile: one number for each tensor dim. If two ranks have equal profiles, their messages agree in
  // number, lengths and contiguity. Messages must be sent in one round. Returns nullopt if the mesh dims that cut a
  // tensor dim have too many combinations of coordinates.
  std::optional<std::vector<int>> profile(int64_t position);

 private:
  // Parts of peers on one tensor dim that intersect a rank's part in equal numbers of indices and runs.
  struct OverlapClass {
    const KnownParts::Part* part;  // one of these parts
    int64_t times = 0;             // number of these parts
    SharedRuns shared;             // summary of the indices that are in both parts
    PieceList pieces;              // only if rounds need slices and there are gaps
  };
  using OverlapClasses = std::vector<OverlapClass>;
  class OverlapSearch;

  struct Dim {  // caches of one tensor dim, for all ranks
    ByCoordinates<OverlapClasses> sent;
    ByCoordinates<OverlapClasses> received;
    ByCoordinates<int> profiles;
    std::map<std::vector<int64_t>, int> profile_numbers;
  };

  // Returns the overlaps of a rank's part of a tensor dim (held to send, needed to receive) with the parts of its
  // peers, itself included.
  const OverlapClasses& overlaps(int tensor_dim, int64_t position, Direction direction);
  // Returns the number of one tensor dim in a rank's profile. It is equal for ranks whose parts and overlaps on this
  // dim are equal except for offsets.
  int profile_in(int tensor_dim, int64_t position);

  GroupMove& move_;
  PartTransfers& transfers_;
  std::vector<Dim> dims_;                    // by tensor dim
  std::deque<KnownParts::Part> peer_parts_;  // the parts of overlap classes
};

}  // namespace shardwright
