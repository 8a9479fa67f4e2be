// The exchange on one mesh, within groups of ranks that differ in some mesh dims only.
//
// If several ranks of a group hold the same part (mesh dims of the group that do not cut the layout before), a receiver
// reads from the replica with its own coordinates on those mesh dims. Alternatively the replicas share the sending: the
// receivers of a part are lined up by position, each with what it needs of the part, and every replica serves a stretch
// of this line. All stretches of a group have the same length, the least with which every line is served; shorter ones
// would split more messages without relieving the worst rank.
//
// Tensor dims are cut by different mesh dims, so what pairs of ranks have in common is a product over tensor dims. It
// is kept by the coordinates on which it depends, and groups are kept too: an exchange is for one thread, and remembers
// what it computed. Where digits describe both layouts (digits.h), the exchange is *regular*: all messages are alike
// but for their peers and offsets, and counts are closed forms.
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
#include "exchange/sharing.h"

namespace shardwright {

// The elements of a message in one round: their number, and the offset of the first one in the row-major parts that the
// sender holds and that the receiver needs. They may be contiguous there, in the order of the message.
struct Extent {
  int64_t count = 0;
  int64_t first_held = 0;
  int64_t first_needed = 0;
  bool is_contiguous_held = false;
  bool is_contiguous_needed = false;
};

// Returns true if `receiver` reads the part of `holder` from it, and not from another replica; both are in one group.
bool reads_from(const Layout& before, MeshDimSet group_dims, int64_t holder, int64_t receiver);

// The messages of a group whose replicas share the sending.
class SharedSending {
 public:
  SharedSending(const Layout& before, const Layout& after, MeshDimSet group_dims, Sharing sharing,
                const std::vector<int64_t>& group);

  // The message from the `from`-th member to the `to`-th, as a range of the elements that the sender holds and the
  // receiver needs, in packed order.
  Interval range(size_t from, size_t to) const;

 private:
  Sharing sharing_;
  std::vector<size_t> part_;   // by member: the first member that holds the same
  std::vector<int64_t> turn_;  // by member: its index among the members that hold the same
  int64_t replicas_ = 1;
  // By part and receiver: the receiver's place in the line, in elements and in receivers; one more entry for the end.
  struct Place {
    int64_t elements = 0;
    int64_t receivers = 0;
  };
  std::vector<std::vector<Place>> line_;
  Place stretch_;
};

class MeshExchange final : public Exchange {
 public:
  // Larger groups do not share their sending, because that needs a visit to every pair.
  static constexpr int64_t kMaxSharingGroup = 64;

  // The layouts, on one mesh, must outlive the exchange. `rounds`: those that messages are sent in.
  MeshExchange(const Layout& before, const Layout& after, MeshDimSet group_dims, Sharing sharing = Sharing::kNone,
               int64_t rounds = 1);

  const std::vector<Rank>& ranks() const override;
  bool communicates() const override;
  int64_t num_elements(Rank rank, Direction direction) const override;
  Traffic traffic(Rank rank, int64_t rounds = 1) const override;
  std::vector<MessageSize> message_sizes(Rank rank, Direction direction) const override;
  std::vector<Message> messages(Rank rank, Direction direction) const override;
  std::optional<Region> region(Rank rank, Direction side) const override;
  std::vector<LocalAxis> local_axes(Rank rank, Direction side) const override;

  // ---- Counts, by position on the mesh

  // The traffic of a rank in all rounds. Costs O(digits) if the exchange is regular; else O(parts that intersect), once
  // for each combination of coordinates; with sharing O(members squared), once for each group.
  Traffic traffic_at(int64_t position) const;
  // An upper bound for all ranks; nothing if digits do not determine it.
  std::optional<Traffic> at_most() const;
  // The number of elements that a rank holds before, and needs after.
  int64_t num_held(int64_t position) const { return held_.num_elements(coordinates(position)); }
  int64_t num_needed(int64_t position) const { return needed_.num_elements(coordinates(position)); }
  // The number of messages that a rank sends in a reduce-scatter: to all others of its group that keep something.
  int64_t messages_to_keepers(int64_t position) const;
  // Returns whether all members of the group around a rank hold equally many elements.
  bool hold_equally(int64_t position) const;
  // The number of members of the group around a rank by the elements that they need, without examining members.
  std::map<int64_t, int64_t> members_by_need(int64_t position) const;
  // The number of elements that one member of a group sends another.
  int64_t elements_between(int64_t from, int64_t to) const;
  // Returns whether all pairs that exchange data do it alike except for offsets.
  bool is_regular() const { return is_regular_; }
  // Returns whether in addition all pairs on one replica exchange data.
  bool is_regular_and_full() const { return is_regular_ && ties_.empty(); }

  // ---- Groups

  struct Group {
    int64_t least = 0;  // the member whose coordinates on the group's mesh dims are 0
    int64_t size = 1;
    std::vector<int64_t> positions;        // by ascending rank; only set by group()
    std::optional<SharedSending> sending;  // with sharing
    // Only after connect(): the connected components of "exchanges data with", each by ascending rank. `component_of`
    // has the index of each member's component.
    std::vector<std::vector<size_t>> components;
    std::vector<bool> all_pairs_exchange;  // by component
    std::vector<size_t> component_of;
    std::optional<bool> all_exchange;  // set on first use, as is_even
    std::optional<bool> is_even;
  };

  // The group that contains this position. Groups are kept. group() also lists the members, around() does not.
  Group& group(int64_t position) const;
  Group& around(int64_t position) const;
  static size_t index_of(const Group& group, int64_t position);
  // Computes the connected components. Examines every pair.
  void connect(Group& group) const;
  // Returns whether the rank at one position has something for the rank at another position of the same group.
  bool sends_to(const Group& group, int64_t from, int64_t to) const;
  // Returns whether every member has something for every other one.
  bool all_exchange(Group& group) const {
    return group.all_exchange ? *group.all_exchange : *(group.all_exchange = find_all_exchange(group));
  }
  // Returns whether all members hold something, and equally much.
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
    int64_t count() const { return whole_.count; }
    Extent in_round(int64_t round) const;
    bool has_runs() const;  // in some round, on some side

   private:
    Extent whole_;
    const std::vector<Extent>* rounds_ = nullptr;  // offsets are relative to the whole's; null: there is one round
  };
  // The transfer between two positions of one group. With sharing, group() must have been called before.
  Transfer transfer(const Group& group, int64_t from, int64_t to) const;
  // Everything that one rank holds and another needs, whoever sends it: its contribution to a reduction.
  Transfer share(int64_t from, int64_t to) const;
  // The elements that a rank holds before and also needs after.
  Extent own(int64_t position) const;
  // Any one of a rank's transfers, in either direction, of a regular exchange. The rank must have some.
  const Transfer& any_transfer(int64_t position) const;

  // Everything that a rank sends or receives, with equal messages counted together; its own share is not included.
  struct MessageClass {
    Transfer transfer;
    int64_t times = 0;
  };
  // Valid until the next call.
  const std::vector<MessageClass>& sends(const Group& group, int64_t position) const;
  const std::vector<MessageClass>& receives(const Group& group, int64_t position) const;

  // Equal for two ranks only if messages to and from them are equally many, equally long, and contiguous or not alike:
  // one number for each tensor dim. Nothing with several rounds or with sharing, and where very many combinations of
  // coordinates cut a tensor dim.
  std::optional<std::vector<int>> profile(int64_t position) const;

 private:
  // The indices that a rank has of one tensor dim.
  struct Part {
    int64_t begin = 0;
    int64_t end = 0;
    int64_t length = 0;
    const IntervalList* list = nullptr;
    bool has_gaps = false;
  };
  using PartsOfRank = std::vector<Part>;  // by tensor dim
  struct PartsAt {
    int64_t position = -1;
    PartsOfRank parts;
  };

  // Parts of other ranks that intersect one part in the same way.
  struct Overlap {
    Part part;          // one of them
    int64_t times = 0;  // their number
    SharedRuns shared;
    PieceList pieces;  // if rounds need slices and there are gaps
  };
  // Those with one part of a tensor dim, which the rank at some position needs or holds.
  struct Overlaps {
    int tensor_dim;
    int64_t position;
    bool others_hold;
    Part mine;
    std::vector<Overlap> found;
  };

  // By number of elements, capped at the number of rounds: how many ranks exchange so many with this rank.
  using ByLength = std::map<int64_t, int64_t>;
  // For one tensor dim, over the ranks that differ only in `cutting_`: how many of them hold something of what is
  // needed, or need something of what is held, and how much all do together.
  struct Peers {
    int64_t count = 0;
    int64_t elements = 0;
    ByLength by_length;
  };
  // The contribution of a tensor dim to a rank's traffic: a factor of each figure.
  struct Factors {
    int64_t own = 1;
    int64_t needed = 1;
    int64_t sent = 1;
    int64_t sources = 1;
    int64_t receivers = 1;
  };
  struct PeersOfDim {
    ByCoordinates<Peers> sources;
    ByCoordinates<Peers> receivers;
    ByCoordinates<Factors> factors;  // with one round
  };

  struct Adjacency;  // which members of a group have something for which (mesh_components.cpp)

  const Mesh& mesh() const { return before_.mesh(); }
  const Coordinates& coordinates(int64_t position) const;

  // Counts (mesh_exchange.cpp)
  Traffic closed_form(int64_t own, bool sends) const;  // for a rank that keeps `own` elements
  Traffic walked_at(int64_t position) const;
  Traffic walked_in_rounds(const Coordinates& at) const;
  Traffic pairwise_at(int64_t position) const;
  PeersOfDim& peers_of_dim(int tensor_dim) const;
  Factors factors_at(int tensor_dim, const Coordinates& at) const;
  const Peers& sources_at(int tensor_dim, const Coordinates& at, const IntervalList& needed) const;
  const Peers& receivers_at(int tensor_dim, const Coordinates& at, const IntervalList& held) const;
  // Those with parts of a layout that intersect a list, among ranks that differ only in some mesh dims.
  Peers peers_in(const Layout& layout, int tensor_dim, const Coordinates& at, MeshDimSet varying,
                 const IntervalList& list) const;
  // The messages of all rounds to or from ranks that exchange so much in each tensor dim.
  int64_t messages_with(const std::vector<const Peers*>& by_dim) const;
  std::map<int64_t, int64_t> lengths(const Layout& layout, int tensor_dim, int64_t position) const;
  template <typename Visit>
  void for_each_message(Rank rank, Direction direction, const Visit& visit) const;

  // Groups (mesh_components.cpp)
  Adjacency adjacency_of(const Group& group) const;
  Adjacency adjacency_by_pairs(const Group& group) const;
  bool find_all_exchange(Group& group) const;

  // Extents (mesh_pairs.cpp)
  static SharedRuns shared_runs(const Part& held, const Part& needed);
  Part part(KnownParts& parts, int tensor_dim, int64_t position) const;
  // Valid until the next call with another position.
  const PartsOfRank& parts_at(KnownParts& parts, PartsAt& at, int64_t position) const;
  const PartsOfRank& held(int64_t position) const { return parts_at(held_, held_at_, position); }
  const PartsOfRank& needed(int64_t position) const { return parts_at(needed_, needed_at_, position); }
  bool may_send(int64_t from, int64_t to) const { return reads_from(before_, group_dims_, from, to); }
  Extent shared(const PartsOfRank& held, const PartsOfRank& needed) const;
  // The same where it is known what they share.
  template <typename RunsOf>
  Extent shared(const PartsOfRank& held, const PartsOfRank& needed, const RunsOf& runs_of) const;
  Transfer in_rounds(const PartsOfRank& held, const PartsOfRank& needed, const Extent& whole, Interval range) const;
  const std::vector<Overlap>& overlaps(int tensor_dim, int64_t position, bool others_hold) const;
  ByCoordinates<std::vector<Overlap>> no_overlaps_yet(int tensor_dim, bool others_hold) const;
  void overlap_below(const IntervalList& list, std::span<const Cut> cuts, int64_t times, Overlaps& with) const;
  void add_overlap(const IntervalList& theirs, int64_t times, Overlaps& with) const;
  int profile_in(int tensor_dim, int64_t position) const;
  const std::vector<MessageClass>& classes_of(int64_t position, bool others_hold) const;
  const std::vector<MessageClass>& one_by_one(const Group& group, int64_t position, bool others_hold) const;

  const Layout& before_;
  const Layout& after_;
  const MeshDimSet group_dims_;
  const Sharing sharing_;
  const int64_t rounds_;
  const size_t ndim_;
  const MeshDimSet cutting_;   // of the group's mesh dims those that cut `before`: members hold different parts there
  const MeshDimSet replicas_;  // the group's other mesh dims
  const std::vector<int> spanned_;  // the group's mesh dims
  const int64_t idle_receivers_;    // receivers that differ only in mesh dims that cut nothing after
  SharedElements common_;

  bool is_regular_ = false;
  std::vector<Matching::Common> ties_;
  // Figures of a regular exchange: the elements that every rank needs, the ranks that they come from, the elements from
  // each, and those that a rank sends if it sends anything. A rank whose coordinates differ in a tie with replicas
  // sends nothing.
  int64_t needed_by_each_ = 0;
  int64_t sources_ = 1;
  int64_t from_each_ = 1;
  int64_t sent_ = 0;
  std::vector<Matching::Common> ties_with_replicas_;

  // All that follows is computed when it is first asked for.
  mutable std::vector<Rank> ranks_;
  mutable KnownParts held_;
  mutable KnownParts needed_;
  mutable int64_t position_ = -1;  // of coordinates_
  mutable Coordinates coordinates_;
  mutable std::vector<PeersOfDim> peers_;                  // by tensor dim
  mutable std::unordered_map<int64_t, Traffic> pairwise_;  // for whole groups, with sharing
  mutable std::unordered_map<int64_t, Group> groups_;      // by their least position
  mutable PartsAt held_at_;
  mutable PartsAt needed_at_;
  mutable std::optional<Transfer> any_;                           // the transfer of any pair of a regular exchange
  mutable std::vector<MessageClass> classes_;                     // what sends() or receives() returned
  mutable std::vector<const std::vector<Overlap>*> overlapping_;  // in classes_of(), by tensor dim
  mutable std::vector<size_t> combination_;
  mutable PartsOfRank others_;
  mutable std::deque<IntervalList> lists_;                                 // of overlaps
  mutable std::map<std::vector<int64_t>, std::vector<Extent>> in_rounds_;  // by everything that they depend on
  mutable std::vector<ByCoordinates<std::vector<Overlap>>> overlaps_;  // two per tensor dim: receivers, then holders
  mutable std::vector<ByCoordinates<int>> profiles_;                   // by tensor dim
  mutable std::vector<std::map<std::vector<int64_t>, int>> known_profiles_;
};

}  // namespace shardwright
