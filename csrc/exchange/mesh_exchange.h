// The exchange on one mesh, within groups of ranks that differ only in some mesh dims.
//
// If several ranks of a group hold the same part (the group has mesh dims that do not cut the layout before), a
// receiver reads from the replica that has the receiver's coordinates on these *replica dims*. Alternatively the
// replicas share the sending: the elements that the receivers need of a part are arranged in a queue by receiver
// position, and every replica sends one range of the queue. All ranges of a group have the same length, the least that
// covers every queue: shorter ranges would split more messages without relieving the busiest rank.
//
// Tensor dims are cut by different mesh dims, so the common elements of two ranks are a product over tensor dims. The
// factors are cached by the coordinates on which they depend, and groups are cached too. If digits describe both
// layouts (digits.h), the exchange is *regular*: all messages are equal except for peers and offsets, and counts are
// closed forms. In names, `held` is the part of a rank by the layout before the move, `needed` its part by the layout
// after. A *tie* is a digit that both layouts fix, by different coordinates: two ranks can exchange data only if they
// agree on its value.
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

// The elements of a message in one round: their number, and the offset of the first one in the row-major parts of the
// sender (held) and the receiver (needed). On each side they may be contiguous, in the order of the message.
struct Extent {
  int64_t count = 0;
  int64_t first_held = 0;
  int64_t first_needed = 0;
  bool is_contiguous_held = false;
  bool is_contiguous_needed = false;
};

// Returns true if `receiver` reads the part of `sender` from `sender` and not from another replica. Both are in one
// group.
bool reads_from(const Layout& before, MeshDimSet group_dims, int64_t sender, int64_t receiver);

// The messages of a group whose replicas share the sending.
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
  // The begin of a receiver's section of a queue: the number of elements, and of receivers, before it.
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
  // per combination of coordinates; with sharing O(members squared) per group.
  Traffic traffic_at(int64_t position) const;
  // Returns an upper bound on the traffic of every rank; nullopt unless the exchange is regular.
  std::optional<Traffic> upper_bound() const;
  // Return the number of elements that a rank holds before the move, and the number that it needs after it.
  int64_t num_held(int64_t position) const { return held_.num_elements(coordinates(position)); }
  int64_t num_needed(int64_t position) const { return needed_.num_elements(coordinates(position)); }
  // Returns the number of messages that a rank sends in a reduce-scatter: to each other member of its group that needs
  // some of its elements.
  int64_t reduce_scatter_messages(int64_t position) const;
  // Returns true if all members of the group around a rank hold equally many elements.
  bool hold_equally(int64_t position) const;
  // Returns the number of members of a rank's group that need each number of elements, keyed by the number of elements.
  // Does not visit members.
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
    int64_t least = 0;  // the member whose coordinates on the group's mesh dims are 0
    int64_t size = 1;
    std::vector<int64_t> positions;        // by ascending rank; only set by group()
    std::optional<SharedSending> sending;  // with sharing
    // Set by connect(): the connected components of the members that exchange data, each by ascending rank, and the
    // component of each member.
    std::vector<std::vector<size_t>> components;
    std::vector<bool> all_pairs_exchange;  // by component: each member has elements for each other member
    std::vector<size_t> component_of;
    std::optional<bool> all_exchange;  // result of all_exchange()
    std::optional<bool> is_even;       // result of is_even()
  };

  // Return the group that contains this position. Groups are cached. group() also fills `positions` and `sending`,
  // group_without_members() does not.
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
    Transfer() = default;
    Transfer(const Extent& whole, const std::vector<Extent>* rounds) : whole_(whole), rounds_(rounds) {}
    int64_t count() const { return whole_.count; }  // elements of all rounds
    Extent in_round(int64_t round) const;
    bool is_contiguous_in_some_round() const;  // true if elements are contiguous in some round, on some side

   private:
    Extent whole_;
    const std::vector<Extent>* rounds_ = nullptr;  // offsets are relative to whole_; null: one round
  };
  // Returns the transfer between two positions of one group. With sharing, group() must have been called before.
  Transfer transfer(const Group& group, int64_t from, int64_t to) const;
  // Returns all elements that one rank holds and another needs, whichever replica sends them: the contribution to a
  // reduction.
  Transfer full_transfer(int64_t from, int64_t to) const;
  // Returns the elements that a rank holds before and needs after.
  Extent kept_extent(int64_t position) const;
  // Returns one transfer of a rank, sent or received, in a regular exchange. All others have the same sizes. The rank
  // must have a transfer.
  const Transfer& any_transfer(int64_t position) const;

  // Equal messages that a rank sends or receives. A class may count the elements that the rank keeps as a message; then
  // a last class with `times` = -1 subtracts that message.
  struct MessageClass {
    Transfer transfer;
    int64_t times = 0;  // number of these messages
  };
  // Return all messages of a rank by class. The result is valid until the next call.
  const std::vector<MessageClass>& classes_sent(const Group& group, int64_t position) const;
  const std::vector<MessageClass>& classes_received(const Group& group, int64_t position) const;

  // Returns one number for each tensor dim. Two ranks have equal profiles only if their messages agree in number,
  // lengths and contiguity. Returns nullopt with several rounds, if replicas share the sending, or if the mesh dims
  // that cut a tensor dim have too many combinations of coordinates.
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

  // Parts of other ranks that intersect one rank's part in equal numbers of indices and runs.
  struct OverlapClass {
    Part part;          // one of these parts
    int64_t times = 0;  // number of these parts
    SharedRuns shared;  // summary of the indices that are in both parts
    PieceList pieces;   // only if rounds need slices and there are gaps
  };
  // The overlaps with one part of a tensor dim: the part that the rank at a position needs (if `others_hold`) or holds.
  struct OverlapSearch {
    int tensor_dim;
    int64_t position;
    bool others_hold;  // true: the position receives, other ranks hold. false: the position sends, other ranks need
    Part own_part;
    std::vector<OverlapClass> classes;  // result
  };

  // Number of peers by the number of exchanged elements, capped at the number of rounds.
  using ByLength = std::map<int64_t, int64_t>;
  // For one tensor dim, over the ranks that differ only in `cutting_dims_`: the number of ranks that hold needed
  // elements (or that need held elements), and the sum of these elements.
  struct PeerCounts {
    int64_t count = 0;
    int64_t elements = 0;
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
  // Caches of the peers of all ranks on one tensor dim.
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
  CountsOfDim& counts_of_dim(int tensor_dim) const;
  // Returns the factors of a tensor dim for the rank at these coordinates.
  Factors factors_at(int tensor_dim, const Coordinates& at) const;
  // Return the ranks that hold elements of `needed`, and the ranks that need elements of `held`, on one tensor dim.
  const PeerCounts& source_counts(int tensor_dim, const Coordinates& at, const IntervalList& needed) const;
  const PeerCounts& receiver_counts(int tensor_dim, const Coordinates& at, const IntervalList& held) const;
  // Returns the ranks whose parts of a layout intersect a list, among ranks that differ only in `varying`.
  PeerCounts count_peers(const Layout& layout, int tensor_dim, const Coordinates& at, MeshDimSet varying,
                         const IntervalList& list) const;
  // Returns the number of messages, in all rounds together, to or from the peers with these parts of each tensor dim.
  int64_t num_messages(const std::vector<const PeerCounts*>& by_dim) const;
  std::map<int64_t, int64_t> part_lengths_in_group(const Layout& layout, int tensor_dim, int64_t position) const;
  template <typename Visit>
  void for_each_message(Rank rank, Direction direction, const Visit& visit) const;

  // Groups (mesh_components.cpp)
  Adjacency adjacency_of(const Group& group) const;
  Adjacency adjacency_by_pairs(const Group& group) const;
  bool find_all_exchange(Group& group) const;

  // Extents (mesh_pairs.cpp)
  // Returns a summary of the indices that are in both parts.
  static SharedRuns shared_runs(const Part& held, const Part& needed);
  Part part(KnownParts& parts, int tensor_dim, int64_t position) const;
  // Returns a rank's parts. The result is valid until the next call with another position.
  const PartsOfRank& parts_at(KnownParts& parts, CachedParts& at, int64_t position) const;
  // Return the parts that the rank holds before the move and needs after it.
  const PartsOfRank& held(int64_t position) const { return parts_at(held_, last_held_, position); }
  const PartsOfRank& needed(int64_t position) const { return parts_at(needed_, last_needed_, position); }
  // Returns false if `to` reads from another replica than `from`.
  bool may_send(int64_t from, int64_t to) const { return reads_from(before_, group_dims_, from, to); }
  // Return the common elements of two parts. `runs_of(tensor_dim)` returns the common runs of a tensor dim.
  Extent common_extent(const PartsOfRank& held, const PartsOfRank& needed) const;
  template <typename RunsOf>
  Extent common_extent(const PartsOfRank& held, const PartsOfRank& needed, const RunsOf& runs_of) const;
  // Returns a message, divided into rounds. `whole` is the extent of all common elements of the two parts, and `range`
  // the part of them that the message has.
  Transfer divided_into_rounds(const PartsOfRank& held, const PartsOfRank& needed, const Extent& whole,
                               Interval range) const;
  // Returns the overlaps of the rank's part of a tensor dim with the parts of the members of its group that have its
  // coordinates on the replica dims, itself included.
  const std::vector<OverlapClass>& overlap_classes(int tensor_dim, int64_t position, bool others_hold) const;
  // Returns an empty cache for overlap_classes().
  ByCoordinates<std::vector<OverlapClass>> empty_overlap_cache(int tensor_dim, bool others_hold) const;
  // Adds to `search.classes` the overlaps with the parts into which `cuts` divide a list, each counted `times` times.
  void add_overlaps_of_parts(const IntervalList& list, std::span<const Cut> cuts, int64_t times,
                             OverlapSearch& search) const;
  void add_overlap(const IntervalList& peer_indices, int64_t times, OverlapSearch& search) const;
  int profile_in(int tensor_dim, int64_t position) const;
  // Return the messages that a rank receives (if `others_hold`) or sends: by class without sharing, and one by one for
  // each other member with sharing.
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
  const int64_t
      receivers_per_part_;        // number of ranks that differ only in group dims that cut `before` and not `after`
  SharedElements kept_elements_;  // elements in both parts of each rank

  bool is_regular_ = false;
  std::vector<Matching::Common> ties_;  // digits that both layouts fix, by different coordinates
  // Counts of a regular exchange. They include what a rank keeps.
  int64_t needed_by_each_ = 0;    // elements that every rank needs
  int64_t sources_ = 1;           // ranks that a rank receives from
  int64_t message_elements_ = 1;  // elements of each message
  int64_t sent_elements_ = 0;     // elements that a sender sends
  // Ties in which the mesh dim of `after` replicates `before`. A rank that disagrees in one sends nothing, because
  // receivers read from other replicas.
  std::vector<Matching::Common> replica_ties_;

  // Caches. Each is filled on first use.
  mutable std::vector<Rank> ranks_;
  mutable KnownParts held_;
  mutable KnownParts needed_;
  mutable int64_t position_ = -1;  // position of coordinates_
  mutable Coordinates coordinates_;
  mutable std::vector<CountsOfDim> counts_;                        // by tensor dim
  mutable std::unordered_map<int64_t, Traffic> traffic_of_pairs_;  // with sharing: filled for a group at once
  mutable std::unordered_map<int64_t, Group> groups_;              // by least position
  mutable CachedParts last_held_;
  mutable CachedParts last_needed_;
  mutable std::optional<Transfer> any_transfer_;  // the transfer of any pair of a regular exchange
  mutable std::vector<MessageClass> classes_;     // result of the last classes_sent() or classes_received()
  mutable std::vector<const std::vector<OverlapClass>*> overlapping_;  // scratch of message_classes(), by tensor dim
  mutable std::vector<size_t> combination_;                            // scratch of message_classes()
  mutable PartsOfRank others_;                                         // scratch of message_classes()
  mutable std::deque<IntervalList> overlap_lists_;                     // lists of overlaps
  mutable std::map<std::vector<int64_t>, std::vector<Extent>> round_extents_;  // keys: all values that rounds depend on
  mutable std::vector<ByCoordinates<std::vector<OverlapClass>>>
      overlap_classes_;                               // two per tensor dim: receivers, then senders
  mutable std::vector<ByCoordinates<int>> profiles_;  // by tensor dim
  mutable std::vector<std::map<std::vector<int64_t>, int>> known_profiles_;  // by tensor dim: number of each profile
};

}  // namespace shardwright
