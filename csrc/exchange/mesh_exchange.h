// The exchange on one mesh, within groups of ranks that differ only in some mesh dims (exchange/group_move.h).
//
// Ranks that hold the same part are its replicas. By default a receiver reads from the replica that has the receiver's
// coordinates on the replica dims. Alternatively the replicas share the sending (exchange/shared_sending.h).
//
//   RegularCounts     counts in closed form, if digits describe both layouts: then all messages are equal except for
//                     peers and offsets, and the exchange is *regular*
//   CountsByDim       counts of other exchanges, from the peers on each tensor dim
//   PartTransfers     the message between two ranks: size, offsets, contiguity
//   MessageClasses    classes of equal messages of a rank, without visiting its peers
//   Components        the connected components of a group
//
// Tensor dims are cut by different mesh dims, so the common elements of two ranks are a product over tensor dims. The
// factors are cached by the coordinates on which they depend, and groups are cached too.
//
// Thread safety: an exchange caches results and must be used by one thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "exchange/components.h"
#include "exchange/counts_by_dim.h"
#include "exchange/exchange.h"
#include "exchange/message_classes.h"
#include "exchange/regular_counts.h"
#include "exchange/shared_sending.h"

namespace shardwright {

class MeshExchange final : public Exchange {
 public:
  // Maximum size of a group with shared sending, which visits every pair. Callers must keep to it; it is not checked.
  static constexpr int64_t kMaxSharingGroup = 64;

  // The layouts must be on one mesh and outlive the exchange. `policy` must not be kNodeLocal. A rank exchanges
  // messages only with ranks that differ from it in `group_dims` alone, in `rounds` rounds. Counts by position are
  // right only if `group_dims` has all mesh dims by which the layouts cut differently. The inherited traffic() and
  // maxima() count the rounds of their own argument.
  MeshExchange(const Layout& before, const Layout& after, MeshDimSet group_dims,
               ReplicaPolicy policy = ReplicaPolicy::kAligned, int64_t rounds = 1);

  const std::vector<Rank>& ranks() const override;
  bool communicates() const override;
  std::vector<MessageSize> message_sizes(Rank rank, Direction direction) const override;
  std::vector<Message> messages(Rank rank, Direction direction) const override;
  std::optional<Region> region(Rank rank, Direction side) const override;
  std::vector<LocalAxis> local_axes(Rank rank, Direction side) const override;

  // ---- Counts, by position on the mesh

  // Returns the traffic of a rank in all rounds. Takes O(digits) if the exchange is regular; else O(intersecting parts)
  // per combination of coordinates; with shared sending O(members).
  Traffic traffic_at(int64_t position) const;
  // Returns an upper bound on the traffic of every rank; nullopt unless the exchange is regular.
  std::optional<Traffic> upper_bound() const;
  // Return the number of elements that a rank holds before the move, and the number that it needs after it.
  int64_t num_held(int64_t position) const { return move_.held.num_elements(position); }
  int64_t num_needed(int64_t position) const { return move_.needed.num_elements(position); }
  // Returns the number of messages that a rank sends in a reduce-scatter by messages (CountsByDim).
  int64_t reduce_scatter_messages(int64_t position) const { return counts_by_dim().reduce_scatter_messages(position); }
  // Returns the number of members of a rank's group by the number of elements that they need. Does not visit members.
  std::map<int64_t, int64_t> members_by_need(int64_t position) const;
  // Returns the number of elements that the member at position `from` of a group sends a different member.
  int64_t elements_between(int64_t from, int64_t to) const { return transfer(group(from), from, to).count(); }
  // Returns true if digits describe both layouts and replicas do not share the sending. Then all messages are equal
  // except for peers and offsets.
  bool is_regular() const { return regular_.has_value(); }
  // Returns true if the exchange is regular and all pairs of members with equal coordinates on the replica dims
  // exchange data.
  bool is_regular_and_full() const { return regular_ && !regular_->has_ties(); }

  // ---- Groups

  // A group, with facts about it that are computed on first use. Members are numbered by ascending rank.
  struct Group {
    int64_t least = 0;                     // position of the member whose coordinates on the group's mesh dims are 0
    int64_t size = 1;                      // number of members
    std::vector<int64_t> positions;        // by ascending rank; only set by group()
    std::optional<SharedSending> sending;  // set by group() if replicas share the sending
    std::optional<Components> components;  // result of components()
    std::optional<bool> all_exchange;      // result of all_exchange()
    std::optional<bool> is_even;           // result of is_even()
  };

  // Return the group that contains this position. Groups are cached. group() fills `positions` and `sending`;
  // group_without_members() only `least` and `size`, in a time that does not depend on the size.
  Group& group(int64_t position) const;
  Group& group_without_members(int64_t position) const;
  // Returns the number of the member at a position. `group` must be a result of group() that contains it.
  static size_t index_of(const Group& group, int64_t position);
  // Returns the connected components of the members that exchange data. Visits every pair. Here and in all_exchange(),
  // group() must have been called for `group` before.
  const Components& components(Group& group) const;
  // Returns true if every member has elements for every other member.
  bool all_exchange(Group& group) const;
  // Returns true if all members hold equally many elements, more than 0.
  bool is_even(Group& group) const;

  // ---- Messages between members

  // Returns the message from one member of a group to another, given by position; without elements if there is none.
  // With shared sending, group() must have been called before. In a regular exchange whose elements are not contiguous,
  // the offsets may be those of another pair.
  Transfer transfer(const Group& group, int64_t from, int64_t to) const;
  // Returns the message of all elements that one rank holds and another needs, as if `to` read them from `from` and
  // not from another replica. In a reduction this is the contribution of `from` to the part of `to`.
  Transfer full_transfer(int64_t from, int64_t to) const { return transfers_.between(from, to); }
  // Returns the extent of the elements that a rank holds before and needs after.
  Extent kept_extent(int64_t position) const { return transfers_.kept(position); }
  // Returns one message of a regular exchange, possibly of other ranks: all messages have the same sizes. The rank must
  // send or receive one; otherwise throws InvariantError, unless a message is cached.
  const Transfer& any_transfer(int64_t position) const;
  // Returns all messages that a rank sends or receives, by class. With shared sending, each other member has a class of
  // its own, whose message may have no elements.
  std::vector<MessageClass> message_classes(const Group& group, int64_t position, Direction direction) const;
  // Returns a rank's profile: if two ranks have equal profiles, their messages agree in number, lengths and contiguity.
  // Returns nullopt with several rounds, if replicas share the sending, or if the mesh dims that cut a tensor dim have
  // too many combinations of coordinates.
  std::optional<std::vector<int>> profile(int64_t position) const;

 private:
  const Mesh& mesh() const { return move_.mesh(); }
  bool shares_sending() const { return policy_ != ReplicaPolicy::kAligned; }
  // Return the objects below, which are made on first use.
  CountsByDim& counts_by_dim() const { return counts_by_dim_ ? *counts_by_dim_ : counts_by_dim_.emplace(move_); }
  MessageClasses& classes() const { return classes_ ? *classes_ : classes_.emplace(move_, transfers_); }

  // Calls visit(position of the peer, range) for each message, by ascending rank of the peer. The range is within the
  // common elements of both parts.
  template <typename Visit>
  void for_each_message(Rank rank, Direction direction, const Visit& visit) const;
  // Returns true if the rank at one position has elements for the rank at another position of the same group.
  bool sends_to(const Group& group, int64_t from, int64_t to) const;
  // Returns the conditions under which a member of a group has elements for another.
  std::vector<OverlapCondition> conditions(const Group& group) const;
  bool find_all_exchange(Group& group) const;  // computes all_exchange()

  const ReplicaPolicy policy_;
  const std::optional<RegularCounts> regular_;  // only if the exchange is regular
  mutable GroupMove move_;
  mutable PartTransfers transfers_{move_};
  // Caches. Each is filled on first use.
  mutable std::optional<CountsByDim> counts_by_dim_;
  mutable std::optional<MessageClasses> classes_;
  mutable std::vector<Rank> ranks_;
  mutable std::unordered_map<int64_t, Group> groups_;  // by least position
  mutable std::optional<Transfer> any_transfer_;       // of some pair, in a regular exchange
};

}  // namespace shardwright
