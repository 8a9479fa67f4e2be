// The messages between ranks when a tensor moves from one layout to another, on one mesh or between two. The move may
// take the full tensor or a box of it, permute dims, and read or write ordered pieces or flattened dims.
//
//   1. A rank keeps the elements that it needs and already has. It receives every other element that it needs from
//      exactly one sender.
//   2. A rank sends a message to a peer if and only if the peer receives one from it: the same elements in the same
//      order.
//   3. The messages depend only on the constructor's arguments, so all ranks compute the same ones without
//      communication.
//
// A *message* is the elements that one rank sends another. The sender and the receiver are each other's *peer*.
//
// Example: 12 rows move from ranks 0 to 3 on (a=2, b=2) with [S(0), R] to ranks 4 to 6 on (c=3) with [S(0)].
//
//   const GridExchange exchange(src, dst, ReplicaPolicy::kEvenBytes);
//   exchange.ranks()                                 ranks 0 to 6
//   exchange.messages(Rank{1}, Direction::kSend)     row 3 to rank 4, rows 4 and 5 to rank 5
//   exchange.messages(Rank{5}, Direction::kReceive)  rows 4 and 5 from rank 1, rows 6 and 7 from rank 2
//   exchange.message_sizes(Rank{5}, ...)             2 elements from rank 1, 2 from rank 2
//   exchange.num_elements(Rank{1}, Direction::kSend) 3
//   exchange.kept(Rank{5})                           nullopt: the rank had nothing before
//
// Three classes implement this interface. exchange_of (moves/step_exchange.h) chooses one for a step.
//
//   GridExchange     Layouts that are partitions and flatten the same dims, on any meshes. A count costs O(axes + log
//                    ranks), construction O(ranks + overlaps of parts).
//   IndexedExchange  All other layouts, on any meshes. Construction lists every message. A count costs O(messages of
//                    the rank).
//   MeshExchange     One mesh, within groups of ranks that differ only in some mesh dims. A count costs O(digits) if
//                    cuts are even, whatever the size of the mesh; else O(parts that overlap).
//
// A list of messages costs O(its length), in a MeshExchange O(ranks of the group). Thread safety: a MeshExchange caches
// results and must be used by one thread; the other classes are immutable and may be shared between threads.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "cost/cost.h"
#include "layout/rank.h"
#include "layout/selection.h"

namespace shardwright {

enum class Direction : uint8_t { kSend, kReceive };

// Returns the part of a message's range that is sent in round `round` of `rounds`, counted from 0. The lengths of parts
// differ by at most 1, so some are empty if there are more rounds than elements. Example: rounds 0, 1 and 2 of 3 send
// [0, 2), [2, 5) and [5, 8) of [0, 8).
Interval in_round(Interval range, int64_t round, int64_t rounds);

class Exchange {
 public:
  struct Message {
    Rank peer{};
    Selection elements;  // with their places in the local tensors of sender and receiver
  };
  struct MessageSize {
    Rank peer{};
    int64_t elements = 0;
  };

  // `item_bytes` is the size of an element.
  explicit Exchange(int64_t item_bytes) : item_bytes_(item_bytes) {}
  virtual ~Exchange() = default;

  // Returns the ranks of both meshes, ascending. All other ranks send and receive nothing.
  virtual const std::vector<Rank>& ranks() const = 0;

  // ---- Counts. The defaults compute them from message sizes and regions.

  // Returns true if some rank receives elements.
  virtual bool communicates() const = 0;
  // Returns true if some message is sent from one node to another. A node is `ranks_per_node` consecutive ranks; with 0
  // there is only one node.
  virtual bool crosses_nodes(int64_t ranks_per_node) const;
  // Returns the number of elements that a rank sends to all peers, or receives from all peers.
  virtual int64_t num_elements(Rank rank, Direction direction) const;
  // Returns an upper bound on the number of messages that a rank sends or receives.
  virtual int64_t messages_at_most(Rank rank, Direction direction) const;
  // Returns the sum, over all ranks, of the elements that the rank needs, including elements that it keeps.
  virtual int64_t total_needed_elements() const;
  // Returns a rank's traffic. A message counts once per round, but at most once per element.
  virtual Traffic traffic(Rank rank, int64_t rounds = 1) const;
  // Returns the largest value of each count over all ranks.
  virtual StepCounts maxima(int64_t rounds = 1) const;

  // ---- Messages, by ascending peer, one per peer, none empty

  // Return the messages that a rank sends or receives: their numbers of elements, and the elements.
  virtual std::vector<MessageSize> message_sizes(Rank rank, Direction direction) const = 0;
  virtual std::vector<Message> messages(Rank rank, Direction direction) const = 0;
  // Returns the elements that a rank has before and needs after, possibly none; nullopt if it is not on both meshes.
  std::optional<Selection> kept(Rank rank) const;

  // ---- Local tensors, before the exchange (kSend) and after it (kReceive)

  // Returns the indices of each axis in a rank's local tensor, in local order; nullopt if the rank is not on that
  // side's mesh. An axis is a tensor dim, or several that one side flattens.
  virtual std::optional<Region> region(Rank rank, Direction side) const = 0;
  // Returns, for each axis, the dims of a rank's local tensor that form the axis. The rank must be on that side's mesh.
  virtual std::vector<LocalAxis> local_axes(Rank rank, Direction side) const = 0;

  // Returns the number of elements that must be sent, by their candidate senders: all ranks that hold them before the
  // exchange, ascending. An element counts once for each receiver. Returns nullopt if the numbers are not known.
  virtual std::optional<std::map<std::vector<Rank>, int64_t>> demand() const { return std::nullopt; }

 protected:
  int64_t item_bytes() const { return item_bytes_; }

 private:
  int64_t item_bytes_;
};

}  // namespace shardwright
