// Chooses the collective or messages for a transfer and the ranks that take part, and determines which data needs no
// packing. `start` and `exchange` (transfers.h) turn the choice into instructions, and move_memory.cpp counts the
// memory of these instructions.
//
// A choice depends only on information that all participating ranks have: layouts, the lowering, and the pairs of ranks
// that exchange anything. So all ranks make the same choice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "cost/lowering.h"
#include "exchange/mesh_exchange.h"
#include "moves/step.h"

namespace shardwright {

enum class TransferMethod : uint8_t {
  kAllGather,  // the transport's all-gather: every rank sends its whole part, and all parts have one size
  kAllToAll,   // an all-to-all among all ranks that take part, also between ranks that exchange nothing
  kMessages,   // messages between the ranks that exchange anything
};

// The transfer of one member of a group in a step that moves data.
struct DataMove {
  std::optional<TransferMethod> transfer_method;  // not set: the member copies its own elements and exchanges nothing
  std::vector<size_t> partners;  // members of the group that take part, this one included; empty for all
};

// Returns the transfer of one member (an index into the group's members) in a step that moves data. All members take
// part in an all-gather, with named_groups_only, if the lowering does not narrow groups, or in a group of more than 512
// ranks. Otherwise only the member's connected component takes part, where an edge joins two members that exchange
// data. Computes the connected components of the group on first use.
DataMove data_move_of(const Step& step, const MeshExchange& exchange, MeshExchange::Group& group, size_t member,
                      Lowering lowering, bool named_groups_only);

// Returns the collective or messages for a crossing or rearrangement between meshes that together have `num_ranks`
// ranks.
TransferMethod transfer_method_between_meshes(size_t num_ranks, Lowering lowering);

// Returns true if an all-to-all should include the rank's own part of `own` elements, because copying the part
// separately would copy more elements. `packed_with_it` and `packed_without` are the numbers of elements to pack and
// unpack with and without the own part.
inline bool sends_own_part(int64_t packed_with_it, int64_t packed_without, int64_t own) {
  return packed_with_it < packed_without + own;
}

// Determines whether messages are one run in their tensor, as collectives require: in the order of add(), each message
// begins where the one before ends. Empty messages are ignored. The elements [4, 6), [6, 6) and [6, 10) are a run of 6
// elements; [4, 6) and [8, 10) are none.
class RunOfMessages {
 public:
  // Adds the next message, of `count` elements. `is_run` is true if it is one run in the tensor, which begins at the
  // element with index `first`; otherwise `first` is ignored.
  void add(int64_t count, int64_t first, bool is_run) {
    if (count == 0) return;
    if (total_ == 0) first_ = first;
    is_run_ = is_run_ && is_run && (total_ == 0 || first == next_);
    next_ = first + count;
    total_ += count;
  }
  // Returns true if the messages added so far are one run, or if all of them are empty.
  bool is_run() const { return is_run_; }
  int64_t first() const { return first_; }  // first element of the run, if there is a message
  int64_t total() const { return total_; }  // number of elements of all messages
  // Sets the result of total(), for callers that stop adding messages once is_run() is false.
  void set_total(int64_t total) { total_ = total; }

 private:
  bool is_run_ = true;
  int64_t first_ = 0;
  int64_t next_ = 0;
  int64_t total_ = 0;
};

// Returns the collective or messages for the second half of a composed all-reduce, in which every rank receives the
// other ranks' reduced chunks: an all-to-all, which sends a copy of a rank's chunk to each member, if the largest
// chunk has at most kMaxCopiedGatherBytes; otherwise messages. `chunk_bytes` is the size of the largest chunk.
TransferMethod transfer_method_of_reduced_chunks(int64_t chunk_bytes);

// Returns true if a gather uses the transport's own all-gather.
bool gathers_natively(Lowering lowering, bool parts_are_equal);

// Returns true if the all-to-alls of a step, each with one of `shares` equal shares of its data, are sent as one
// message per peer instead of by the transport's own all-to-all (AllToAll::by_messages).
bool all_to_alls_use_messages(const Step& step, int64_t shares, Lowering lowering);

}  // namespace shardwright
