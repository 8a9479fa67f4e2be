// The messages between ranks when a tensor goes from one layout to another: on one mesh or between two, as a
// whole or a box of it, with dims in another order, in pieces or flattened.
//
//   1. A rank keeps the elements that it needs and has already. Every other element that it needs comes from exactly
//      one sender.
//   2. A rank sends a message to a peer exactly if the peer receives one from it: the same elements, in the same order.
//   3. The answer depends on what the exchange was made from alone, so all ranks find the same one without talking.
//
// Example: 12 rows, on ranks 0 to 3 as (a=2, b=2) with [S(0), R], go to ranks 4 to 6 as (c=3) with [S(0)].
//
//   const GridExchange exchange(src, dst, Sharing::kBytes);
//   exchange.ranks()                                 ranks 0 to 6
//   exchange.messages(Rank{1}, Direction::kSend)     row 3 to rank 4, rows 4 and 5 to rank 5
//   exchange.messages(Rank{5}, Direction::kReceive)  rows 4 and 5 from rank 1, rows 6 and 7 from rank 2
//   exchange.message_sizes(Rank{5}, ...)             2 elements from rank 1, 2 from rank 2
//   exchange.num_elements(Rank{1}, Direction::kSend) 3
//   exchange.kept(Rank{5})                           nullopt: the rank had nothing before
//
// Three classes answer; exchange_of (moves/step_exchange.h) chooses for a step.
//
//   GridExchange     layouts that are partitions and flatten the same dims, on any meshes. A count costs O(axes + log
//                    ranks), after O(ranks + overlaps of parts).
//   IndexedExchange  all other layouts, on any meshes. Lists every message when it is made. A count costs O(messages of
//                    the rank).
//   MeshExchange     one mesh, among ranks that differ in some mesh dims only. A count costs O(digits) where cuts are
//                    even, the same for 8 and for a million ranks; else O(parts that overlap).
//
// A list of messages costs O(its length), on one mesh O(ranks of the group). Exchanges are immutable and may be shared
// between threads; a MeshExchange is for one thread.
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

// Returns the part of a range that is sent in one of several rounds.
Interval in_round(Interval range, int64_t round, int64_t rounds);

class Exchange {
 public:
  struct Message {
    Rank peer{};
    Selection elements;
  };
  struct MessageSize {
    Rank peer{};
    int64_t elements = 0;
  };

  explicit Exchange(int64_t item_bytes) : item_bytes_(item_bytes) {}
  virtual ~Exchange() = default;

  // The ranks of both meshes, ascending. All others send and receive nothing.
  virtual const std::vector<Rank>& ranks() const = 0;

  // ---- Counts. By default they are made from message sizes and regions.

  // Returns whether some rank receives something.
  virtual bool communicates() const = 0;
  // Returns whether some message goes from one node to another. A node is `ranks_per_node` consecutive ranks; with 0
  // there is only one node.
  virtual bool crosses_nodes(int64_t ranks_per_node) const;
  // The elements that a rank sends or receives.
  virtual int64_t num_elements(Rank rank, Direction direction) const;
  // A number of messages that a rank sends or receives at most.
  virtual int64_t messages_at_most(Rank rank, Direction direction) const;
  // The number of elements that all ranks need, whether or not they have them.
  virtual int64_t needed_by_all() const;
  // A message counts once per round, but at most once per element.
  virtual Traffic traffic(Rank rank, int64_t rounds = 1) const;
  // The largest value of each figure over all ranks.
  virtual StepFigures worst(int64_t rounds = 1) const;

  // ---- Messages, by ascending peer, one per peer, none empty

  virtual std::vector<MessageSize> message_sizes(Rank rank, Direction direction) const = 0;
  virtual std::vector<Message> messages(Rank rank, Direction direction) const = 0;
  // The elements that a rank has before and needs after; nullopt if it is not on both meshes.
  std::optional<Selection> kept(Rank rank) const;

  // ---- Local tensors, before the exchange (kSend) and after it (kReceive)

  // The indices of each axis in a rank's local tensor, in local order; nullopt if the rank is not on that mesh. An axis
  // is a tensor dim, or several that one side flattens.
  virtual std::optional<Region> region(Rank rank, Direction side) const = 0;
  // The place of each axis in the local tensor of a rank that is on that mesh.
  virtual std::vector<LocalAxis> local_axes(Rank rank, Direction side) const = 0;

  // The elements that receivers want of each set of ranks that have the same ones; nullopt if that is not known.
  virtual std::optional<std::map<std::vector<Rank>, int64_t>> demand() const { return std::nullopt; }

 protected:
  int64_t item_bytes() const { return item_bytes_; }

 private:
  int64_t item_bytes_;
};

}  // namespace shardwright
