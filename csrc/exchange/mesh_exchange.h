// The exchange on one mesh, within groups of ranks that differ only in some mesh dims.
//
// Some mesh dims of the group may not cut the layout before. Ranks that differ only in these *replica dims* hold the
// same part. By default a receiver reads from the replica that has the receiver's coordinates on the replica dims.
// Alternatively the replicas share the sending: the elements that the receivers need of a part are arranged in a queue
// by receiver position, and every replica sends one range of the queue. All ranges of a group have the same length, the
// least that covers every queue: shorter ranges would split more messages without relieving the busiest rank.
//
// Tensor dims are cut by different mesh dims, so the common elements of two ranks are a product over tensor dims. The
// factors are cached by the coordinates on which they depend, and groups are cached too. In names, `held` is the part
// of a rank by the layout before the move, and `needed` its part by the layout after.
//
// If digits describe both layouts (digits.h), the exchange is *regular*: all messages are equal except for peers and
// offsets, and counts are closed forms. A *tie* is a digit that both layouts fix, by different coordinates: two ranks
// can exchange data only if they agree on its value.
//
// Example: 8 x 8 elements move from S(0) to S(1) over a=4. The exchange is regular and has no ties: each rank sends
// each other rank a block of 2 x 2 elements. Rank 1 holds rows 2 and 3, and rank 3 needs columns 6 and 7. The message
// from 1 to 3 is {count 4, first_held 6, first_needed 4, is_contiguous_held false, is_contiguous_needed true}.
//
// Thread safety: an exchange caches results and must be used by one thread.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "exchange/digits.h"
#include "exchange/exchange.h"
#include "exchange/known_parts.h"
#include "exchange/replica_policy.h"

namespace shardwright {

// The extent of a message in one round.
struct Extent {
  int64_t count = 0;                  // number of elements
  int64_t first_held = 0;             // offset of the first element in the sender's row-major part
  int64_t first_needed = 0;           // offset of the first element in the receiver's row-major part
  bool is_contiguous_held = false;    // the elements are one run of the sender's part, in the order of the message
  bool is_contiguous_needed = false;  // the elements are one run of the receiver's part, in the order of the message
};

// Returns true if `receiver` reads the part of `sender` from `sender` and not from another replica. Both are in one
// group.
bool reads_from(const Layout& before, MeshDimSet group_dims, int64_t sender, int64_t receiver);

// The messages of a group whose replicas share the sending.
//
// Example: 12 rows on (a=2, b=2) move from [S(0), R] to [R, S(0)]. Rows 0 to 5 are held by ranks 0 and 1, and of the
// others only rank 2 needs them.
//
//   kWholeMessages    rank 0 sends rank 2 rows 0 to 5
//   kEvenBytes        rank 0 sends rank 2 rows 0 to 2, and rank 1 sends it rows 3 to 5
class SharedSending {
 public:
  // `group` has the positions of the members. The policy is kWholeMessages or kEvenBytes.
  SharedSending(const Layout& before, const Layout& after, MeshDimSet group_dims, ReplicaPolicy policy,
                const std::vector<int64_t>& group);

  // Returns the message from the `from`-th member to the `to`-th, as a range of the common elements in packed order.
  Interval range(size_t from, size_t to) const;

 private:
  ReplicaPolicy policy_;
  std::vector<size_t> part_;           // by member: the first member that holds the same part
  std::vector<int64_t> sender_index_;  // by member: its index among the members that hold the same part
  int64_t replicas_ = 1;
  // The beginning of a receiver's section of a queue: the number of elements before it, and of receivers.
  struct Offset {
    int64_t elements = 0;
    int64_t receivers = 0;
  };
  std::vector<std::vector<Offset>> queue_;  // by part and receiver; the last entry of a part is the end of its queue
  Offset quota_;  // length of a range: in elements with kEvenBytes, in receivers with kWholeMessages
};

class MeshExchange final : public Exchange {
 public:
  // Maximum size of a group with shared sending, which visits every pair.
  static constexpr int64_t kMaxSharingGroup = 64;

  // The layouts must be on one mesh and outlive the exchange. Messages are sent in `rounds` rounds.
  MeshExchange(const Layout& before, const Layout& after, MeshDimSet group_dims,
               ReplicaPolicy policy = ReplicaPolicy::kAligned, int64_t rounds = 1);

  const std::vector<Rank>& ranks() const override;
  bool communicates() const override;
  int64_t num_elements(Rank rank, Direction direction) const override;
  Traffic traffic(Rank rank, int64_t rounds = 1) const override;
  std::vector<MessageSize> message_sizes(Rank rank, Direction direction) const override;
  std::vector<Message> messages(Rank rank, Direction direction) const override;
  std::optional<Region> region(Rank rank, Direction side) const override;
  std::vector<LocalAxis> local_axes(Rank rank, Direction side) const override;

  // ---- Counts, by position on the mesh

  // Returns the traffic of a rank in all rounds. Takes O(digits) if the exchange is regular; else O(intersecting parts)
  // per combination of coordinates; with shared sending O(members squared) per group.
  Traffic traffic_at(int64_t position) const;
  // Returns an upper bound on the traffic of every rank; nullopt unless the exchange is regular.
  std::optional<Traffic> upper_bound() const;
  // Return the number of elements that a rank holds before the move, and the number that it needs after it.
  int64_t num_held(int64_t position) const { return held_.num_elements(coordinates(position)); }
  int64_t num_needed(int64_t position) const { return needed_.num_elements(coordinates(position)); }
  // Returns the number of messages that a rank sends in a reduce-scatter by messages: one to each other member of its
  // group that needs some of its elements, in each round.
  int64_t reduce_scatter_messages(int64_t position) const;
  // Returns true if all members of the group around a rank hold equally many elements.
  bool hold_equally(int64_t position) const;
  // Returns a map from each number of elements to the number of members of a rank's group that need so many. Does not
  // visit members.
  std::map<int64_t, int64_t> members_by_need(int64_t position) const;
  // Returns the number of elements that one member of a group sends another.
  int64_t elements_between(int64_t from, int64_t to) const;
  // Returns true if all messages are equal except for offsets.
  bool is_regular() const { return is_regular_; }
  // Returns true if the exchange is regular and all pairs of members with equal coordinates on the replica dims
  // exchange data.
  bool is_regular_and_full() const { return is_regular_ && ties_.empty(); }

  // ---- Groups

  // A group, with facts about it that are computed on first use. Members are numbered by ascending rank.
  struct Group {
    int64_t least = 0;                     // position of the member whose coordinates on the group's mesh dims are 0
    int64_t size = 1;                      // number of members
    std::vector<int64_t> positions;        // by ascending rank; only set by group()
    std::optional<SharedSending> sending;  // set by group() if replicas share the sending
    // Set by connect(): the connected components of members that exchange data, each by ascending rank.
    std::vector<std::vector<size_t>> components;
    std::vector<bool> all_pairs_exchange;  // by component: each member has elements for each other member
    std::vector<size_t> component_of;      // by member
    std::optional<bool> all_exchange;      // result of all_exchange()
    std::optional<bool> is_even;           // result of is_even()
  };

  // Return the group that contains this position. Groups are cached. group() fills `positions` and `sending`;
  // group_without_members() only `least` and `size`, in a time that does not depend on the size.
  Group& group(int64_t position) const;
  Group& group_without_members(int64_t position) const;
  // Returns the number of the member at a position.
  static size_t index_of(const Group& group, int64_t position);
  // Computes the connected components. Visits every pair.
  void connect(Group& group) const;
  // Returns true if the rank at one position has elements for the rank at another position of the same group.
  bool sends_to(const Group& group, int64_t from, int64_t to) const;
  // Returns true if every member has elements for every other member.
  bool all_exchange(Group& group) const {
    return group.all_exchange ? *group.all_exchange : *(group.all_exchange = find_all_exchange(group));
  }
  // Returns true if all members hold equally many elements, more than 0.
  bool is_even(Group& group) const {
    if (!group.is_even) group.is_even = hold_equally(group.least) && num_held(group.least) > 0;
    return *group.is_even;
  }

  // ---- Extents of messages

  // The message from one member to another, round by round.
  class Transfer {
   public:
    Transfer() = default;  // no elements
    Transfer(const Extent& whole, const std::vector<Extent>* rounds) : whole_(whole), rounds_(rounds) {}
    int64_t count() const { return whole_.count; }  // elements of all rounds
    Extent in_round(int64_t round) const;
    bool is_contiguous_in_some_round() const;  // true if elements are contiguous in some round, on some side

   private:
    Extent whole_;
    const std::vector<Extent>* rounds_ = nullptr;  // offsets are relative to whole_; null: one round
  };
  // Returns the transfer between two positions of one group. With shared sending, group() must have been called before.
  // In a regular exchange whose elements are not contiguous, the offsets may be those of another pair.
  Transfer transfer(const Group& group, int64_t from, int64_t to) const;
  // Returns the transfer of all elements that one rank holds and another needs, as if `to` read them from `from` and
  // not from another replica. In a reduction this is the contribution of `from` to the part of `to`.
  Transfer full_transfer(int64_t from, int64_t to) const;
  // Returns the elements that a rank holds before and needs after.
  Extent kept_extent(int64_t position) const;
  // Returns one transfer that a rank sends or receives in a regular exchange. All others have the same sizes. The rank
  // must send or receive one.
  const Transfer& any_transfer(int64_t position) const;

  // Messages of equal size and contiguity that a rank sends or receives. A class may count the elements that the rank
  // keeps as a message; then a last class with `times` = -1 subtracts that message. Example: 10 elements move from S(0)
  // to R over a=4, so ranks hold 3, 3, 3 and 1. Rank 0 receives 3 messages of 3 elements, 1 of 1 and -1 of 3.
  struct MessageClass {
    Transfer transfer;  // one of these messages
    int64_t times = 0;  // number of these messages
  };
  // Return all messages of a rank by class. The result is valid until the next call.
  const std::vector<MessageClass>& classes_sent(const Group& group, int64_t position) const;
  const std::vector<MessageClass>& classes_received(const Group& group, int64_t position) const;

  // Returns one number for each tensor dim. If two ranks have equal profiles, their messages agree in number, lengths
  // and contiguity. Returns nullopt with several rounds, if replicas share the sending, or if the mesh dims that cut a
  // tensor dim have too many combinations of coordinates.
  std::optional<std::vector<int>> profile(int64_t position) const;

 private:
  // The indices that a rank has of one tensor dim.
  struct Part {
    int64_t begin = 0;   // smallest index
    int64_t end = 0;     // largest index + 1
    int64_t length = 0;  // number of indices
    const IntervalList* list = nullptr;
    bool has_gaps = false;  // the list has several intervals
  };
  using PartsOfRank = std::vector<Part>;  // by tensor dim
  // The last result of parts_at().
  struct CachedParts {
    int64_t position = -1;
    PartsOfRank parts;
  };

  // Parts of other ranks on one tensor dim that intersect one rank's part in equal numbers of indices and runs.
  struct OverlapClass {
    Part part;          // one of these parts
    int64_t times = 0;  // number of these parts
    SharedRuns shared;  // summary of the indices that are in both parts
    PieceList pieces;   // only if rounds need slices and there are gaps
  };
  // A search for the parts of other ranks that overlap a part of the rank at a position, on one tensor dim.
  struct OverlapSearch {
    int tensor_dim;
    int64_t position;
    bool others_hold;  // true: the position receives, other ranks hold. false: the position sends, other ranks need
    Part own_part;     // the part that the position needs (if others_hold) or holds
    std::vector<OverlapClass> classes;  // result
  };

  // Number of peers by the number of exchanged elements, capped at the number of rounds.
  using ByLength = std::map<int64_t, int64_t>;
  // Counts of the ranks, among ranks that differ only in some mesh dims, whose parts of one tensor dim overlap a list.
  struct PeerCounts {
    int64_t count = 0;     // number of these ranks
    int64_t elements = 0;  // number of common indices, summed over these ranks
    ByLength by_length;
  };
  // The contribution of a tensor dim to a rank's traffic: a factor of each count.
  struct Factors {
    int64_t own = 1;        // elements that the rank both holds and needs
    int64_t needed = 1;     // elements that the rank needs
    int64_t sent = 1;       // elements that ranks need of this rank's part, summed over ranks, itself included
    int64_t sources = 1;    // ranks that hold elements that this rank needs, itself included
    int64_t receivers = 1;  // ranks that need elements that this rank holds, itself included
  };
  // Caches of counts for all ranks, on one tensor dim.
  struct CountsOfDim {
    ByCoordinates<PeerCounts> sources;
    ByCoordinates<PeerCounts> receivers;
    ByCoordinates<Factors> factors;  // only with one round
  };

  struct Adjacency;  // which members of a group have elements for which (mesh_components.cpp)

  const Mesh& mesh() const { return before_.mesh(); }
  // Returns the coordinates of a position. Valid until the next call.
  const Coordinates& coordinates(int64_t position) const;

  // Counts (mesh_exchange.cpp)
  // Returns the traffic of a rank that keeps `own` elements. `sends`: false if other replicas send its part.
  Traffic regular_traffic(int64_t own, bool sends) const;
  // Return the traffic of a rank without digits, from its peers on each tensor dim: in one round, and in several.
  Traffic traffic_by_dims(int64_t position) const;
  Traffic traffic_by_dims_in_rounds(const Coordinates& at) const;
  // Returns the traffic of a rank whose group shares the sending, from all pairs of members.
  Traffic traffic_by_pairs(int64_t position) const;
  CountsOfDim& counts_of_dim(int tensor_dim) const;  // empty at first
  // Returns the factors of a tensor dim for the rank at these coordinates.
  Factors factors_at(int tensor_dim, const Coordinates& at) const;
  // Return counts of the ranks that hold elements of `needed`, and of the ranks that need elements of `held`, among
  // ranks that differ from the coordinates `at` only in `cutting_dims_`.
  const PeerCounts& source_counts(int tensor_dim, const Coordinates& at, const IntervalList& needed) const;
  const PeerCounts& receiver_counts(int tensor_dim, const Coordinates& at, const IntervalList& held) const;
  // Returns counts of the ranks whose parts of a layout overlap a list, among ranks that differ from the coordinates
  // `at` only in `varying`.
  PeerCounts count_peers(const Layout& layout, int tensor_dim, const Coordinates& at, MeshDimSet varying,
                         const IntervalList& list) const;
  // Returns the number of messages to (or from) all peers in all rounds together, from the counts of each tensor dim.
  int64_t num_messages(const std::vector<const PeerCounts*>& by_dim) const;
  // Returns the number of parts of each length of a tensor dim, keyed by the length, in the group that contains a
  // position. Each part counts once, however many members hold it.
  std::map<int64_t, int64_t> part_lengths_in_group(const Layout& layout, int tensor_dim, int64_t position) const;
  // Calls visit(position of the peer, range) for each message, by ascending rank of the peer. The range is within the
  // common elements of both parts.
  template <typename Visit>
  void for_each_message(Rank rank, Direction direction, const Visit& visit) const;

  // Groups (mesh_components.cpp)
  // Return the adjacency of a group: from digits or parts if each replica serves its own receivers, and from all pairs
  // of members if replicas share the sending.
  Adjacency adjacency_of(const Group& group) const;
  Adjacency adjacency_by_pairs(const Group& group) const;
  bool find_all_exchange(Group& group) const;  // computes all_exchange()

  // Extents (mesh_pairs.cpp)
  // Returns a summary of the indices that are in both parts.
  static SharedRuns shared_runs(const Part& held, const Part& needed);
  // Returns a rank's part of a tensor dim, and all its parts. `last` caches the result, which is valid until the next
  // call with another position.
  Part part(KnownParts& parts, int tensor_dim, int64_t position) const;
  const PartsOfRank& parts_at(KnownParts& parts, CachedParts& last, int64_t position) const;
  // Return the parts that the rank holds before the move and needs after it.
  const PartsOfRank& held(int64_t position) const { return parts_at(held_, last_held_, position); }
  const PartsOfRank& needed(int64_t position) const { return parts_at(needed_, last_needed_, position); }
  // Returns false if `to` reads from another replica than `from`.
  bool may_send(int64_t from, int64_t to) const { return reads_from(before_, group_dims_, from, to); }
  // Return the extent of all common elements of two parts. `runs_of(tensor_dim)` returns the common runs of a tensor
  // dim.
  Extent common_extent(const PartsOfRank& held, const PartsOfRank& needed) const;
  template <typename RunsOf>
  Extent common_extent(const PartsOfRank& held, const PartsOfRank& needed, const RunsOf& runs_of) const;
  // Returns a message, divided into rounds. `whole` is the extent of all common elements of the two parts, and `range`
  // the part of them that the message has.
  Transfer divided_into_rounds(const PartsOfRank& held, const PartsOfRank& needed, const Extent& whole,
                               Interval range) const;
  // Returns the overlaps of a rank's part of a tensor dim (needed if `others_hold`, else held) with the parts of the
  // members of its group that have its coordinates on the replica dims, itself included.
  const std::vector<OverlapClass>& overlap_classes(int tensor_dim, int64_t position, bool others_hold) const;
  // Returns an empty cache for overlap_classes().
  ByCoordinates<std::vector<OverlapClass>> empty_overlap_cache(int tensor_dim, bool others_hold) const;
  // Adds to `search.classes` the overlaps with the parts into which `cuts` divide a list, each counted `times` times.
  // Example: 12 indices, cut into chunks over a=6, and the rank's part [3, 11). The chunks [2, 4) to [10, 12) overlap
  // it. The first and the last have one common index each, and the three between them have two. Only the first, the
  // second and the last are visited, the second with a factor of 3.
  void add_overlaps_of_parts(const IntervalList& list, std::span<const Cut> cuts, int64_t times,
                             OverlapSearch& search) const;
  // Adds the overlap with one part of a peer, counted `times` times, to an equal class or as a new one.
  void add_overlap(const IntervalList& peer_part, int64_t times, OverlapSearch& search) const;
  // Returns a number that stands for all values of one tensor dim, except offsets, on which extents of messages depend.
  int profile_in(int tensor_dim, int64_t position) const;
  // Return the messages that a rank receives (if `others_hold`) or sends. message_classes() counts equal messages
  // together, without shared sending. member_messages() has one entry for each other member, with shared sending.
  const std::vector<MessageClass>& message_classes(int64_t position, bool others_hold) const;
  const std::vector<MessageClass>& member_messages(const Group& group, int64_t position, bool others_hold) const;

  const Layout& before_;
  const Layout& after_;
  const MeshDimSet group_dims_;
  const ReplicaPolicy policy_;
  const int64_t rounds_;
  const size_t ndim_;
  const MeshDimSet cutting_dims_;  // the group's mesh dims that cut `before`: members hold different parts there
  const MeshDimSet replica_dims_;  // the group's other mesh dims
  // Number of ranks that differ only in mesh dims of cutting_dims_ that do not cut `after`. They need equal parts.
  const int64_t receivers_per_part_;
  SharedElements kept_elements_;  // elements in both parts of each rank

  bool is_regular_ = false;
  std::vector<Matching::Common> ties_;  // digits that both layouts fix, by different coordinates
  // Counts of a regular exchange. They include what a rank keeps.
  int64_t needed_by_each_ = 0;    // elements that every rank needs
  int64_t sources_ = 1;           // ranks that a rank receives from
  int64_t message_elements_ = 1;  // elements of each message
  int64_t sent_elements_ = 0;     // elements that a sender sends
  // Ties in which the mesh dim of `after` replicates `before`. A rank that disagrees in one of them sends nothing,
  // because receivers read from other replicas.
  std::vector<Matching::Common> replica_ties_;

  // Caches. Each is filled on first use.
  mutable std::vector<Rank> ranks_;
  mutable KnownParts held_;
  mutable KnownParts needed_;
  mutable int64_t position_ = -1;  // position of coordinates_
  mutable Coordinates coordinates_;
  mutable std::vector<CountsOfDim> counts_;                        // by tensor dim
  mutable std::unordered_map<int64_t, Traffic> traffic_of_pairs_;  // with shared sending: filled for a group at once
  mutable std::unordered_map<int64_t, Group> groups_;              // by least position
  mutable CachedParts last_held_;
  mutable CachedParts last_needed_;
  mutable std::optional<Transfer> any_transfer_;  // of some pair, in a regular exchange
  mutable std::vector<MessageClass> classes_;     // result of the last classes_sent() or classes_received()
  mutable std::vector<const std::vector<OverlapClass>*> overlapping_;  // scratch of message_classes(), by tensor dim
  mutable std::vector<size_t> combination_;                            // scratch of message_classes()
  mutable PartsOfRank others_;                                         // scratch of message_classes()
  mutable std::deque<IntervalList> overlap_lists_;                     // lists of overlaps
  mutable std::map<std::vector<int64_t>, std::vector<Extent>> round_extents_;  // keys: all values that rounds depend on
  // Two entries per tensor dim: for held parts (peers receive), then for needed parts (peers send).
  mutable std::vector<ByCoordinates<std::vector<OverlapClass>>> overlap_classes_;
  mutable std::vector<ByCoordinates<int>> profiles_;                         // by tensor dim
  mutable std::vector<std::map<std::vector<int64_t>, int>> known_profiles_;  // by tensor dim: number of each profile
};

}  // namespace shardwright
