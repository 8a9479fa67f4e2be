// Decides which instruction carries a transfer, among which ranks, and what of it needs no packing. `start` and
// `exchange` (transfers.h) turn it into instructions, and move_memory.cpp counts what these allocate.
//
// Decisions depend only on what all ranks that take part know: layouts, the lowering, and who has something for whom.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "cost/lowering.h"
#include "exchange/mesh_exchange.h"
#include "moves/step.h"

namespace shardwright {

enum class Carrier : uint8_t {
  kAllGather,  // the transport's all-gather: every rank sends everything that it has, equally much on all ranks
  kAllToAll,   // among all ranks of the group
  kMessages,   // among the ranks that have something for each other
};

// The part of one member of a group in a step that moves data.
struct DataMove {
  std::optional<Carrier> carrier;  // if there is none, the rank exchanges nothing and only copies
  std::vector<size_t> partners;    // members of the group that take part, this one included; empty: all
};

// With named_groups_only all members of the group take part, otherwise only those that are connected to this one by
// what they exchange, if the lowering narrows groups. Makes or reads the connections of the group.
DataMove data_move_of(const Step& step, const MeshExchange& exchange, MeshExchange::Group& group, size_t member,
                      Lowering lowering, bool named_groups_only);

// For a crossing between meshes that have `num_ranks` ranks together.
Carrier carrier_between_meshes(size_t num_ranks, Lowering lowering);

// Returns true if an all-to-all should send the rank's own part along, of `own` elements: if fewer elements are then
// packed and unpacked than are without it, the copy of the own part included.
inline bool own_part_travels(int64_t packed_with_it, int64_t packed_without, int64_t own) {
  return packed_with_it < packed_without + own;
}

// Finds out whether messages are one run in their tensor, as collectives need them to be: in the order in which they
// are added, each begins where the one before ends. Empty ones are anywhere.
class RunOfMessages {
 public:
  // `first` is the message's place in the tensor, if it is one run there.
  void add(int64_t count, int64_t first, bool is_run) {
    if (count == 0) return;
    if (total_ == 0) first_ = first;
    is_run_ = is_run_ && is_run && (total_ == 0 || first == next_);
    next_ = first + count;
    total_ += count;
  }
  bool is_run() const { return is_run_; }
  int64_t first() const { return first_; }  // of the run, if there is a message
  int64_t total() const { return total_; }
  // For a caller that stops adding once it is known that there is no run.
  void set_total(int64_t total) { total_ = total; }

 private:
  bool is_run_ = true;
  int64_t first_ = 0;
  int64_t next_ = 0;
  int64_t total_ = 0;
};

// For the second half of a composed all-reduce, in which every rank gets the other ranks' reduced chunks. In an
// all-to-all a rank sends a copy of its chunk for each member; `chunk_bytes` is the size of the largest chunk.
Carrier carrier_of_reduced_chunks(int64_t chunk_bytes);

// Returns whether a gather is the transport's own.
bool gathers_natively(Lowering lowering, bool parts_are_equal);

// Returns whether the all-to-alls that carry out a step, in `shares` parts, send a message to each peer instead of
// using the transport's own (AllToAll::by_messages).
bool all_to_alls_go_by_messages(const Step& step, int64_t shares, Lowering lowering);

}  // namespace shardwright
